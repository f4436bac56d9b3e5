#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "os/robust_mutex.h"
#include "share/queue_memory.h"

// What lies in the memory of a queue, for the files that implement it.

// A step after which a process may end. Nothing here: tests compile these files with a definition
// of their own, and end there.
#ifndef CONVOY_QUEUE_STEP
#define CONVOY_QUEUE_STEP(where) static_cast<void>(0)
#endif

namespace convoy::share {

inline constexpr std::size_t kQueueLine = 64;

// A slot's word: number (48), member (12), state (4).
enum class SlotState : std::uint64_t { kFree, kReady, kTaken, kLeft };
constexpr std::uint64_t slot_word(SlotState state, std::uint64_t number, std::size_t member = 0) {
  return (number << 16) | (std::uint64_t{member} << 4) | static_cast<std::uint64_t>(state);
}
constexpr SlotState state_of(std::uint64_t word) { return static_cast<SlotState>(word & 15); }
constexpr std::uint64_t number_of(std::uint64_t word) { return word >> 16; }
constexpr std::size_t member_of(std::uint64_t word) { return (word >> 4) & 0xfff; }

// Who sleeps: announcements are made and ended under the lock.
struct QueueMemory::List {
  WaitWord bell;
  std::uint32_t waking = 0;  // 1: one was woken and has not come yet
  std::uint32_t unused = 0;
};

// All under the lock; atomics are read without it too (acquire).
struct QueueMemory::Head {
  static constexpr std::uint64_t kMagic = 0x3345554555515643;  // "CVQUEUE3"

  std::uint64_t magic = 0;  // written last
  std::uint64_t bytes = 0;
  std::uint32_t capacity = 0;
  std::uint32_t item_bytes = 0;
  std::uint32_t copy_below = 0;
  std::uint32_t timeout_ms = 0;
  std::uint32_t slots = 0;
  std::uint64_t domain = 0;  // process_domain() of all users; written before `magic`
  alignas(kQueueLine) RobustMutex mutex;
  alignas(kQueueLine) std::atomic<std::uint32_t> count{0};
  std::atomic<std::uint32_t> closed{0};
  std::uint64_t first = 0;  // positions in the order: the next item, the next put
  std::uint64_t last = 0;
  std::uint64_t next_number = 1;
  std::uint32_t next_slot = 0;  // where to look for a free one
  // 1: somebody waits for a free slot though the queue is not full. Read by who frees one.
  std::atomic<std::uint32_t> starved{0};
  std::atomic<std::uint32_t> epoch{0};
  std::atomic<std::uint32_t> departures{0};
  List lists[2];
  ProcessWord closed_by = 0;
  std::uint64_t lost = 0;
  std::atomic<std::int64_t> last_look{0};  // for dead members; without the lock
  std::uint32_t broken = 0;                // 1: a process died with the lock; not yet put right
  char latest_loss[160] = {};
};

struct alignas(kQueueLine) QueueMemory::Slot {
  std::atomic<std::uint64_t> word{0};
  ProcessWord producer = 0;
  std::uint32_t bytes = 0;
  std::atomic<std::uint32_t> progress{0};  // of settling, by the taker
  std::byte* data() { return reinterpret_cast<std::byte*>(this) + kQueueLine; }
};

// Holds the lock; puts right what a dead process left. Rings when it is given back.
class QueueMemory::Lock {
 public:
  Lock(QueueMemory& memory, const Deadline& deadline);
  explicit Lock(QueueMemory& memory);
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock();

  // For one sleeper, if there is any and none is on its way.
  void ring(Which which);
  void ring_all();

 private:
  void unlock() noexcept;

  QueueMemory& memory_;
  int rings_[2] = {0, 0};
};

}  // namespace convoy::share
