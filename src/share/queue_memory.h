#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "os/segment.h"
#include "os/wait.h"
#include "share/members.h"

namespace convoy::share {

// A queue of items of bytes in memory that processes share: bounded, any number of producers and
// consumers, first in, first out. Whatever process ends at whatever moment, the others go on.
//
//   head      what it is; its lock; what the lock guards
//   members   the processes
//   order     a ring: which slot has the next item, and the one after it
//   slots     an item each: free -> ready -> taken by a member -> free
//
// A lock that the kernel takes from the dead guards all but the bytes of taken slots. What counts
// is in the slots: one store makes an item ready, and one makes it taken; the rest is made again
// from them by who gets the lock of a dead process. A taken slot keeps its bytes until the taker
// says that it needs them no more: if it ends before that, another process finds the slot, counts
// the item as lost, and settles what it has held.
//
// Waiting: who finds nothing announces itself under the lock and sleeps on a bell. Who brings
// something rings for one sleeper if no other that was woken is still on its way; who was woken
// rings for the next if there is more. A process that is woken and killed takes its ring with it:
// so nobody sleeps for longer than kLongestSleep at a time. tests/model has models of it:
// queue.pml, queue_room.pml.
//
// All methods may be called from any thread.
class QueueMemory {
 public:
  struct Shape {
    std::uint32_t capacity = 0;    // items
    std::uint32_t item_bytes = 0;  // of one, at most
    std::uint32_t copy_below = 0;  // for who uses the queue, as the next one
    std::uint32_t timeout_ms = 0;
  };
  // Lets go of what an item holds, from step `progress` on, which it counts. Without the lock.
  using Settle = std::function<void(std::string_view item, std::atomic<std::uint32_t>& progress)>;

  // kResource.
  QueueMemory(const Shape& shape, Settle settle);
  // What another process made. kInvalidArgument if it is no queue.
  QueueMemory(Segment segment, Settle settle);
  QueueMemory(const QueueMemory&) = delete;
  QueueMemory& operator=(const QueueMemory&) = delete;
  ~QueueMemory() = default;  // leave() first

  const Segment& segment() const { return segment_; }
  Shape shape() const { return shape_; }
  std::size_t size() const;  // items that wait
  bool closed() const;
  // kPeerLost from put, and from take when nothing is left. Wakes all that wait.
  void close();

  // While it lives, this thread is about to put so many items: lost with it if its process ends.
  class Hands;

  struct PutResult {
    std::size_t items = 0;  // that went in; 0: none by the deadline
    bool stale = false;     // none, because epoch() is another one than was said
  };
  // Puts as many as there is room for, one at least. `entering` is told of each before others see
  // it, under the lock: it must not throw.
  PutResult put(std::span<const std::string_view> items, std::uint32_t epoch, Hands& hands,
                const std::function<void(std::size_t)>& entering, const Deadline& deadline);

  struct Item {
    std::uint32_t slot = 0;
    std::uint64_t number = 0;  // counts items, from 1
    ProcessWord producer = 0;
    std::string bytes;
    std::atomic<std::uint32_t>* progress = nullptr;
  };
  // Up to `most` that wait, one at least; none: nothing came by the deadline. Each must be
  // finished.
  std::vector<Item> take(std::size_t most, const Deadline& deadline);
  void finish(const Item& item) noexcept;
  // The item cannot be delivered.
  void count_lost(const Item& item, std::string_view why);

  struct Losses {
    std::uint64_t items = 0;
    std::string latest;
  };
  Losses lost();
  // Finds members that have ended, and settles what they had.
  void look_for_dead();

  // Calls `use` with the lock held. For what else must be done by one process at a time.
  void exclusively(const std::function<void()>& use);
  // Under it: what is in the queue, or taken and not finished.
  void for_each_item(const std::function<void(std::string_view)>& visit) const;
  // Counted up under it, by who took something away that items to come may rely on.
  std::uint32_t epoch() const;
  void next_epoch();
  // Counts processes that left or died.
  std::uint32_t departures() const;

  // This process uses it no more. False: there are items that it put, or that concern it, while
  // others still use the queue or will (`held_elsewhere`: somebody has the means to join it), and
  // it stays as a passive member. Callable again: to find out whether that has changed. Whoever is
  // the last settles what is left, which counts as lost.
  bool leave(const std::function<bool(std::string_view item)>& concerns = {},
             const std::function<bool()>& held_elsewhere = {});
  void come_back();  // after leave() was false

  // Tests.
  std::uint32_t sleepers_for_testing();

 private:
  struct Head;
  struct Slot;
  struct List;
  class Lock;
  class Announcement;
  enum Which : std::size_t { kItems, kRoom };

  void lay_out();
  void open();
  Head& head() const { return *reinterpret_cast<Head*>(segment_.data()); }
  Slot& slot(std::uint32_t index) const;
  std::uint32_t& order(std::uint64_t position) const;
  std::size_t self();
  void repair();
  void bury(const Members::Dead& dead, std::vector<Item>& left);
  void look_now_and_then();
  void drain();
  std::uint32_t find_free_slot();
  void place(std::uint32_t at, std::string_view item, std::size_t member,
             const std::function<void()>& entering);
  void note_loss(ProcessWord process, std::uint64_t items, std::string_view what);
  template <class Attempt>
  auto wait_and(Which which, const Deadline& deadline, Attempt attempt);
  void pause(Which which) const;
  [[noreturn]] void fail_closed(const char* operation) const;

  Segment segment_;
  Shape shape_;
  std::uint32_t slots_ = 0;
  Members members_{nullptr, 0};
  std::uint32_t* order_ = nullptr;
  std::byte* first_slot_ = nullptr;
  Settle settle_;
  std::atomic<std::uint64_t> self_{0};  // fork_generation() << 32 | member + 1
};

class QueueMemory::Hands {
 public:
  Hands(QueueMemory& memory, std::size_t items);
  Hands(const Hands&) = delete;
  Hands& operator=(const Hands&) = delete;
  ~Hands();

 private:
  friend class QueueMemory;
  Member& member_;
  std::size_t left_;
};

}  // namespace convoy::share
