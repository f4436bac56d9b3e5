#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/log.h"

namespace convoy {

// For lines that others can cause as often as they like (strangers that connect, descriptors that
// run out): a few at once, then one a second, which says how many were left out. Thread-safe.
class LogLimit {
 public:
  using Clock = std::chrono::steady_clock;

  // As log_warn().
  template <class... Parts>
  void warn(const Parts&... parts) {
    std::string note;
    if (allow(note)) log_warn(parts..., note);
  }

  // False: the line is to be left out. `note` goes behind its text.
  bool allow(std::string& note, Clock::time_point now = Clock::now());

 private:
  static constexpr int kBurst = 5;
  static constexpr std::chrono::seconds kRefill{1};

  std::mutex mutex_;
  int left_ = kBurst;             // lines that may be written now
  Clock::time_point refilled_{};  // when the last one was added
  std::uint64_t omitted_ = 0;     // since the last line
};

}  // namespace convoy
