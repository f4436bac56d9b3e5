#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace convoy {

// The steady clock for what happens a million times a second: within about a microsecond of it, at
// less than half of its price. Between two looks at the real clock, at most a millisecond or two
// apart, it counts the processor's ticks. Times of one thread may fall back by that microsecond.
//
// Where ticks cannot be trusted (another processor, or the kernel does not use them itself) it is
// the real clock. Thread-safe.
class QuickClock {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  static TimePoint now() noexcept {
#if defined(__x86_64__)
    const std::uint64_t version = anchor.version.load(std::memory_order_acquire);
    const std::uint64_t tick = anchor.tick.load(std::memory_order_acquire);
    const std::uint64_t time = anchor.time.load(std::memory_order_acquire);
    const std::uint64_t rate = anchor.rate.load(std::memory_order_acquire);
    const bool whole = anchor.version.load(std::memory_order_relaxed) == version;
    const std::uint64_t since = __rdtsc() - tick;
    if (whole && version % 2 == 0 && rate != 0 && since < kMostTicks) [[likely]] {
      return TimePoint(Duration(static_cast<Duration::rep>(time + (since * rate >> kShift))));
    }
    return look();
#else
    return std::chrono::steady_clock::now();
#endif
  }

 private:
  // What is extrapolated from: at `tick` it was `time`, and one tick takes `rate` / 2^32 ns.
  // Written by whichever thread makes `version` odd (CAS, acquire); even again (release) when all
  // is written. rate 0: not known yet.
  struct Anchor {
    std::atomic<std::uint64_t> version{0};
    std::atomic<std::uint64_t> tick{0};
    std::atomic<std::uint64_t> time{0};
    std::atomic<std::uint64_t> rate{0};
  };
  static constexpr std::uint64_t kMostTicks = std::uint64_t{1} << 22;
  static constexpr int kShift = 32;

  // The real clock; and anchors what comes next to it.
  static TimePoint look() noexcept;

  static Anchor anchor;
};

}  // namespace convoy
