#include "store/protocol.h"

#include <bit>
#include <cstring>

#include "base/error.h"

namespace convoy {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire order is the native one");

constexpr std::array<char, 4> kMagic = {'C', 'V', 'S', '1'};

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
  fail(ErrorKind::kInvalidArgument, "store protocol: ", why);
}

std::vector<std::string> parse_parts(std::string_view body, std::size_t limit) {
  std::vector<std::string> parts;
  while (!body.empty()) {
    if (body.size() < sizeof(std::uint32_t)) bad_frame("a part's length is cut off");
    const auto length = take<std::uint32_t>(body.data());
    body.remove_prefix(sizeof length);
    if (length > body.size()) bad_frame("a part is longer than its message");
    if (parts.size() == limit) bad_frame("too many parts in one message");
    parts.emplace_back(body.substr(0, length));
    body.remove_prefix(length);
  }
  return parts;
}

}  // namespace

std::string encode(const StoreMessage& message) {
  std::size_t body = 0;
  for (const auto& part : message.parts) body += sizeof(std::uint32_t) + part.size();
  if (body > UINT32_MAX) {
    fail(ErrorKind::kResource, "store message of ", body, " bytes: too large for one message");
  }
  std::string out;
  out.reserve(kStoreHeaderBytes + body);
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
  return out;
}

void StoreDecoder::feed(std::span<const std::byte> bytes) {
  if (begin_ == buffer_.size()) {
    buffer_.clear();
    begin_ = 0;
  } else if (begin_ > (std::size_t{1} << 16) && begin_ > buffer_.size() / 2) {
    buffer_.erase(0, begin_);
    begin_ = 0;
  }
  buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::optional<StoreMessage> StoreDecoder::next() {
  const std::string_view unread = std::string_view(buffer_).substr(begin_);
  // A stranger is recognised by its first bytes, before it has sent a whole header.
  const auto magic = unread.substr(0, kMagic.size());
  if (magic != std::string_view(kMagic.data(), magic.size())) bad_frame("bad magic");
  if (unread.size() < kStoreHeaderBytes) return std::nullopt;
  const auto body_size = take<std::uint32_t>(unread.data() + 4);
  if (body_size > limits_.body_bytes) bad_frame("a message is larger than the limit");
  const auto code = take<std::uint32_t>(unread.data() + 12);
  if (code > 0xff) bad_frame("reserved bytes are not zero");
  if (unread.size() - kStoreHeaderBytes < body_size) return std::nullopt;

  StoreMessage message;
  message.id = take<std::uint32_t>(unread.data() + 8);
  message.code = static_cast<std::uint8_t>(code);
  message.number = take<std::int64_t>(unread.data() + 16);
  message.timeout_us = take<std::uint64_t>(unread.data() + 24);
  message.parts = parse_parts(unread.substr(kStoreHeaderBytes, body_size), limits_.parts);
  begin_ += kStoreHeaderBytes + body_size;
  return message;
}

}  // namespace convoy
