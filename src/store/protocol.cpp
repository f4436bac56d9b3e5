#include "store/protocol.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace convoy {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire order is the native one");

constexpr std::array<char, 4> kMagic = {'C', 'V', 'S', '1'};

// What a decoder keeps allocated while it holds little.
constexpr std::size_t kIdleBytes = std::size_t{128} << 10;

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class T>
T take(const char* in) {
  T value;
  std::memcpy(&value, in, sizeof value);
  return value;
}

[[noreturn]] void bad_frame(const char* why) {
  fail(ErrorKind::kInvalidArgument, "store: the peer does not speak the store's protocol: ", why);
}

// nullopt: more than `limit` parts.
std::optional<std::vector<std::string>> parse_parts(std::string_view body, std::size_t limit) {
  std::vector<std::string> parts;
  while (!body.empty()) {
    if (body.size() < sizeof(std::uint32_t)) bad_frame("a part's length is cut off");
    const auto length = take<std::uint32_t>(body.data());
    body.remove_prefix(sizeof length);
    if (length > body.size()) bad_frame("a part is longer than its message");
    if (parts.size() == limit) return std::nullopt;
    parts.emplace_back(body.substr(0, length));
    body.remove_prefix(length);
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
  std::string out;
  out.reserve(kStoreHeaderBytes + body - tail.value_or(0));
  out.append(kMagic.data(), kMagic.size());
  put(out, static_cast<std::uint32_t>(body));
  put(out, message.id);
  put(out, static_cast<std::uint32_t>(message.code));
  put(out, message.number);
  put(out, message.timeout_us);
  for (const auto& part : message.parts) {
    put(out, static_cast<std::uint32_t>(part.size()));
    out += part;
  }
  if (tail) put(out, static_cast<std::uint32_t>(*tail));
  return out;
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

std::string printable(std::string_view bytes) {
  constexpr std::size_t kShown = 120;
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text = "'";
  for (const char c : bytes.substr(0, kShown)) {
    const auto code = static_cast<unsigned char>(c);
    if (code >= 0x20 && code < 0x7f) {
      text += c;
    } else {
      text += "\\x";
      text += kDigits[code >> 4];
      text += kDigits[code & 15];
    }
  }
  text += "'";
  if (bytes.size() > kShown) text += concat("... (", bytes.size(), " bytes)");
  return text;
}

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
  if (magic != std::string_view(kMagic.data(), magic.size())) bad_frame("bad magic");
  if (bytes.size() < kStoreHeaderBytes) return std::nullopt;
  const auto code = take<std::uint32_t>(bytes.data() + 12);
  if (code > 0xff) bad_frame("reserved bytes are not zero");
  return Header{.message = {.code = static_cast<std::uint8_t>(code),
                            .id = take<std::uint32_t>(bytes.data() + 8),
                            .number = take<std::int64_t>(bytes.data() + 16),
                            .timeout_us = take<std::uint64_t>(bytes.data() + 24)},
                .body_bytes = take<std::uint32_t>(bytes.data() + 4)};
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
