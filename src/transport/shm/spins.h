#pragma once

#include <atomic>
#include <chrono>

#include "os/quick_clock.h"
#include "os/wait.h"

namespace convoy::shm {

// Whether threads of an endpoint spin before they sleep: as long as it pays, and nobody else wants
// the core. Only guesses: relaxed, any thread.
class Spins {
 public:
  explicit Spins(int most_spins) : waits_(most_spins), serves_(most_spins) {}

  // Of threads in wait(), and of the one that serves.
  SpinGuess& waits() noexcept { return waits_; }
  SpinGuess& serves() noexcept { return serves_; }

  // Others had to wait for this core: no spins for some time.
  void leave_core() noexcept {
    const auto until = QuickClock::now() + kTimeWithoutSpins;
    none_until_.store(until.time_since_epoch().count(), std::memory_order_relaxed);
  }
  bool core_is_wanted() noexcept {
    const Rep until = none_until_.load(std::memory_order_relaxed);
    if (until == 0) return false;
    if (QuickClock::now().time_since_epoch().count() < until) return true;
    none_until_.store(0, std::memory_order_relaxed);
    return false;
  }

 private:
  using Rep = QuickClock::Duration::rep;

  static constexpr auto kTimeWithoutSpins = std::chrono::milliseconds(20);

  std::atomic<Rep> none_until_{0};  // 0: threads may spin
  SpinGuess waits_;
  SpinGuess serves_;
};

}  // namespace convoy::shm
