#pragma once

#include <algorithm>
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
      : memory_(bytes + offset + 2 * kFence + 64, kCanary), bytes_(bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) + kFence;
    begin_ = kFence + (64 - address % 64) % 64 + offset;
  }
  Fenced(std::span<const std::byte> contents, std::size_t offset)
      : Fenced(contents.size(), offset) {
    std::copy(contents.begin(), contents.end(), data());
  }

  std::byte* data() { return memory_.data() + begin_; }
  std::span<const std::byte> bytes() const { return {memory_.data() + begin_, bytes_}; }
  bool equals(std::span<const std::byte> expected) const {
    return std::ranges::equal(bytes(), expected);
  }
  bool fences_intact() const {
    const auto untouched = [](std::byte b) { return b == kCanary; };
    const auto end = memory_.begin() + static_cast<std::ptrdiff_t>(begin_ + bytes_);
    return std::all_of(memory_.begin(), memory_.begin() + static_cast<std::ptrdiff_t>(begin_),
                       untouched) &&
           std::all_of(end, memory_.end(), untouched);
  }

 private:
  static constexpr std::byte kCanary{0xa5};
  static constexpr std::size_t kFence = 128;

  std::vector<std::byte> memory_;
  std::size_t bytes_;
  std::size_t begin_ = 0;
};

}  // namespace convoy::coll
