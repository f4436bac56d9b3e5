#pragma once

#include <atomic>
#include <cstdint>

#include "os/futex.h"
#include "os/wait.h"

namespace convoy::shm {

// A mutex of one process for what is held for nanoseconds, a million times a second: std::mutex
// with half of its price where nobody contends. unlock() is a read-modify-write of sequential
// consistency, on which fence_after_update() relies.
class QuickMutex {
 public:
  QuickMutex() = default;
  QuickMutex(const QuickMutex&) = delete;
  QuickMutex& operator=(const QuickMutex&) = delete;

  bool try_lock() noexcept {
    std::uint32_t free = kFree;
    return state_.compare_exchange_strong(free, kHeld);
  }
  void lock() noexcept {
    if (!try_lock()) lock_slowly();
  }
  void unlock() noexcept {
    if (state_.exchange(kFree) == kContended) futex_wake(state_, 1);
  }

 private:
  static constexpr std::uint32_t kFree = 0;
  static constexpr std::uint32_t kHeld = 1;
  static constexpr std::uint32_t kContended = 2;  // somebody may sleep
  static constexpr int kSpins = 100;

  void lock_slowly() noexcept {
    for (int i = 0; i < kSpins; ++i) {
      if (state_.load(std::memory_order_relaxed) == kFree && try_lock()) return;
      cpu_relax();
    }
    // Whoever gets it this way does not know whether others sleep, and wakes one for nothing.
    while (state_.exchange(kContended) != kFree) {
      futex_wait(state_, kContended, Deadline::never());
    }
  }

  std::atomic<std::uint32_t> state_{kFree};
};

// A full fence after a read-modify-write of sequential consistency: on x86 that is one already.
inline void fence_after_update() noexcept {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
  std::atomic_signal_fence(std::memory_order_seq_cst);
#else
  full_fence();
#endif
}

}  // namespace convoy::shm
