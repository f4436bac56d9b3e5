#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "convoy/error.h"

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

// "set", "try_get", ...; "operation 77" for a number that is none.
std::string to_string(StoreOp op);

// A reply's code: 0, or 1 + the ErrorKind, with the message as its only part.
inline constexpr std::uint8_t kReplyOk = 0;

// An error reply with this id answers no request: it says why the server closes the connection.
inline constexpr std::uint32_t kConnectionId = 0;

// A request or a reply. On the wire, little-endian:
//
//   offset  bytes  field
//        0      4  magic "CVS1"
//        4      4  size of the body
//        8      4  request id, chosen by the client (not 0), repeated in the reply
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
  // Not on the wire: the decoder sets it on a message beyond its limits, whose parts it dropped.
  bool oversized = false;

  friend bool operator==(const StoreMessage&, const StoreMessage&) = default;
};

inline constexpr std::size_t kStoreHeaderBytes = 32;

// Throws kResource for a message that the format cannot hold (4 GiB).
std::string encode(const StoreMessage& message);
// As encode() of a message with one more part of `tail_bytes` bytes, but without those bytes: they
// must be sent next.
std::string encode_before(const StoreMessage& message, std::size_t tail_bytes);

// The reply that makes the client throw Error(kind, message).
StoreMessage error_reply(std::uint32_t id, ErrorKind kind, const std::string& message);
// Throws what an error reply carries; returns any other.
StoreMessage checked_reply(StoreMessage reply);

// A key or a value as messages show it: in quotes, cut when long, bytes that are no printable text
// as \x1f.
std::string printable(std::string_view bytes);

// What a message may hold.
struct FrameLimits {
  std::size_t body_bytes;
  std::size_t parts;
};

// Takes bytes as they arrive and gives messages. A message beyond a limit is not kept: in its place
// comes one that is marked `oversized`, and the stream goes on. After it has thrown
// (kInvalidArgument: the bytes are not of this protocol) the stream cannot be read on.
class StoreDecoder {
 public:
  explicit StoreDecoder(const FrameLimits& limits) : limits_(limits) {}

  void feed(std::span<const std::byte> bytes);
  // The next whole message, or nullopt until more bytes are fed.
  std::optional<StoreMessage> next();
  // Treats the message of which a part has arrived as oversized, to get its memory back. No effect
  // if its header is not there yet.
  void skip_incomplete();

  // Bytes that have been fed and not been given out.
  std::size_t buffered() const { return buffer_.size() - begin_; }

 private:
  struct Header {
    StoreMessage message;
    std::size_t body_bytes;
  };

  std::string_view unread() const { return std::string_view(buffer_).substr(begin_); }
  std::optional<Header> header() const;
  void skip(const Header& header);
  void drop_skipped();
  void consume(std::size_t bytes);

  FrameLimits limits_;
  std::string buffer_;
  std::size_t begin_ = 0;  // where the first unread message begins in buffer_
  std::optional<StoreMessage> skipped_;
  std::size_t left_to_skip_ = 0;  // of skipped_
};

}  // namespace convoy
