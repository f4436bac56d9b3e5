#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

namespace convoy::coll {

// A stretch of memory, and where it begins in the buffer that it is a part of.
struct Stretch {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::size_t begin = 0;
};

// Memory that an operation treats as one buffer: one stretch, or several in order. Does not own.
class View {
 public:
  View() = default;
  View(std::byte* data, std::size_t bytes) : one_{data, bytes, 0} {}
  // `begin` of each must be the end of the one before, of the first 0.
  explicit View(std::span<const Stretch> many) : many_(many) {
    if (many.size() == 1) one_ = {many.front().data, many.front().bytes, 0};
    if (many.size() <= 1) many_ = {};
  }

  std::size_t bytes() const {
    return many_.empty() ? one_.bytes : many_.back().begin + many_.back().bytes;
  }
  bool contiguous() const { return many_.empty(); }
  // False: there is no memory at all (of a list the first stretch may be empty, and null).
  bool reachable() const { return !many_.empty() || one_.data != nullptr; }
  // Of the first stretch.
  std::byte* data() const { return many_.empty() ? one_.data : many_.front().data; }

  // All of them, empty ones too.
  std::span<const Stretch> stretches() const { return many_.empty() ? std::span(&one_, 1) : many_; }

  // The address of a byte, and how many follow it without a gap.
  std::byte* at(std::size_t offset) const { return find(offset).first; }
  std::pair<std::byte*, std::size_t> find(std::size_t offset) const {
    if (many_.empty()) return {one_.data + offset, one_.bytes - offset};
    const auto after = std::upper_bound(
        many_.begin(), many_.end(), offset,
        [](std::size_t wanted, const Stretch& stretch) { return wanted < stretch.begin; });
    const Stretch& in = *(after - 1);
    return {in.data + (offset - in.begin), in.begin + in.bytes - offset};
  }

  // Calls part(address, done, bytes) for the stretches of [begin, begin + length); `done` bytes of
  // it came before.
  template <class Part>
  void for_each(std::size_t begin, std::size_t length, const Part& part) const {
    for (std::size_t done = 0; done < length;) {
      const auto [address, left] = find(begin + done);
      const std::size_t bytes = std::min(left, length - done);
      part(address, done, bytes);
      done += bytes;
    }
  }

 private:
  Stretch one_;
  std::span<const Stretch> many_;
};

}  // namespace convoy::coll
