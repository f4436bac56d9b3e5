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

// A word that one side advances and others sleep on, in private or shared memory.
//
// A sleeper first announces itself in `sleepers` and then looks at the value again, so a writer
// that sees no sleeper need not make a system call. Neither may miss the other: between changing
// the value and looking at `sleepers` the writer needs more than release order, on x86 as on ARM
// (the look may overtake the change). Both methods see to it.
struct WaitWord {
  std::atomic<std::uint32_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};

  // The usual way. The change, the look, and the sleeper's two steps are sequentially consistent:
  // in their one order, either the look comes after the announcement or the sleeper's look comes
  // after the change.
  void store_and_wake(std::uint32_t next) noexcept {
    value.store(next, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(value);
  }
  // After any other change of the value, of release order at least. Looks by a read-modify-write:
  // if it comes before the sleeper's announcement, that one synchronizes with it, and the sleeper
  // sees the change.
  void wake() noexcept {
    if (sleepers.fetch_add(0, std::memory_order_acq_rel) != 0) futex_wake(value);
  }
};
static_assert(sizeof(WaitWord) == 8);

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
  // Also when `ready` throws.
  struct Announcement {
    std::atomic<std::uint32_t>& sleepers;
    explicit Announcement(WaitWord& on) : sleepers(on.sleepers) {
      sleepers.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Announcement() { sleepers.fetch_sub(1, std::memory_order_relaxed); }
  } const announcement(word);
  for (bool in_time = true;;) {
    const std::uint32_t seen = word.value.load(std::memory_order_seq_cst);
    if (ready(seen)) return true;
    if (!in_time) return false;
    in_time = futex_wait(word.value, seen, deadline);
  }
}

}  // namespace convoy
