#include "store/protocol.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/wire.h"

namespace convoy {
namespace {

constexpr std::string_view kMagic = "CVS1";

// What a decoder keeps allocated while it holds little.
constexpr std::size_t kIdleBytes = std::size_t{128} << 10;

[[noreturn]] void bad_frame(const char* why) {
  fail(ErrorKind::kInvalidArgument, "store: the peer does not speak the store's protocol: ", why);
}

// nullopt: more than `limit` parts.
std::optional<std::vector<std::string>> parse_parts(std::string_view body, std::size_t limit) {
  std::vector<std::string> parts;
  WireReader in(body, "body of the store's");
  while (in.left() > 0) {
    if (in.left() < sizeof(std::uint32_t)) bad_frame("a part's length is cut off");
    const auto length = in.take<std::uint32_t>();
    if (length > in.left()) bad_frame("a part is longer than its message");
    if (parts.size() == limit) return std::nullopt;
    parts.emplace_back(in.take(length));
  }
  return parts;
}

std::string encode_body(const StoreMessage& message, std::optional<std::size_t> tail) {
  std::size_t body = tail ? sizeof(std::uint32_t) + *tail : 0;
  for (const auto& part : message.parts) body += sizeof(std::uint32_t) + part.size();
  if (body > UINT32_MAX) {
    fail(ErrorKind::kResource, "store: a message of ", body, " bytes; the format holds at most ",
         UINT32_MAX);
  }
  std::string bytes;
  bytes.reserve(kStoreHeaderBytes + body - tail.value_or(0));
  WireWriter out(bytes);
  out.put(kMagic);
  out.put(static_cast<std::uint32_t>(body));
  out.put(message.id);
  out.put(static_cast<std::uint32_t>(message.code));
  out.put(message.number);
  out.put(message.timeout_us);
  for (const auto& part : message.parts) out.put_sized<std::uint32_t>(part);
  if (tail) out.put(static_cast<std::uint32_t>(*tail));
  return bytes;
}

}  // namespace

std::string to_string(StoreOp op) {
  switch (op) {
    case StoreOp::kSet: return "set";
    case StoreOp::kTryGet: return "try_get";
    case StoreOp::kGet: return "get";
    case StoreOp::kWait: return "wait";
    case StoreOp::kCheck: return "check";
    case StoreOp::kAdd: return "add";
    case StoreOp::kAppend: return "append";
    case StoreOp::kCompareSet: return "compare_set";
    case StoreOp::kErase: return "erase";
    case StoreOp::kKeys: return "keys";
    case StoreOp::kWatch: return "watch";
  }
  return concat("operation ", static_cast<int>(op));
}

std::string printable(std::string_view bytes) { return in_quotes(bytes, 120); }

std::string encode(const StoreMessage& message) { return encode_body(message, std::nullopt); }

std::string encode_before(const StoreMessage& message, std::size_t tail_bytes) {
  return encode_body(message, tail_bytes);
}

StoreMessage error_reply(std::uint32_t id, ErrorKind kind, const std::string& message) {
  return {
      .code = static_cast<std::uint8_t>(1 + static_cast<int>(kind)), .id = id, .parts = {message}};
}

StoreMessage checked_reply(StoreMessage reply) {
  if (reply.code == kReplyOk) return reply;
  const int kind = reply.code - 1;
  const std::string text = reply.parts.empty() ? "store: error without a text" : reply.parts[0];
  throw Error(kind <= static_cast<int>(ErrorKind::kInternal) ? static_cast<ErrorKind>(kind)
                                                             : ErrorKind::kInternal,
              text);
}

void StoreDecoder::feed(std::span<const std::byte> bytes) {
  buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Moves what is left to the front once that costs less than what was read since the last time, and
// gives memory back after a large message: a thousand idle clients must not hold a thousand of the
// largest requests.
void StoreDecoder::consume(std::size_t bytes) {
  begin_ += bytes;
  if (begin_ < buffer_.size() / 2 || (begin_ < buffer_.size() && begin_ < kIdleBytes / 2)) return;
  buffer_.erase(0, begin_);
  begin_ = 0;
  if (buffer_.capacity() > kIdleBytes && buffer_.size() < kIdleBytes / 2) buffer_.shrink_to_fit();
}

std::optional<StoreDecoder::Header> StoreDecoder::header() const {
  const std::string_view bytes = unread();
  // A stranger is recognised by its first bytes, before it has sent a whole header.
  const auto magic = bytes.substr(0, kMagic.size());
  if (magic != kMagic.substr(0, magic.size())) bad_frame("bad magic");
  if (bytes.size() < kStoreHeaderBytes) return std::nullopt;
  WireReader in(bytes.substr(kMagic.size()), "header of the store's");
  Header header{.message = {}, .body_bytes = in.take<std::uint32_t>()};
  header.message.id = in.take<std::uint32_t>();
  const auto code = in.take<std::uint32_t>();
  if (code > 0xff) bad_frame("reserved bytes are not zero");
  header.message.code = static_cast<std::uint8_t>(code);
  header.message.number = in.take<std::int64_t>();
  header.message.timeout_us = in.take<std::uint64_t>();
  return header;
}

void StoreDecoder::skip(const Header& header) {
  skipped_ = header.message;
  skipped_->oversized = true;
  left_to_skip_ = header.body_bytes;
  consume(kStoreHeaderBytes);
}

void StoreDecoder::drop_skipped() {
  const std::size_t here = std::min(left_to_skip_, buffered());
  left_to_skip_ -= here;
  consume(here);
}

void StoreDecoder::skip_incomplete() {
  if (skipped_) return;
  const auto head = header();
  if (!head) return;
  skip(*head);
  drop_skipped();
}

std::optional<StoreMessage> StoreDecoder::next() {
  if (!skipped_) {
    auto head = header();
    if (!head) return std::nullopt;
    if (head->body_bytes <= limits_.body_bytes) {
      const std::string_view body = unread().substr(kStoreHeaderBytes);
      if (body.size() < head->body_bytes) {
        // Few moves while it grows, and never much more than the peer has really sent.
        const std::size_t all = kStoreHeaderBytes + head->body_bytes;
        if (all > kIdleBytes) buffer_.reserve(begin_ + std::min(all, 8 * buffered()));
        return std::nullopt;
      }
      auto parts = parse_parts(body.substr(0, head->body_bytes), limits_.parts);
      consume(kStoreHeaderBytes + head->body_bytes);
      head->message.oversized = !parts.has_value();
      if (parts) head->message.parts = std::move(*parts);
      return std::move(head->message);
    }
    skip(*head);
  }
  drop_skipped();
  if (left_to_skip_ > 0) return std::nullopt;
  return std::exchange(skipped_, std::nullopt);
}

}  // namespace convoy
