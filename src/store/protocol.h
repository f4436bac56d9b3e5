#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace convoy {

// What a request asks for. The parts of each are listed as [..]; `number` and `timeout_us` are 0
// where they are not named.
enum class StoreOp : std::uint8_t {
  kSet = 1,     // [key, value]
  kTryGet,      // [key] -> [value] or []
  kGet,         // [key], timeout_us -> [value]
  kWait,        // [key...], timeout_us
  kCheck,       // [key...] -> number 1 or 0
  kAdd,         // [key], number -> number
  kAppend,      // [key, value]
  kCompareSet,  // [key, expected, desired] -> [value]
  kErase,       // [key] -> number 1 or 0
  kKeys,        // [prefix] -> [key...]
  kWatch,       // [key], number (since), timeout_us -> number (version), [value] or []
};
inline constexpr auto kLastStoreOp = StoreOp::kWatch;

// A reply's code: 0, or 1 + the ErrorKind, with the message as its only part.
inline constexpr std::uint8_t kReplyOk = 0;

// A request or a reply. On the wire, little-endian:
//
//   offset  bytes  field
//        0      4  magic "CVS1"
//        4      4  size of the body
//        8      4  request id, chosen by the client, repeated in the reply
//       12      1  code: StoreOp in a request, status in a reply
//       13      3  zero
//       16      8  number (signed)
//       24      8  timeout in microseconds, relative
//       32      -  body: parts, each a length (4 bytes) and as many bytes
struct StoreMessage {
  std::uint8_t code = 0;
  std::uint32_t id = 0;
  std::int64_t number = 0;
  std::uint64_t timeout_us = 0;
  std::vector<std::string> parts = {};
};

inline constexpr std::size_t kStoreHeaderBytes = 32;

std::string encode(const StoreMessage& message);

// Bounds that a frame must keep before memory is taken for it.
struct FrameLimits {
  std::size_t body_bytes;
  std::size_t parts;
};

// Takes bytes as they arrive and gives messages. After it has thrown (kInvalidArgument: the bytes
// are not of this protocol, or a bound is exceeded) the stream cannot be read on.
class StoreDecoder {
 public:
  explicit StoreDecoder(const FrameLimits& limits) : limits_(limits) {}

  void feed(std::span<const std::byte> bytes);
  // The next whole message, or nullopt until more bytes are fed.
  std::optional<StoreMessage> next();

 private:
  FrameLimits limits_;
  std::string buffer_;
  std::size_t begin_ = 0;  // where the first unread message begins in buffer_
};

}  // namespace convoy
