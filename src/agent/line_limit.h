#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "convoy/deadline.h"

namespace convoy::agent {

// Lines of the log that others can cause: some at once, then one now and then. Not thread-safe.
class LineLimit {
 public:
  static constexpr std::uint64_t kAtOnce = 10;
  static constexpr std::chrono::seconds kEach{10};

  // How many were left out before this one; nullopt: this one is, too.
  std::optional<std::uint64_t> take(Deadline::Clock::time_point now) {
    const auto earned =
        static_cast<std::uint64_t>(std::max((now - since_) / kEach, std::int64_t{}));
    if (earned != 0) {
      left_ = std::min(kAtOnce, left_ + earned);
      since_ = now;
    }
    if (left_ == 0) {
      ++left_out_;
      return std::nullopt;
    }
    --left_;
    return std::exchange(left_out_, 0);
  }

 private:
  std::uint64_t left_ = kAtOnce;
  std::uint64_t left_out_ = 0;
  Deadline::Clock::time_point since_;
};

}  // namespace convoy::agent
