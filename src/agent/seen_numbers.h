#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace convoy::agent {

// Which of a peer's numbered letters have come: each is taken once, in whatever order they come.
// Numbers count from 1. Those that are still to come, below the highest that has, are kept as
// ranges. The peer tells below which number it expects nothing any more, so that ranges of what was
// lost on the way do not pile up.
class SeenNumbers {
 public:
  // More is nonsense: a peer has at most so many calls under way.
  static constexpr std::size_t kMostRanges = std::size_t{1} << 16;

  // True: it is new. Those below `floor` are not.
  bool add(std::uint64_t number, std::uint64_t floor) {
    raise(floor);
    if (number < floor) return false;
    if (number == next_) [[likely]] {
      ++next_;
      return true;
    }
    if (number > next_) {
      missing_.push_back({next_, number});
      next_ = number + 1;
      return true;
    }
    const auto range =
        std::upper_bound(missing_.begin(), missing_.end(), number,
                         [](std::uint64_t value, const Range& other) { return value < other.end; });
    if (range == missing_.end() || number < range->begin) return false;
    const Range before{range->begin, number};
    const Range after{number + 1, range->end};
    if (before.begin < before.end && after.begin < after.end) {
      *range = before;
      missing_.insert(range + 1, after);
    } else if (before.begin < before.end) {
      *range = before;
    } else if (after.begin < after.end) {
      *range = after;
    } else {
      missing_.erase(range);
    }
    return true;
  }

  bool contains(std::uint64_t number) const {
    if (number >= next_) return false;
    const auto range =
        std::upper_bound(missing_.begin(), missing_.end(), number,
                         [](std::uint64_t value, const Range& other) { return value < other.end; });
    return range == missing_.end() || number < range->begin;
  }

  std::size_t ranges() const { return missing_.size(); }

 private:
  struct Range {
    std::uint64_t begin;
    std::uint64_t end;  // one more
  };

  void raise(std::uint64_t floor) {
    if (!missing_.empty()) [[unlikely]] {
      const auto first = std::upper_bound(
          missing_.begin(), missing_.end(), floor,
          [](std::uint64_t value, const Range& other) { return value < other.end; });
      missing_.erase(missing_.begin(), first);
      if (!missing_.empty()) missing_[0].begin = std::max(missing_[0].begin, floor);
    }
    next_ = std::max(next_, floor);
  }

  std::uint64_t next_ = 1;
  std::vector<Range> missing_;  // below next_, by number
};

}  // namespace convoy::agent
