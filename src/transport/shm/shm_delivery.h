#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/shm/letter_ring.h"

namespace convoy::shm {

class ShmEndpoint;
class ShmRemote;

// Letters without pieces that were taken out of one ring at once, to be delivered without the lock.
struct Handful {
  static constexpr std::size_t kMost = 16;
  // Of one letter; larger ones are taken alone.
  static constexpr std::size_t kMostBytes = 1024;
  static constexpr std::size_t kBytes = 4096;
  static constexpr std::uint32_t kClosed = 1U << 30;

  ShmRemote* remote = nullptr;
  std::size_t used = 0;
  std::uint32_t count = 0;
  // Of the next one to be delivered: whoever counts it up has it.
  std::atomic<std::uint32_t> next{0};
  std::array<PlainLetter, kMost> letters;
  std::array<std::byte, kBytes> memory;

  void begin(ShmRemote& from) {
    remote = &from;
    used = 0;
    count = 0;
    next.store(0, std::memory_order_relaxed);
  }
  bool has_room() const { return count < kMost && used + kMostBytes <= kBytes; }
  std::span<std::byte> room() { return std::span(memory).subspan(used, kMostBytes); }
  // What was parsed into letters[count].
  void add(std::span<const std::byte> entry) {
    used += entry.size();
    ++count;
  }
  // Of the letter that is the caller's now; nullptr: there is none left.
  const PlainLetter* claim() noexcept {
    const std::uint32_t mine = next.fetch_add(1);
    return mine < count ? &letters[mine] : nullptr;
  }
  // The same where only one thread has the hand.
  const PlainLetter* take_next() noexcept {
    const std::uint32_t mine = next.load(std::memory_order_relaxed);
    if (mine >= count) return nullptr;
    next.store(mine + 1, std::memory_order_relaxed);
    return &letters[mine];
  }
};

// Replies that a thread has taken, and hands to the inbox: to be counted when they are delivered.
// If the inbox waits in that call, the thread delivers the others first: they may be what somebody
// waits for. And the loss of their sender does not wait for that call.
class Delivery {
 public:
  Delivery(ShmEndpoint& endpoint, ShmRemote& remote, Handful* hand, std::uint32_t replies) noexcept
      : endpoint_(endpoint), remote_(remote), hand_(hand), replies_(replies), outer_(innermost) {
    innermost = this;
  }
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;
  ~Delivery() {
    innermost = outer_;
    settle();
  }

  // Those of this thread, before it waits.
  static void finish_all() {
    if (innermost) [[unlikely]]
      finish_from(innermost);
  }

 private:
  static void finish_from(Delivery* delivery);
  void settle();

  static constinit thread_local Delivery* innermost;

  ShmEndpoint& endpoint_;
  ShmRemote& remote_;
  Handful* const hand_;    // nullptr: one reply, which is being delivered
  std::uint32_t replies_;  // to be counted
  Delivery* const outer_;  // in whose call the inbox waits
};

}  // namespace convoy::shm
