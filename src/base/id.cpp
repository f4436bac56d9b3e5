#include "base/id.h"

#include <sys/random.h>

#include "base/error.h"

namespace convoy {

void random_bytes(std::span<std::byte> out) {
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t n = getrandom(out.data() + done, out.size() - done, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_errno("getrandom");
    done += static_cast<std::size_t>(n);
  }
}

std::uint64_t random_u64() {
  std::uint64_t value = 0;
  random_bytes(std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

Id Id::random() {
  Id id;
  random_bytes(std::as_writable_bytes(std::span(id.bytes)));
  return id;
}

Id Id::parse(std::string_view hex) {
  const auto refuse = [&] {
    fail(ErrorKind::kInvalidArgument, "id ", in_quotes(hex), ": expected 32 lower-case hex digits");
  };
  const auto digit = [&](char c) -> unsigned {
    if (c >= 'a' && c <= 'f') return static_cast<unsigned>(c - 'a') + 10;
    if (c < '0' || c > '9') refuse();
    return static_cast<unsigned>(c - '0');
  };
  if (hex.size() != 32) refuse();
  Id id;
  for (std::size_t i = 0; i < id.bytes.size(); ++i) {
    id.bytes[i] = static_cast<std::uint8_t>(digit(hex[2 * i]) << 4 | digit(hex[2 * i + 1]));
  }
  return id;
}

std::string Id::to_string() const {
  std::string text;
  for (const std::uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::uint64_t hash_bytes(std::span<const std::byte> bytes, std::uint64_t seed) {
  std::uint64_t hash = 0xcbf29ce484222325u ^ seed;
  for (const std::byte byte : bytes) {
    hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3u;
  }
  hash ^= hash >> 32;
  hash *= 0xd6e8feb86659fd93u;
  return hash ^ hash >> 32;
}

std::uint64_t hash_text(std::string_view text, std::uint64_t seed) {
  return hash_bytes(std::as_bytes(std::span(text)), seed);
}

}  // namespace convoy
