#include "share/queue_memory.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>

#include "base/error.h"
#include "os/fork_guard.h"
#include "os/machine.h"
#include "share/queue_head.h"

namespace convoy::share {
namespace {

constexpr std::size_t kLine = kQueueLine;
constexpr std::uint32_t kSpareSlots = 64;  // for items that are taken and not finished
constexpr std::size_t kMostAtOnce = 32;    // of them by one call
constexpr auto kLongestSleep = std::chrono::milliseconds(100);

constexpr std::size_t in_lines(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

std::size_t order_offset(std::size_t head_bytes) { return in_lines(head_bytes) + Members::bytes(); }

}  // namespace

QueueMemory::QueueMemory(const Shape& shape, Settle settle)
    : shape_(shape), slots_(shape.capacity + kSpareSlots), settle_(std::move(settle)) {
  const std::size_t slot_bytes = kLine + in_lines(shape.item_bytes);
  const std::size_t bytes = order_offset(sizeof(Head)) +
                            in_lines(sizeof(std::uint32_t) * shape.capacity) + slots_ * slot_bytes;
  segment_ = Segment::create(bytes, "queue", Segment::Warm::kYes);
  auto* const made = new (segment_.data()) Head;
  made->mutex.init();
  made->bytes = segment_.size();
  made->capacity = shape.capacity;
  made->item_bytes = shape.item_bytes;
  made->copy_below = shape.copy_below;
  made->timeout_ms = shape.timeout_ms;
  made->slots = slots_;
  made->domain = own_domain();
  lay_out();
  for (std::size_t i = 0; i < kMostMembers; ++i) new (&members_[i]) Member;
  for (std::uint32_t i = 0; i < slots_; ++i) new (&slot(i)) Slot;
  std::atomic_ref(made->magic).store(Head::kMagic, std::memory_order_release);
  open();
}

QueueMemory::QueueMemory(Segment segment, Settle settle)
    : segment_(std::move(segment)), settle_(std::move(settle)) {
  const auto bad = [] {
    fail(ErrorKind::kInvalidArgument,
         "memory from another process is not a queue of this version: refused");
  };
  if (segment_.size() < order_offset(sizeof(Head))) bad();
  const Head& there = head();
  shape_ = {there.capacity, there.item_bytes, there.copy_below, there.timeout_ms};
  slots_ = there.slots;
  const std::size_t needed = order_offset(sizeof(Head)) +
                             in_lines(sizeof(std::uint32_t) * std::size_t{shape_.capacity}) +
                             std::size_t{slots_} * (kLine + in_lines(shape_.item_bytes));
  if (std::atomic_ref(head().magic).load(std::memory_order_acquire) != Head::kMagic ||
      there.bytes != segment_.size() || shape_.capacity == 0 || shape_.item_bytes == 0 ||
      slots_ != shape_.capacity + kSpareSlots || needed > segment_.size()) {
    bad();
  }
  require_own_domain(there.domain, "this queue");
  lay_out();
  open();
}

void QueueMemory::lay_out() {
  std::byte* const base = segment_.data();
  members_ = Members(reinterpret_cast<Member*>(base + in_lines(sizeof(Head))), head().domain);
  order_ = reinterpret_cast<std::uint32_t*>(base + order_offset(sizeof(Head)));
  first_slot_ = base + order_offset(sizeof(Head)) +
                in_lines(sizeof(std::uint32_t) * std::size_t{shape_.capacity});
}

void QueueMemory::open() {
  look_for_dead();
  self();
}

QueueMemory::Slot& QueueMemory::slot(std::uint32_t index) const {
  if (index >= slots_) {
    fail(ErrorKind::kPeerLost, "the memory of a queue is damaged: slot ", index, " of ", slots_);
  }
  return *reinterpret_cast<Slot*>(first_slot_ + index * (kLine + in_lines(shape_.item_bytes)));
}

std::uint32_t& QueueMemory::order(std::uint64_t position) const {
  return order_[position % shape_.capacity];
}

std::size_t QueueMemory::self() {
  const std::uint64_t known = self_.load(std::memory_order_acquire);
  const std::uint64_t generation = fork_generation();
  if (known != 0 && known >> 32 == generation) return (known & 0xffffffff) - 1;
  // The first time, and in a forked child.
  const Lock lock(*this);
  const std::size_t member = members_.claim(own_process_word());
  self_.store((generation << 32) | (member + 1), std::memory_order_release);
  return member;
}

std::size_t QueueMemory::size() const { return head().count.load(std::memory_order_acquire); }
bool QueueMemory::closed() const { return head().closed.load(std::memory_order_acquire) != 0; }
std::uint32_t QueueMemory::epoch() const { return head().epoch.load(std::memory_order_acquire); }
void QueueMemory::next_epoch() { head().epoch.fetch_add(1, std::memory_order_acq_rel); }
std::uint32_t QueueMemory::departures() const {
  return head().departures.load(std::memory_order_acquire);
}

void QueueMemory::close() {
  self();
  Lock lock(*this);
  if (closed()) return;
  head().closed_by = own_process_word();
  head().closed.store(1, std::memory_order_release);
  lock.ring_all();
}

void QueueMemory::fail_closed(const char* operation) const {
  fail(ErrorKind::kPeerLost, operation, ": the queue was closed by ",
       head().closed_by == own_process_word() ? "this process"
                                              : concat("pid ", pid_of(head().closed_by)));
}

// Before the first sleep of a call. The awaited process may need this core: on few of them yielding
// lets it bring much at once.
void QueueMemory::pause(Which which) const {
  const auto there = [&] {
    const std::size_t count = size();
    return (which == kItems ? count > 0 : count < shape_.capacity) || closed();
  };
  static const int spins = usable_cores() > 1 ? 200 : 0;
  for (int i = 0; i < spins; ++i) {
    if (there()) return;
    cpu_relax();
  }
  for (int i = 0; i < 10; ++i) {
    if (there()) return;
    yield_cpu();
  }
}

// That a thread is about to sleep. Ends with it, also where an exception comes in between.
class QueueMemory::Announcement {
 public:
  Announcement(QueueMemory& memory, Which which, std::size_t member)
      : memory_(memory), which_(which), member_(member) {}
  Announcement(const Announcement&) = delete;
  Announcement& operator=(const Announcement&) = delete;
  ~Announcement() {
    if (!here_) return;
    try {
      Lock lock(memory_);
      end();
      // The ring that was for this thread, if there was one, is the next one's.
      memory_.head().lists[which_].waking = 0;
      lock.ring(which_);
    } catch (const std::exception&) {
      // Then it stands until this process ends, and costs a ring that nobody hears at times.
    }
  }

  // Both under the lock.
  void make() {
    ++memory_.members_[member_].asleep[which_];
    here_.emplace(memory_.head().lists[which_].bell);
  }
  void end() {
    if (!here_) return;
    here_.reset();
    --memory_.members_[member_].asleep[which_];
  }
  // Without it.
  bool sleep(const Deadline& deadline) const { return here_->sleep(deadline); }

 private:
  QueueMemory& memory_;
  const Which which_;
  const std::size_t member_;
  std::optional<convoy::Announcement> here_;
};

// attempt(lock) until it has done something, or the deadline has passed.
template <class Attempt>
auto QueueMemory::wait_and(Which which, const Deadline& deadline, Attempt attempt) {
  Announcement announcement(*this, which, self());
  for (int round = 0;; ++round) {
    {
      Lock lock(*this, deadline);
      head().lists[which].waking = 0;
      announcement.end();
      auto result = attempt(lock);
      if (!attempt.nothing(result) || deadline.expired()) return result;
      if (round > 0) announcement.make();
    }
    if (round == 0) {
      pause(which);
      continue;
    }
    CONVOY_QUEUE_STEP("wait: announced");
    const auto turn = std::min(deadline, Deadline::after(kLongestSleep));
    if (!announcement.sleep(turn)) look_now_and_then();
  }
}

std::uint32_t QueueMemory::sleepers_for_testing() {
  const Lock lock(*this);
  return head().lists[kItems].bell.sleepers + head().lists[kRoom].bell.sleepers;
}

std::uint32_t QueueMemory::find_free_slot() {
  Head& h = head();
  for (std::uint32_t i = 0; i < slots_; ++i) {
    const std::uint32_t index = (h.next_slot + i) % slots_;
    if (state_of(slot(index).word.load(std::memory_order_acquire)) == SlotState::kFree) {
      h.next_slot = index + 1;
      return index;
    }
  }
  return slots_;
}

// Under the lock.
void QueueMemory::place(std::uint32_t at, std::string_view item, std::size_t member,
                        const std::function<void()>& entering) {
  Head& h = head();
  Slot& s = slot(at);
  std::memcpy(s.data(), item.data(), item.size());
  s.bytes = static_cast<std::uint32_t>(item.size());
  s.producer = own_process_word();
  s.progress.store(0, std::memory_order_relaxed);
  CONVOY_QUEUE_STEP("put: written");
  entering();
  s.word.store(slot_word(SlotState::kReady, h.next_number), std::memory_order_release);
  CONVOY_QUEUE_STEP("put: ready");
  members_[member].count_put(h.next_number);
  order(h.last++) = at;
  CONVOY_QUEUE_STEP("put: in order");
  ++h.next_number;
  h.count.fetch_add(1, std::memory_order_release);
}

QueueMemory::PutResult QueueMemory::put(std::span<const std::string_view> items,
                                        std::uint32_t epoch_seen, Hands& hands,
                                        const std::function<void(std::size_t)>& entering,
                                        const Deadline& deadline) {
  for (const std::string_view item : items) {
    CONVOY_CHECK(item.size() <= shape_.item_bytes, "an item of ", item.size(), " bytes");
  }
  struct Attempt {
    QueueMemory& memory;
    std::span<const std::string_view> items;
    std::uint32_t epoch_seen;
    Hands& hands;
    const std::function<void(std::size_t)>& entering;
    std::size_t member;

    bool nothing(const PutResult& result) const { return result.items == 0 && !result.stale; }
    PutResult operator()(Lock& lock) {
      Head& h = memory.head();
      if (memory.closed()) memory.fail_closed("put");
      std::size_t done = 0;
      const auto room = [&] { return h.count.load(std::memory_order_relaxed) < h.capacity; };
      if (memory.epoch() != epoch_seen) {
        if (room()) lock.ring(kRoom);  // this one may come again, or not
        return {.items = 0, .stale = true};
      }
      for (; done < items.size() && room(); ++done) {
        std::uint32_t at = memory.find_free_slot();
        if (at == memory.slots_) {
          h.starved.store(1, std::memory_order_seq_cst);
          at = memory.find_free_slot();  // one may have been freed just now
          if (at == memory.slots_) {
            CONVOY_QUEUE_STEP("put: starved");
            break;
          }
        }
        memory.place(at, items[done], member, [&] {
          if (entering) entering(done);
        });
        --hands.left_;
      }
      if (done > 0) {
        lock.ring(kItems);
        // Not without having put something: two without a free slot would wake each other.
        if (room()) lock.ring(kRoom);
      }
      return {.items = done, .stale = false};
    }
  };
  return wait_and(kRoom, deadline, Attempt{*this, items, epoch_seen, hands, entering, self()});
}

std::vector<QueueMemory::Item> QueueMemory::take(std::size_t most, const Deadline& deadline) {
  struct Attempt {
    QueueMemory& memory;
    std::size_t most;
    std::size_t member;

    bool nothing(const std::vector<Item>& items) const { return items.empty(); }
    std::vector<Item> operator()(Lock& lock) {
      Head& h = memory.head();
      std::vector<Item> items;
      const auto left = [&] { return h.count.load(std::memory_order_relaxed) > 0; };
      if (!left() && memory.closed()) memory.fail_closed("get");
      items.reserve(std::min<std::size_t>(most, h.count.load(std::memory_order_relaxed)));
      while (left() && items.size() < most) {
        const std::uint32_t at = memory.order(h.first);
        Slot& s = memory.slot(at);
        const std::uint64_t word = s.word.load(std::memory_order_relaxed);
        if (state_of(word) != SlotState::kReady) {
          fail(ErrorKind::kPeerLost, "the memory of a queue is damaged: no item in slot ", at);
        }
        const std::uint64_t number = number_of(word);
        s.word.store(slot_word(SlotState::kTaken, number, member), std::memory_order_release);
        CONVOY_QUEUE_STEP("take: taken");
        ++h.first;
        CONVOY_QUEUE_STEP("take: out of order");
        h.count.fetch_sub(1, std::memory_order_release);
        items.push_back({at, number, s.producer, {}, &s.progress});
      }
      if (!items.empty()) lock.ring(kRoom);
      if (left()) lock.ring(kItems);
      return items;
    }
  };
  auto items = wait_and(kItems, deadline, Attempt{*this, std::min(most, kMostAtOnce), self()});
  // Theirs until they are finished: no lock is needed.
  for (Item& item : items) {
    Slot& s = slot(item.slot);
    item.bytes.assign(reinterpret_cast<const char*>(s.data()),
                      std::min(s.bytes, shape_.item_bytes));
  }
  return items;
}

void QueueMemory::finish(const Item& item) noexcept {
  try {
    Slot& s = slot(item.slot);
    s.word.store(slot_word(SlotState::kFree, item.number), std::memory_order_seq_cst);
    if (head().starved.load(std::memory_order_seq_cst) == 0) return;
    Lock lock(*this);
    head().starved.store(0, std::memory_order_relaxed);
    lock.ring(kRoom);
  } catch (...) {
    // No lock, or no memory to repair what it guards. Who waits looks again by itself.
  }
}

void QueueMemory::exclusively(const std::function<void()>& use) {
  const Lock lock(*this);
  use();
}

void QueueMemory::for_each_item(const std::function<void(std::string_view)>& visit) const {
  for (std::uint32_t i = 0; i < slots_; ++i) {
    Slot& s = slot(i);
    if (state_of(s.word.load(std::memory_order_acquire)) == SlotState::kFree) continue;
    visit({reinterpret_cast<const char*>(s.data()), std::min(s.bytes, shape_.item_bytes)});
  }
}

QueueMemory::Hands::Hands(QueueMemory& memory, std::size_t items)
    : member_(memory.members_[memory.self()]), left_(items) {
  member_.hands.fetch_add(items, std::memory_order_relaxed);
}

QueueMemory::Hands::~Hands() {
  if (left_ > 0) member_.hands.fetch_sub(left_, std::memory_order_relaxed);
}

}  // namespace convoy::share
