// StoreDecoder on any bytes in any pieces: it gives whole messages or throws kInvalidArgument,
// keeps its limits, and gives the same messages whatever the pieces. What it gives encodes to the
// bytes that were read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "convoy/error.h"
#include "store/protocol.h"

namespace {

using convoy::StoreDecoder;
using convoy::StoreMessage;

constexpr convoy::FrameLimits kLimits{.body_bytes = 300, .parts = 6};

void require(bool condition) {
  if (!condition) std::abort();
}

void check(const StoreMessage& message) {
  if (message.oversized) return require(message.parts.empty());
  std::size_t bytes = 0;
  for (const auto& part : message.parts) bytes += 4 + part.size();
  require(bytes <= kLimits.body_bytes && message.parts.size() <= kLimits.parts);
}

struct Outcome {
  std::vector<StoreMessage> messages;
  bool thrown = false;

  friend bool operator==(const Outcome&, const Outcome&) = default;
};

// The size of each piece follows from `seed`.
Outcome decode(std::string_view bytes, std::uint32_t seed) {
  Outcome outcome;
  StoreDecoder decoder(kLimits);
  try {
    while (!bytes.empty()) {
      seed = seed * 1664525 + 1013904223;
      const std::string_view piece = bytes.substr(0, 1 + (seed >> 16) % (seed % 7 == 0 ? 400 : 12));
      bytes.remove_prefix(piece.size());
      decoder.feed(std::as_bytes(std::span(piece)));
      while (auto message = decoder.next()) outcome.messages.push_back(std::move(*message));
    }
  } catch (const convoy::Error& error) {
    require(error.kind() == convoy::ErrorKind::kInvalidArgument);
    outcome.thrown = true;
  }
  return outcome;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 4) return 0;
  const std::uint32_t seed = data[0] | (data[1] << 8);
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 4, size - 4);
  const Outcome pieces = decode(bytes, seed);
  require(pieces == decode(bytes, data[2] | (data[3] << 8)));

  std::string again;
  bool any_oversized = false;
  for (const auto& message : pieces.messages) {
    check(message);
    any_oversized |= message.oversized;
    if (!message.oversized) again += encode(message);
  }
  // Nothing is in the bytes that the messages do not carry.
  if (!any_oversized) require(bytes.substr(0, again.size()) == again);

  const Outcome round = decode(again, seed);
  require(!round.thrown);
  std::size_t kept = 0;
  for (const auto& message : pieces.messages) {
    if (!message.oversized) require(round.messages.at(kept++) == message);
  }
  require(kept == round.messages.size());
  return 0;
}
