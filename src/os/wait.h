#pragma once

#include <atomic>
#include <cstdint>

#include "convoy/deadline.h"
#include "os/futex.h"

namespace convoy {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// A sequentially consistent fence. ThreadSanitizer does not know fences; there a locked operation
// stands in, which orders as much on the machines it runs on.
inline void full_fence() noexcept {
#if defined(__SANITIZE_THREAD__)
  static thread_local std::atomic<int> word{0};
  word.fetch_add(1, std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

void yield_cpu() noexcept;

// How a wait spends its time before it sleeps. On a virtual machine a wake-up costs about 30 us and
// a spin 0.1 us, so waiting starts with a bounded spin; where ranks outnumber cores the spin would
// keep the awaited rank off its core, so it starts with yielding.
struct WaitPolicy {
  int spins = 2000;
  int yields = 20;

  // For processes or threads that wait for each other, with so many cores between them.
  static WaitPolicy for_ranks(int waiters, int cores);
};

// Announce, look again, sleep: how a thread sleeps until a condition on memory holds that other
// threads or processes change, when whoever changes it must not pay for a system call as long as
// nobody sleeps. The condition may be anything (a bitmap, a counter, a flag), or the word's own
// value. This is all that is needed beside it: `value` is what sleepers sleep on and changes with
// each ring, `sleepers` counts those who would miss one. In private or shared memory.
//
// Why no wake-up is lost. The two sides do this, where F is a sequentially consistent fence:
//
//   changer:  C  changes the condition      sleeper:  A  ++sleepers
//             F1                                      F2
//             S  reads sleepers                       V  reads value
//             R  changes value, futex_wake            L  reads the condition
//                (if S found any)                     Z  futex_wait(value == V), if L is false
//
// The fences have one order. If F1 comes first, L is after F2 and sees C: the sleeper does not
// sleep. If F2 comes first, S is after F1 and sees A: the changer rings. That ring is not missed
// either. V comes before L in the program, so if R's change came before V, V (acquire) has
// synchronized with it (release) and L sees C. If it came after V, the kernel compares the word
// with V under the lock under which R's wake looks for sleepers: either the word has changed and Z
// returns at once, or the sleeper is in the list and is woken. Where the condition is the value, C
// is R's change, and L looks at V. A release store instead of F1, or an announcement without F2, is
// not enough: on x86 too a load may overtake an earlier store. tests/model/bell.pml has this as a
// model; without a fence, or without the second look, it fails.
struct WaitWord {
  std::atomic<std::uint32_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};

  // After the value was changed, where that is the condition.
  void wake() noexcept {
    full_fence();
    if (sleepers.load(std::memory_order_relaxed) != 0) futex_wake(value);
  }
  void store_and_wake(std::uint32_t next) noexcept {
    value.store(next, std::memory_order_release);
    wake();
  }
};
static_assert(sizeof(WaitWord) == 8);

// Without asking who sleeps: for rare news, or where others may have written to `sleepers`.
inline void ring_anyway(WaitWord& bell, int count = 0x7fffffff) noexcept {
  bell.value.fetch_add(1, std::memory_order_release);
  futex_wake(bell.value, count);
}
// After a condition other than the value was changed. Wakes up to `count` sleepers.
inline void ring(WaitWord& bell, int count = 0x7fffffff) noexcept {
  full_fence();
  if (bell.sleepers.load(std::memory_order_relaxed) != 0) ring_anyway(bell, count);
}

// The sleeper's side, step by step, for those who have more to do between the steps than to look:
// construct it (A, F2, V), look at the condition (L), sleep() (Z). Every sleep needs a new one.
class Announcement {
 public:
  explicit Announcement(WaitWord& bell) noexcept : bell_(bell) {
    bell.sleepers.fetch_add(1, std::memory_order_relaxed);
    full_fence();
    seen_ = bell.value.load(std::memory_order_acquire);
  }
  Announcement(const Announcement&) = delete;
  Announcement& operator=(const Announcement&) = delete;
  ~Announcement() { bell_.sleepers.fetch_sub(1, std::memory_order_relaxed); }

  std::uint32_t seen() const { return seen_; }
  // False: the deadline passed. Returns early for no reason at times.
  bool sleep(const Deadline& deadline) const { return futex_wait(bell_.value, seen_, deadline); }

 private:
  WaitWord& bell_;
  std::uint32_t seen_;
};

// The same where there is one sleeper, and something else than a futex to sleep on: whoever finds
// the flag raised after a change takes it down, and has to wake the sleeper.
class SleepFlag {
 public:
  // A, F2: then look at the condition.
  void raise() noexcept {
    up_.store(1, std::memory_order_relaxed);
    full_fence();
  }
  void lower() noexcept { up_.store(0, std::memory_order_relaxed); }
  // F1, S.
  bool take() noexcept {
    full_fence();
    return up_.load(std::memory_order_relaxed) != 0 && up_.exchange(0) != 0;
  }

 private:
  std::atomic<std::uint32_t> up_{0};
};
static_assert(sizeof(SleepFlag) == 4);

// Waits until `ready(word.value)` is true: spin, yield, then sleep. `ready` is evaluated with what
// was read in acquire order; it may throw. False: the deadline passed, and `ready` was false once
// more.
template <class Ready>
bool wait_until(WaitWord& word, const WaitPolicy& policy, const Deadline& deadline, Ready ready) {
  for (int i = 0; i < policy.spins; ++i) {
    if (ready(word.value.load(std::memory_order_acquire))) return true;
    cpu_relax();
  }
  for (int i = 0; i < policy.yields; ++i) {
    if (ready(word.value.load(std::memory_order_acquire))) return true;
    yield_cpu();
  }
  for (bool in_time = true;;) {
    const Announcement here(word);
    if (ready(here.seen())) return true;
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
