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

void yield_cpu() noexcept;

// How a wait spends its time before it sleeps. On a virtual machine a wake-up costs about 30 us and
// a spin 0.1 us, so waiting starts with a bounded spin; where ranks outnumber cores the spin would
// keep the awaited rank off its core, so it starts with yielding.
struct WaitPolicy {
  int spins = 2000;
  int yields = 20;

  // For `waiters` processes or threads that wait for each other on this machine.
  static WaitPolicy for_ranks(int waiters);
};

// A word that one side advances and others sleep on, in private or shared memory.
//
// Writers change the word with release order and call wake(). A sleeper first announces itself in
// `sleepers` and then looks again, so a writer that sees no sleeper need not make a system call;
// both sides use sequentially consistent order there, without which each could miss the other.
struct WaitWord {
  std::atomic<std::uint32_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};

  void store_and_wake(std::uint32_t next) noexcept {
    value.store(next, std::memory_order_seq_cst);
    wake();
  }
  void wake() noexcept {
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(value);
  }
};
static_assert(sizeof(WaitWord) == 8);

// Waits until `ready(word.value)` is true: spin, yield, then sleep. `ready` is also evaluated after
// every wake-up and with acquire order. False: the deadline passed.
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
  for (;;) {
    word.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t seen = word.value.load(std::memory_order_seq_cst);
    const bool done = ready(seen);
    const bool in_time = done || futex_wait(word.value, seen, deadline);
    word.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (done || ready(word.value.load(std::memory_order_acquire))) return true;
    if (!in_time) return false;
  }
}

}  // namespace convoy
