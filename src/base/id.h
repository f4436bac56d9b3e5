#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace convoy {

// 128 random bits that name a job, a group or a segment. Unguessable, so it may also gate access.
struct Id {
  std::array<std::uint8_t, 16> bytes{};

  static Id random();
  // From 32 hex digits; throws kInvalidArgument.
  static Id parse(std::string_view hex);
  std::string to_string() const;

  friend bool operator==(const Id&, const Id&) = default;
  friend auto operator<=>(const Id&, const Id&) = default;
};

// Fills `out` from the kernel's random source.
void random_bytes(std::span<std::byte> out);
std::uint64_t random_u64();

// FNV-1a with a final mix: for tables and fingerprints, not for secrets. Stable across machines.
std::uint64_t hash_bytes(std::span<const std::byte> bytes, std::uint64_t seed = 0);
std::uint64_t hash_text(std::string_view text, std::uint64_t seed = 0);

}  // namespace convoy
