#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "os/quick_clock.h"
#include "transport/shm/doorbell.h"

namespace convoy::shm {

// While threads come to wait() again and again, each of them only for a moment, nobody has to be
// woken for a reply that comes in between: the thread that serves *lingers*, which is to sleep for
// a moment at a time and to look. Without a lock.
//
// It does not end while somebody counts on it. Who enters: inside_ + 1, then a look at on_. Who
// ends it: on_ := false, then a look at inside_. All of them are sequentially consistent, so one of
// the two sees the other.
class Lingering {
 public:
  // --- threads in wait() ---

  // True: the thread counts on it until leave(), and need not say that it is awake.
  bool enter() noexcept {
    visits_.store(visits_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    if (!on_.load()) return false;
    inside_.fetch_add(1);
    if (on_.load()) return true;
    inside_.fetch_sub(1);
    return false;
  }
  void leave() noexcept { inside_.fetch_sub(1); }
  // Somebody counts on it.
  bool has_visitors() const noexcept { return inside_.load() != 0; }

  // A wait that did not count on it has ended. `quick`: without a sleep. True: the thread that
  // serves is asked to linger, and has to be rung for.
  bool count_wait(bool quick) noexcept {
    if (!quick) {
      quick_waits_.store(0, std::memory_order_relaxed);
      return false;
    }
    const unsigned before = quick_waits_.fetch_add(1, std::memory_order_relaxed);
    if (before != 0 && before + 1 != kWaitsUntilLingering) return false;
    const Rep now = QuickClock::now().time_since_epoch().count();
    if (before == 0) {
      quick_since_.store(now, std::memory_order_relaxed);
      return false;
    }
    if (QuickClock::Duration(now - quick_since_.load(std::memory_order_relaxed)) < kBusyTime) {
      asked_.store(true);
      return true;
    }
    quick_waits_.store(0, std::memory_order_relaxed);
    return false;
  }

  // --- the thread that serves ---

  // If it was asked to.
  void begin(Doorbell& bell) noexcept {
    if (!asked_.exchange(false)) return;
    visits_seen_ = visits_.load(std::memory_order_relaxed);
    quiet_ = 0;
    bell.lingers.exchange(1);
    on_.store(true);
  }
  bool is_on() const noexcept { return on_.load(std::memory_order_relaxed); }
  // And somebody has come in the last moment.
  bool is_visited() const noexcept { return is_on() && quiet_ == 0; }
  // A moment is over; after a few without a visit it ends.
  void end_moment(Doorbell& bell) noexcept {
    const std::uint64_t visits = visits_.load(std::memory_order_relaxed);
    quiet_ = visits_seen_.exchange(visits) == visits ? quiet_ + 1 : 0;
    if (quiet_ < kQuietMoments) return;
    on_.store(false);
    if (has_visitors()) {
      on_.store(true);
      return;
    }
    quick_waits_.store(0, std::memory_order_relaxed);
    bell.lingers.exchange(0);
  }

 private:
  using Rep = QuickClock::Duration::rep;

  static constexpr int kQuietMoments = 3;
  // So many times in a row somebody was in wait() without a sleep.
  static constexpr unsigned kWaitsUntilLingering = 16;
  // And all of them within so much.
  static constexpr auto kBusyTime = std::chrono::milliseconds(2);

  std::atomic<bool> asked_{false};
  std::atomic<bool> on_{false};
  std::atomic<std::uint32_t> inside_{0};       // threads in wait() that count on it
  std::atomic<std::uint64_t> visits_{0};       // of wait(); about
  std::atomic<unsigned> quick_waits_{0};       // in a row
  std::atomic<Rep> quick_since_{0};            // the first of them
  std::atomic<std::uint64_t> visits_seen_{0};  // by the thread that serves
  std::atomic<int> quiet_{0};                  // moments in which nobody came
};

}  // namespace convoy::shm
