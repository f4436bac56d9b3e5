// StoreTable under any sequence of requests from several clients in virtual time: after every step
// replies, keys, bytes, waiting requests and the next expiry are those of the reference table, so
// every request gets exactly one reply; and no waiter is left when the clients are gone.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "../store/reference_table.h"

namespace {

using convoy::StoreMessage;
using convoy::StoreOp;

// Small enough that every limit is met; 4 clients.
constexpr convoy::StoreLimits kLimits{.key_bytes = 4,
                                      .value_bytes = 1200,
                                      .total_bytes = 5000,
                                      .keys = 6,
                                      .clients = 4,
                                      .waiting_per_client = 3,
                                      .keys_per_request = 4};

// Takes choices from the input; zeros when it is used up.
class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  bool any() const { return left_ > 0; }
  unsigned byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  unsigned below(unsigned count) { return byte() % count; }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

std::string key(Choices& choices) {
  const unsigned choice = choices.byte();
  if (choice == 255) return "large";  // 5 bytes: over the limit
  return std::string(choice % 3, "abc"[choice / 3 % 3]);
}

std::string value(Choices& choices) {
  const unsigned choice = choices.byte();
  switch (choice % 5) {
    case 0: return std::to_string(static_cast<int>(choice) - 128);
    case 1: return choice > 127 ? "9223372036854775807" : "-9223372036854775808";
    case 2: return std::string(choice * 5, 'x');
    case 3: return "";
    default: return std::string(1, static_cast<char>(choice));
  }
}

StoreMessage request(Choices& choices, std::uint32_t id) {
  const unsigned kind = choices.byte();
  StoreMessage next{.code = static_cast<std::uint8_t>(1 + kind % 11), .id = id};
  switch (static_cast<StoreOp>(next.code)) {
    case StoreOp::kSet:
    case StoreOp::kAppend: next.parts = {key(choices), value(choices)}; break;
    case StoreOp::kCompareSet: next.parts = {key(choices), value(choices), value(choices)}; break;
    case StoreOp::kWait:
    case StoreOp::kCheck:
      for (unsigned count = choices.below(6); count > 0; --count)
        next.parts.push_back(key(choices));
      break;
    default: next.parts = {key(choices)};
  }
  if (kind > 250) next.code = static_cast<std::uint8_t>(choices.byte());
  if (kind == 249) next.parts.emplace_back();
  if (kind == 248) next.oversized = true;
  const unsigned number = choices.byte();
  next.number = number == 255   ? INT64_MAX
                : number == 254 ? INT64_MIN
                                : static_cast<int>(number) - 9;
  const unsigned timeout = choices.byte();
  next.timeout_us = timeout == 255 ? UINT64_MAX : timeout / 2;
  return next;
}

void require_same(const std::string& difference) {
  if (difference.empty()) return;
  std::fprintf(stderr, "the table differs from the reference: %s\n", difference.c_str());
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Choices choices(data, size);
  convoy::test::TablePair pair(kLimits);
  std::uint32_t id = 0;
  while (choices.any()) {
    const unsigned step = choices.byte();
    const std::uint64_t client = 1 + step % 4;
    if (step >= 250) {
      require_same(pair.drop(client));
    } else if (step >= 220) {
      require_same(pair.advance(choices.byte()));
    } else {
      require_same(pair.handle(client, request(choices, ++id)));
    }
  }
  for (std::uint64_t client = 1; client <= 4; ++client) require_same(pair.drop(client));
  if (pair.table().waiting() != 0 || pair.table().waiting_bytes() != 0) std::abort();
  return 0;
}
