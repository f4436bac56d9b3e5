#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "os/wait.h"
#include "transport/shm/descriptors.h"

namespace convoy::shm {

// One line of memory by which all senders reach the threads of one endpoint: a bit for each sender
// that has something, and who of the receiver's threads is awake or asleep. The receiver looks at
// this line and not at every ring, but for the one ring that is *watched*: whoever looks at the
// line looks at that ring, too, and its sender need not knock.
//
//    0  32  bits of senders (more senders than bits share them)
//   32   4  threads in wait() that look at the line again and again
//   36   4  the number and 1 of the sender whose ring is watched; 0: none
//   40   8  WaitWord: threads in wait() that sleep
//   48   8  WaitWord: the thread that serves, when it sleeps
//   56   4  1: replies need not be told: the thread that serves comes by at times
//   60   4  magic "CVB2"
//
// Who is told: nobody while a thread in wait() is awake, since it looks before it leaves or sleeps.
// Else, of a reply, one that sleeps in wait(); of anything else, or where none does, the thread
// that serves; if that is awake it looks before it sleeps. All operations on this line are
// sequentially consistent, so that they have one order in which, for a sender (1: set the bit, 2:
// look who is awake or asleep) and a thread (1: announce that it sleeps or leaves, 2: look at the
// bits), one of the two sees the other; then os/wait.h applies. The same holds for a sender whose
// ring is watched (1: write the letter, 2: look who is awake) and for who stops to watch it (1:
// watch another, 2: look at the ring). docs/internals/endpoint.md has the whole argument, and
// tests/model/doorbell.pml checks it.
//
// Both WaitWords count rings, and naps twice: when they begin and when they end. So whoever finds
// the count that its own last ring has left knows that nobody has lain down or got up since. Those
// who slept then were woken by that ring, and look after they have counted the end of their nap:
// they need not be woken again. It takes a thread its time to get up, in which hundreds of letters
// may be sent.
struct alignas(64) Doorbell {
  static constexpr std::size_t kWords = 4;
  static constexpr std::size_t kSlots = 64 * kWords;
  static constexpr std::uint32_t kMagic = 0x32425643;

  std::array<std::atomic<std::uint64_t>, kWords> bits{};
  std::atomic<std::uint32_t> awake{0};
  std::atomic<std::uint32_t> watched{0};
  WaitWord waiters;
  WaitWord service;
  std::atomic<std::uint32_t> lingers{0};
  std::uint32_t magic = kMagic;

  // What the words were after the last rings of one sender, or of our own threads.
  struct Rung {
    static constexpr std::uint64_t kNever = UINT64_MAX;
    std::atomic<std::uint64_t> waiters{kNever};
    std::atomic<std::uint64_t> service{kNever};
    std::atomic<std::uint64_t> all_waiters{kNever};
    // By which the thread that serves is woken if it sleeps on epoll; -1: it sleeps on its word.
    // Whoever knows the doorbell knows this.
    int waker = -1;
  };
  // A thread's sleep: announce (construct it), look, sleep().
  class Nap {
   public:
    explicit Nap(WaitWord& bell) noexcept : bell_(bell) {
      bell.sleepers.fetch_add(1);
      seen_ = bell.value.fetch_add(1) + 1;
      full_fence();
    }
    Nap(const Nap&) = delete;
    Nap& operator=(const Nap&) = delete;
    ~Nap() {
      bell_.value.fetch_add(1);
      bell_.sleepers.fetch_sub(1);
    }
    // False: the deadline passed. Returns early for no reason at times.
    bool sleep(const Deadline& deadline) const { return futex_wait(bell_.value, seen_, deadline); }

   private:
    WaitWord& bell_;
    std::uint32_t seen_;
  };
  // After a change and a full fence. True: somebody slept.
  static bool ring_once(WaitWord& bell, std::atomic<std::uint64_t>& last, int count,
                        int waker = -1) noexcept {
    if (bell.sleepers.load() == 0) return false;
    if (bell.value.load() == last.load(std::memory_order_relaxed)) return true;
    last.store(bell.value.fetch_add(1) + std::uint32_t{1}, std::memory_order_relaxed);
    wake_up(bell, count, waker);
    return true;
  }
  // The same however often; for rare news.
  void ring_service(const Rung& rung) noexcept {
    full_fence();
    if (service.sleepers.load() == 0) return;
    service.value.fetch_add(1);
    wake_up(service, 0x7fffffff, rung.waker);
  }
  static void wake_up(const WaitWord& bell, int count, int waker) noexcept {
    if (waker >= 0) {
      write_waker(waker);
    } else {
      futex_wake(bell.value, count);
    }
  }

  // Sender number `sender`, after it wrote a letter and a full fence. The fence orders the letter
  // before the looks. True: somebody slept.
  bool announce_letter(std::uint32_t sender, bool reply, Rung& rung) noexcept {
    return !is_watched(sender, reply) && knock(sender, reply, rung);
  }
  // The same for anything else that it has changed, which is not seen in its ring. If the bit is
  // still set from before, the receiver will clear it and look after that.
  bool knock(std::uint32_t sender, bool reply, Rung& rung) noexcept {
    auto& word = bits[sender / 64 % kWords];
    const std::uint64_t bit = std::uint64_t{1} << sender % 64;
    if ((word.load(std::memory_order_relaxed) & bit) == 0) word.fetch_or(bit);
    return rouse(reply, rung);
  }
  // Somebody is awake who looks at this sender's ring before it sleeps or leaves. One that sleeps
  // in wait() is to have a reply even if the thread that serves stands in a call.
  bool is_watched(std::uint32_t sender, bool reply) const noexcept {
    if (watched.load() != sender + 1) return false;
    if (awake.load() != 0) return true;
    if (reply && waiters.sleepers.load() != 0) return false;
    return (reply && lingers.load() != 0) || service.sleepers.load() == 0;
  }
  // Tells one thread of the receiver to look. True: it slept.
  bool rouse(bool reply, Rung& rung) noexcept {
    if (awake.load() != 0) return false;
    if (reply && ring_once(waiters, rung.waiters, 1)) return true;
    if (reply && lingers.load() != 0) return false;
    return ring_once(service, rung.service, 1, rung.waker);
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
