#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace convoy::coll {

// A buffer at a chosen offset from a cache line, with canaries on both sides.
class Fenced {
 public:
  Fenced(std::size_t bytes, std::size_t offset)
      : memory_(bytes + 2 * kFence + 64, kCanary), bytes_(bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    begin_ = kFence + (64 - address % 64) % 64 + offset;
  }
  Fenced(std::span<const std::byte> contents, std::size_t offset)
      : Fenced(contents.size(), offset) {
    if (!contents.empty()) std::memcpy(data(), contents.data(), contents.size());
  }

  std::byte* data() { return memory_.data() + begin_; }
  std::span<const std::byte> bytes() const { return {memory_.data() + begin_, bytes_}; }
  bool equals(std::span<const std::byte> expected) const {
    return bytes_ == expected.size() &&
           (bytes_ == 0 || std::memcmp(bytes().data(), expected.data(), bytes_) == 0);
  }
  // 128 bytes on each side, at the least: more than any vector.
  bool fences_intact() const {
    return is_canary(memory_.data() + begin_ - 128) && is_canary(memory_.data() + begin_ + bytes_);
  }

 private:
  static constexpr std::byte kCanary{0xa5};
  static constexpr std::size_t kFence = 192;  // with room for the offset

  static bool is_canary(const std::byte* p) {
    static const std::vector<std::byte> canary(128, kCanary);
    return std::memcmp(p, canary.data(), canary.size()) == 0;
  }

  std::vector<std::byte> memory_;
  std::size_t bytes_;
  std::size_t begin_ = 0;
};

}  // namespace convoy::coll
