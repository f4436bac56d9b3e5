// Letters from a rank whose memory anything may have overwritten: a receive gets what is whole, or
// an error. Neither may touch memory beside its own, nor wait for ever.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

#include "coll/control.h"
#include "coll/group.h"
#include "coll/mesh.h"
#include "coll/shared_memory.h"
#include "convoy/store.h"

namespace {

using namespace convoy;
using namespace convoy::coll;

constexpr auto kLimit = std::chrono::milliseconds(2);

// The input, a piece at a time; zeros after its end.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}
  bool empty() const { return left_.empty(); }
  template <class T>
  T take() {
    T value{};
    const auto bytes = left_.first(std::min(sizeof value, left_.size()));
    std::memcpy(&value, bytes.data(), bytes.size());
    left_ = left_.subspan(bytes.size());
    return value;
  }

 private:
  std::span<const std::uint8_t> left_;
};

// Two ranks that are threads; the second one never takes part.
struct Pair {
  Pair() {
    const auto store = make_local_store();
    std::thread other([&] { second = Group::create(store, 1, 2, {.name = "fuzz"}); });
    first = Group::create(store, 0, 2, {.name = "fuzz"});
    other.join();
    base = mesh_of(*first->medium())->control().data();
  }

  std::shared_ptr<Group> first, second;
  std::byte* base;
};

void write_letter(Input& input, const Layout& layout, const Pair& pair, std::uint64_t number) {
  Letter& letter = layout.channel(pair.base, 1, 0).letter(number);
  letter.header.tag = input.take<std::uint8_t>() % 2;
  const auto choice = input.take<std::uint8_t>();
  letter.header.bytes = choice < 128 ? choice : input.take<std::uint64_t>();
  letter.header.type = static_cast<DataType>(input.take<std::uint8_t>());
  letter.header.kind = static_cast<Letter::Kind>(input.take<std::uint8_t>());
  letter.body = input.take<std::array<std::byte, Letter::kBodyBytes>>();
  letter.number.store(number, std::memory_order_release);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Layout layout(2);
  Input input(data, size);
  const Pair pair;
  std::array<std::byte, 128> buffer;
  for (std::uint64_t number = 1; number <= 8 && !input.empty(); ++number) {
    write_letter(input, layout, pair, number);
    const auto bytes = input.take<std::uint8_t>() % buffer.size();
    const auto source = input.take<std::uint8_t>() % 2 == 0 ? 1 : kAnyRank;
    const std::vector<std::byte> before(buffer.begin(), buffer.end());
    try {
      pair.first->recv(buffer.data(), bytes, DataType::kU8, source, {.timeout = kLimit});
    } catch (const Error&) {
      // Broken for good: by a letter, or because nothing came.
      if (pair.first->broken()) break;
    }
    if (std::memcmp(before.data() + bytes, buffer.data() + bytes, buffer.size() - bytes) != 0) {
      std::abort();  // beside what was asked for
    }
  }
  return 0;
}
