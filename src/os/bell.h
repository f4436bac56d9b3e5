#pragma once

#include "os/wait.h"

namespace convoy {

// Announce, look again, sleep: how a thread sleeps until a condition on memory holds that other
// threads or processes change, when whoever changes it must not pay for a system call as long as
// nobody sleeps. The condition may be anything (a bitmap, a counter, a flag); the WaitWord beside
// it is only the bell: `value` counts rings, `sleepers` those who would miss one.
//
// Why no wake-up is lost. The two sides do this, where F is a sequentially consistent fence:
//
//   changer:  C  changes the condition      sleeper:  A  ++sleepers
//             F1                                      F2
//             S  reads sleepers                       V  reads value
//             R  ++value, futex_wake                  L  reads the condition
//                (if S found any)                     Z  futex_wait(value == V), if L is false
//
// The fences have one order. If F1 comes first, L is after F2 and sees C: the sleeper does not
// sleep. If F2 comes first, S is after F1 and sees A: the changer rings. That ring is not missed
// either. V comes before L in the program, so if R's increment came before V, V (acquire) has
// synchronized with it (release) and L sees C. If it came after V, the kernel compares the word
// with V under the lock under which R's wake looks for sleepers: either the word has changed and Z
// returns at once, or the sleeper is in the list and is woken. A release store instead of F1, or an
// announcement without F2, is not enough: on x86 too a load may overtake an earlier store.
// tests/model/bell.pml has this as a model; without a fence, or without the second look, it fails.

// After the condition was changed. Wakes up to `count` sleepers.
inline void ring(WaitWord& bell, int count = 0x7fffffff) noexcept {
  full_fence();
  if (bell.sleepers.load(std::memory_order_relaxed) == 0) return;
  bell.value.fetch_add(1, std::memory_order_release);
  futex_wake(bell.value, count);
}

// The sleeper's side, step by step, for those who have more to do between the steps than to look:
// construct it (A, F2, V), look at the condition (L), sleep() (Z). Every sleep needs a new one.
class Announcement {
 public:
  explicit Announcement(WaitWord& bell) noexcept : bell_(bell) {
    bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    full_fence();
    seen_ = bell.value.load(std::memory_order_acquire);
  }
  Announcement(const Announcement&) = delete;
  Announcement& operator=(const Announcement&) = delete;
  ~Announcement() { bell_.sleepers.fetch_sub(1, std::memory_order_relaxed); }

  // False: the deadline passed. Returns early for no reason at times.
  bool sleep(const Deadline& deadline) const { return futex_wait(bell_.value, seen_, deadline); }

 private:
  WaitWord& bell_;
  std::uint32_t seen_;
};

// Sleeps until ready() is true. False: the deadline passed, and ready() was false once more.
template <class Ready>
bool sleep_until(WaitWord& bell, const Deadline& deadline, Ready ready) {
  for (bool in_time = true;;) {
    const Announcement here(bell);
    if (ready()) return true;
    if (!in_time) return false;
    in_time = here.sleep(deadline);
  }
}

// Whether a wait should spin before it sleeps: as long as it pays. On a busy machine a spin keeps
// the awaited thread off its core. One that has given up spinning tries again at times: two sides
// that both sleep would never find out that they need not. Only guesses: relaxed, any thread.
class SpinGuess {
 public:
  explicit SpinGuess(int most_spins) : most_(most_spins) {}

  // For the wait that begins.
  int spins() noexcept {
    if (most_ == 0 || pays_.load(std::memory_order_relaxed)) return most_;
    return waits_.fetch_add(1, std::memory_order_relaxed) % kWaitsUntilTry == 0 ? most_ : 0;
  }
  // How a wait that was given spins ended.
  void paid() noexcept {
    in_vain_.store(0, std::memory_order_relaxed);
    pays_.store(true, std::memory_order_relaxed);
  }
  void in_vain() noexcept {
    if (in_vain_.fetch_add(1, std::memory_order_relaxed) + 1 >= kMostInVain) {
      pays_.store(false, std::memory_order_relaxed);
    }
  }

 private:
  static constexpr unsigned kWaitsUntilTry = 32;
  static constexpr int kMostInVain = 3;

  const int most_;
  std::atomic<bool> pays_{true};
  std::atomic<unsigned> waits_{0};
  std::atomic<int> in_vain_{0};  // in a row
};

}  // namespace convoy
