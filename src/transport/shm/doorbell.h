#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "os/wait.h"

namespace convoy::shm {

// One line of memory by which all senders reach the threads of one endpoint: a bit for each sender
// that has something, and who of the receiver's threads is awake or asleep. The receiver looks at
// this line and not at every ring.
//
//    0  40  bits of senders (more senders than bits share them)
//   40   4  threads in wait() that look at the bits again and again
//   44   8  WaitWord: threads in wait() that sleep
//   52   8  WaitWord: the thread that serves, when it sleeps
//   60   4  magic "CVB1"
//
// Who is told: nobody while a thread in wait() is awake, since it looks before it leaves or sleeps.
// Else, of a reply, one that sleeps in wait(); of anything else, or where none does, the thread
// that serves; if that is awake it looks before it sleeps. All operations on this line are
// sequentially consistent, so that they have one order in which, for a sender (1: set the bit, 2:
// look who is awake or asleep) and a thread (1: announce that it sleeps or leaves, 2: look at the
// bits), one of the two sees the other; then os/wait.h applies. tests/model/doorbell.pml checks it.
struct alignas(64) Doorbell {
  static constexpr std::size_t kWords = 5;
  static constexpr std::size_t kSlots = 64 * kWords;
  static constexpr std::uint32_t kMagic = 0x31425643;

  std::array<std::atomic<std::uint64_t>, kWords> bits{};
  std::atomic<std::uint32_t> awake{0};
  WaitWord waiters;
  WaitWord service;
  std::uint32_t magic = kMagic;

  // A sender, after it wrote something for the receiver. The fence orders that before the look at
  // the bit: if it is still set from before, the receiver will clear it and look at the ring after
  // that.
  void knock(std::size_t slot, bool reply) noexcept {
    full_fence();
    knock_fenced(slot, reply);
  }
  // The caller has seen to the fence.
  void knock_fenced(std::size_t slot, bool reply) noexcept {
    auto& word = bits[slot / 64 % kWords];
    const std::uint64_t bit = std::uint64_t{1} << slot % 64;
    if ((word.load(std::memory_order_relaxed) & bit) == 0) word.fetch_or(bit);
    rouse(reply);
  }
  // Tells one thread of the receiver to look.
  void rouse(bool reply) noexcept {
    if (awake.load() != 0) return;
    if (reply && waiters.sleepers.load() != 0) {
      waiters.value.fetch_add(1);
      futex_wake(waiters.value, 1);
    } else if (service.sleepers.load() != 0) {
      service.value.fetch_add(1);
      futex_wake(service.value, 1);
    }
  }

  // The receiver.
  bool any() const noexcept {
    std::uint64_t all = 0;
    for (const auto& word : bits) all |= word.load();
    return all != 0;
  }
  template <class Visit>
  void take(Visit visit) noexcept {
    for (std::size_t w = 0; w < kWords; ++w) {
      if (bits[w].load(std::memory_order_relaxed) == 0) continue;
      for (std::uint64_t set = bits[w].exchange(0); set != 0; set &= set - 1) {
        visit(64 * w + static_cast<std::size_t>(std::countr_zero(set)));
      }
    }
  }
};
static_assert(sizeof(Doorbell) == 64);

}  // namespace convoy::shm
