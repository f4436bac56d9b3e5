#pragma once

#include <cstddef>
#include <cstdint>

#include "os/robust_mutex.h"
#include "os/segment.h"
#include "os/wait.h"
#include "share/members.h"

namespace convoy::share {

// Events, barriers and locks: what lies in their memory, and what is done with it. All methods may
// be called from any thread of any process that has the memory.

// At the beginning of each.
struct SyncHead {
  static constexpr std::uint64_t kMagic = 0x32434e59534356;  // "VCSYNC2"

  std::uint64_t magic = 0;  // written last
  std::uint32_t kind = 0;   // Shared::Kind
  std::uint32_t unused = 0;
  std::uint64_t domain = 0;  // process_domain() of who made it; an Event has no need of it
};

// Bit 0: it is set. The rest counts how often it was, so that who waits notices that it was set and
// cleared in between.
class EventMemory {
 public:
  SyncHead head;

  bool is_set() const { return (word_.value.load(std::memory_order_acquire) & 1) != 0; }
  void set() noexcept;
  void clear() noexcept;
  bool wait(const Deadline& deadline);  // false: the deadline passed

 private:
  WaitWord word_;
};

class LockMemory {
 public:
  SyncHead head;
  RobustMutex mutex;
};

class BarrierMemory {
 public:
  SyncHead head;

  void init(std::uint32_t parties);
  std::uint32_t parties() const { return parties_; }
  std::uint32_t waiting() const { return arrived_.load(std::memory_order_acquire); }
  // A process uses it from now on, and does not any more.
  void join();
  void leave();
  std::size_t wait(const Deadline& deadline);
  void reset();

 private:
  class Guard;
  bool look_for_dead();  // true: it is broken
  Members members() { return {members_, head.domain}; }
  void end_round(bool good);  // under the mutex
  [[noreturn]] void fail_broken(bool by_death) const;

  RobustMutex mutex_;  // for what follows; atomics are read without it too
  std::uint32_t parties_ = 0;
  std::atomic<std::uint32_t> arrived_{0};
  WaitWord round_;            // counted up when all are there, or when it breaks
  std::uint32_t broken_ = 0;  // 1: until reset()
  std::uint32_t failed_ = 0;  // a bit for each of the latest 32 rounds
  ProcessWord culprit_ = 0;
  Member members_[kMostMembers];
};

}  // namespace convoy::share
