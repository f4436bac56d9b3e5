#include "share/queue_memory.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/error.h"
#include "base/log.h"
#include "os/fork_guard.h"
#include "os/machine.h"
#include "os/robust_mutex.h"

namespace convoy::share {
namespace {

constexpr std::uint64_t kMagic = 0x3145554555515643;  // "CVQUEUE1"
constexpr std::size_t kLine = 64;
constexpr std::uint32_t kSpareSlots = 64;  // for items that are taken and not finished
constexpr std::size_t kMostAtOnce = 32;    // of them by one call
constexpr auto kLongestSleep = std::chrono::milliseconds(100);
constexpr auto kLookInterval = std::chrono::seconds(1);
// Of the lock, however short the call's own deadline is. It is held for less than a microsecond,
// but for a process that was stopped in between.
constexpr auto kLockPatience = std::chrono::seconds(5);

constexpr std::size_t in_lines(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// A slot's word: number (48), member (12), state (4).
enum State : std::uint64_t { kFree, kReady, kTaken, kLeft };
constexpr std::uint64_t word_of(State state, std::uint64_t number, std::size_t member = 0) {
  return (number << 16) | (std::uint64_t{member} << 4) | state;
}
constexpr State state_of(std::uint64_t word) { return static_cast<State>(word & 15); }
constexpr std::uint64_t number_of(std::uint64_t word) { return word >> 16; }
constexpr std::size_t member_of(std::uint64_t word) { return (word >> 4) & 0xfff; }

std::int64_t now_ns() { return Deadline::Clock::now().time_since_epoch().count(); }

}  // namespace

// Who sleeps. Under the lock, but for the bell, on which they sleep.
struct QueueMemory::List {
  std::atomic<std::uint32_t> bell{0};
  std::uint32_t sleepers = 0;
  std::uint32_t waking = 0;  // 1: one was woken and has not come yet
  std::uint32_t unused = 0;
};

// All under the lock; atomics are read without it too (acquire).
struct QueueMemory::Head {
  std::uint64_t magic = 0;  // written last
  std::uint64_t bytes = 0;
  std::uint32_t capacity = 0;
  std::uint32_t item_bytes = 0;
  std::uint32_t copy_below = 0;
  std::uint32_t timeout_ms = 0;
  std::uint32_t slots = 0;
  alignas(kLine) RobustMutex mutex;
  alignas(kLine) std::atomic<std::uint32_t> count{0};
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
  char latest_loss[160] = {};
};

struct alignas(kLine) QueueMemory::Slot {
  std::atomic<std::uint64_t> word{0};
  ProcessWord producer = 0;
  std::uint32_t bytes = 0;
  std::atomic<std::uint32_t> progress{0};  // of settling, by the taker
  std::byte* data() { return reinterpret_cast<std::byte*>(this) + kLine; }
};

// Holds the lock; puts right what a dead process left. Rings when it is given back.
class QueueMemory::Lock {
 public:
  Lock(QueueMemory& memory, const Deadline& deadline) : memory_(memory) {
    const auto least = Deadline::after(kLockPatience);
    const auto taken = memory_.head().mutex.lock(std::max(deadline, least));
    if (!taken) {
      fail(ErrorKind::kTimeout,
           "a process holds the lock of a queue and does not go on: is one of "
           "its users stopped?");
    }
    if (*taken == RobustMutex::Taken::kFromDead) memory_.repair();
  }
  explicit Lock(QueueMemory& memory) : Lock(memory, Deadline::after(kLockPatience)) {}
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() {
    Head& head = memory_.head();
    try {
      head.mutex.unlock();
    } catch (const Error& error) {
      log_error("queue: ", error.what());  // its memory was damaged by another process
    }
    for (std::size_t i = 0; i < 2; ++i) {
      if (rings_[i] != 0) futex_wake(head.lists[i].bell, rings_[i]);
    }
  }

  // For one sleeper, if there is any and none is on its way.
  void ring(Which which) {
    List& list = memory_.head().lists[which];
    if (list.sleepers == 0 || list.waking != 0) return;
    list.waking = 1;
    list.bell.fetch_add(1, std::memory_order_relaxed);
    rings_[which] = 1;
  }
  void ring_all() {
    for (std::size_t i = 0; i < 2; ++i) {
      memory_.head().lists[i].bell.fetch_add(1, std::memory_order_relaxed);
      rings_[i] = 0x7fffffff;
    }
  }

 private:
  QueueMemory& memory_;
  int rings_[2] = {0, 0};
};

namespace {

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
  lay_out();
  for (std::size_t i = 0; i < kMostMembers; ++i) new (&members_[i]) Member;
  for (std::uint32_t i = 0; i < slots_; ++i) new (&slot(i)) Slot;
  std::atomic_ref(made->magic).store(kMagic, std::memory_order_release);
  open();
}

QueueMemory::QueueMemory(Segment segment, Settle settle)
    : segment_(std::move(segment)), settle_(std::move(settle)) {
  const auto bad = [] {
    fail(ErrorKind::kInvalidArgument,
         "memory from another process is no queue of this version: refused");
  };
  if (segment_.size() < order_offset(sizeof(Head))) bad();
  const Head& there = head();
  shape_ = {there.capacity, there.item_bytes, there.copy_below, there.timeout_ms};
  slots_ = there.slots;
  const std::size_t needed = order_offset(sizeof(Head)) +
                             in_lines(sizeof(std::uint32_t) * std::size_t{shape_.capacity}) +
                             std::size_t{slots_} * (kLine + in_lines(shape_.item_bytes));
  if (std::atomic_ref(head().magic).load(std::memory_order_acquire) != kMagic ||
      there.bytes != segment_.size() || shape_.capacity == 0 || shape_.item_bytes == 0 ||
      slots_ != shape_.capacity + kSpareSlots || needed > segment_.size()) {
    bad();
  }
  lay_out();
  open();
}

void QueueMemory::lay_out() {
  std::byte* const base = segment_.data();
  members_ = Members(reinterpret_cast<Member*>(base + in_lines(sizeof(Head))));
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

// Under the lock: a process died with it. The slots tell what is there.
void QueueMemory::repair() {
  Head& h = head();
  std::vector<std::pair<std::uint64_t, std::uint32_t>> ready;
  for (std::uint32_t i = 0; i < slots_; ++i) {
    const std::uint64_t word = slot(i).word.load(std::memory_order_acquire);
    if (state_of(word) == kReady) ready.emplace_back(number_of(word), i);
  }
  std::sort(ready.begin(), ready.end());
  if (ready.size() > shape_.capacity) ready.resize(shape_.capacity);
  h.first = 0;
  h.last = 0;
  for (const auto& item : ready) order(h.last++) = item.second;
  if (!ready.empty() && ready.back().first >= h.next_number) {
    // It came in, and its producer did not get to say so.
    h.next_number = ready.back().first + 1;
    const ProcessWord producer = slot(ready.back().second).producer;
    for (std::size_t i = 0; i < kMostMembers; ++i) {
      auto& busy = members_[i].busy;
      if (members_[i].process.load(std::memory_order_relaxed) == producer && busy.load() > 0) {
        busy.fetch_sub(1);
      }
    }
  }
  h.count.store(static_cast<std::uint32_t>(h.last), std::memory_order_release);
  for (std::size_t which = 0; which < 2; ++which) {
    List& list = h.lists[which];
    list.waking = 0;
    list.sleepers = 0;
    for (std::size_t i = 0; i < kMostMembers; ++i) list.sleepers += members_[i].asleep[which];
  }
}

void QueueMemory::note_loss(ProcessWord process, std::uint64_t items, std::string_view what) {
  Head& h = head();
  h.lost += items;
  const std::string text = concat("pid ", pid_of(process), " ", what);
  const std::size_t length = std::min(text.size(), sizeof h.latest_loss - 1);
  std::memcpy(h.latest_loss, text.data(), length);
  h.latest_loss[length] = 0;
}

// Under the lock. What it had taken is this process's now, to be settled by it without the lock.
void QueueMemory::bury(const Members::Dead& dead, std::vector<Item>& left) {
  Member& member = members_[dead.index];
  if (member.process.load(std::memory_order_relaxed) != dead.process) return;
  Head& h = head();
  const std::size_t me = (self_.load(std::memory_order_relaxed) & 0xffffffff) - 1;
  for (std::uint32_t i = 0; i < slots_; ++i) {
    Slot& s = slot(i);
    const std::uint64_t word = s.word.load(std::memory_order_acquire);
    const State state = state_of(word);
    if ((state != kTaken && state != kLeft) || member_of(word) != dead.index) continue;
    if (state == kTaken) {
      note_loss(dead.process, 1,
                concat("ended with item ", number_of(word), " of pid ", pid_of(s.producer),
                       " in its hands"));
    }
    s.word.store(word_of(kLeft, number_of(word), me), std::memory_order_release);
    const std::size_t bytes = std::min(s.bytes, shape_.item_bytes);
    left.push_back({i, number_of(word), s.producer,
                    std::string(reinterpret_cast<const char*>(s.data()), bytes), &s.progress});
  }
  const std::uint32_t puts = member.busy.load();
  if (puts > 0) note_loss(dead.process, puts, "ended while it put an item");
  for (std::size_t which = 0; which < 2; ++which) {
    List& list = h.lists[which];
    list.sleepers -= std::min(list.sleepers, member.asleep[which]);
    list.waking = 0;
  }
  members_.drop(dead.index);
  h.departures.fetch_add(1, std::memory_order_acq_rel);
}

void QueueMemory::look_for_dead() {
  head().last_look.store(now_ns(), std::memory_order_relaxed);
  const auto dead = members_.find_dead();
  if (dead.empty()) return;
  self();
  std::vector<Item> left;
  std::uint64_t before = 0, after = 0;
  std::string latest;
  {
    Lock lock(*this);
    before = head().lost;
    for (const auto& one : dead) bury(one, left);
    after = head().lost;
    latest = head().latest_loss;
    // One of them may have been on its way to what is there.
    if (head().count.load(std::memory_order_relaxed) > 0) lock.ring(kItems);
    lock.ring(kRoom);
  }
  if (after != before) log_warn("queue: ", latest, "; ", after, " items were lost in all");
  for (const Item& item : left) {
    settle_(item.bytes, *item.progress);
    finish(item);
  }
}

void QueueMemory::look_now_and_then() {
  auto& last = head().last_look;
  std::int64_t then = last.load(std::memory_order_relaxed);
  const std::int64_t now = now_ns();
  if (now - then < std::chrono::nanoseconds(kLookInterval).count()) return;
  if (last.compare_exchange_strong(then, now)) look_for_dead();
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

// attempt(lock) until it has done something, or the deadline has passed.
template <class Attempt>
auto QueueMemory::wait_and(Which which, const Deadline& deadline, Attempt attempt) {
  const std::size_t me = self();
  List& list = head().lists[which];
  bool announced = false;
  for (int round = 0;; ++round) {
    std::uint32_t seen = 0;
    {
      Lock lock(*this, deadline);
      list.waking = 0;
      if (announced) {
        if (list.sleepers > 0) --list.sleepers;
        --members_[me].asleep[which];
        announced = false;
      }
      auto result = attempt(lock);
      if (!attempt.nothing(result) || deadline.expired()) return result;
      if (round > 0) {
        seen = list.bell.load(std::memory_order_relaxed);
        ++members_[me].asleep[which];
        ++list.sleepers;
        announced = true;
      }
    }
    if (round == 0) {
      pause(which);
      continue;
    }
    const auto turn = std::min(deadline, Deadline::after(kLongestSleep));
    if (!futex_wait(list.bell, seen, turn)) look_now_and_then();
  }
}

std::uint32_t QueueMemory::find_free_slot() {
  Head& h = head();
  for (std::uint32_t i = 0; i < slots_; ++i) {
    const std::uint32_t index = (h.next_slot + i) % slots_;
    if (state_of(slot(index).word.load(std::memory_order_acquire)) == kFree) {
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
  die_here("put: written");
  entering();
  s.word.store(word_of(kReady, h.next_number), std::memory_order_release);
  die_here("put: ready");
  members_[member].busy.fetch_sub(1, std::memory_order_relaxed);
  order(h.last++) = at;
  die_here("put: in order");
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
      if (memory.epoch() != epoch_seen) return {.items = 0, .stale = true};
      std::size_t done = 0;
      const auto room = [&] { return h.count.load(std::memory_order_relaxed) < h.capacity; };
      for (; done < items.size() && room(); ++done) {
        std::uint32_t at = memory.find_free_slot();
        if (at == memory.slots_) {
          h.starved.store(1, std::memory_order_seq_cst);
          at = memory.find_free_slot();  // one may have been freed just now
          if (at == memory.slots_) break;
        }
        memory.place(at, items[done], member, [&] {
          if (entering) entering(done);
        });
        --hands.left_;
      }
      if (done > 0) lock.ring(kItems);
      if (room()) lock.ring(kRoom);
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
      while (left() && items.size() < most) {
        const std::uint32_t at = memory.order(h.first);
        Slot& s = memory.slot(at);
        const std::uint64_t word = s.word.load(std::memory_order_relaxed);
        if (state_of(word) != kReady) {
          fail(ErrorKind::kPeerLost, "the memory of a queue is damaged: no item in slot ", at);
        }
        const std::uint64_t number = number_of(word);
        s.word.store(word_of(kTaken, number, member), std::memory_order_release);
        memory.die_here("take: taken");
        ++h.first;
        memory.die_here("take: out of order");
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
  Slot& s = slot(item.slot);
  s.word.store(word_of(kFree, item.number), std::memory_order_seq_cst);
  if (head().starved.load(std::memory_order_seq_cst) == 0) return;
  try {
    Lock lock(*this);
    head().starved.store(0, std::memory_order_relaxed);
    lock.ring(kRoom);
  } catch (const Error&) {
    // Who waits looks again by itself.
  }
}

void QueueMemory::count_lost(const Item& item, std::string_view why) {
  const std::string text = concat("put an item that cannot be received: ", why);
  {
    const Lock lock(*this);
    note_loss(item.producer, 1, text);
  }
  log_warn("queue: pid ", pid_of(item.producer), " ", text);
}

QueueMemory::Losses QueueMemory::lost() {
  const Lock lock(*this);
  return {head().lost, head().latest_loss};
}

void QueueMemory::exclusively(const std::function<void()>& use) {
  const Lock lock(*this);
  use();
}

void QueueMemory::for_each_item(const std::function<void(std::string_view)>& visit) const {
  for (std::uint32_t i = 0; i < slots_; ++i) {
    Slot& s = slot(i);
    if (state_of(s.word.load(std::memory_order_acquire)) == kFree) continue;
    visit({reinterpret_cast<const char*>(s.data()), std::min(s.bytes, shape_.item_bytes)});
  }
}

void QueueMemory::drain() {
  for (;;) {
    std::vector<Item> items;
    {
      const Lock lock(*this);
      if (head().count.load(std::memory_order_relaxed) == 0) return;
    }
    try {
      items = take(kMostAtOnce, Deadline::after(std::chrono::seconds(0)));
    } catch (const Error&) {
      return;  // another was quicker, and the queue is closed
    }
    for (const Item& item : items) {
      settle_(item.bytes, *item.progress);
      finish(item);
    }
  }
}

bool QueueMemory::leave(const std::function<bool(std::string_view)>& concerns) {
  look_for_dead();
  const std::size_t me = self();
  bool others = false, mine = false;
  {
    const Lock lock(*this);
    for (std::size_t i = 0; i < kMostMembers; ++i) {
      const bool there = members_[i].process.load(std::memory_order_relaxed) != 0;
      others = others || (there && i != me && members_[i].passive == 0);
    }
    const ProcessWord self_word = own_process_word();
    for (std::uint32_t i = 0; i < slots_; ++i) {
      Slot& s = slot(i);
      if (state_of(s.word.load(std::memory_order_acquire)) == kFree) continue;
      const std::size_t bytes = std::min(s.bytes, shape_.item_bytes);
      mine = mine || s.producer == self_word ||
             (concerns && concerns({reinterpret_cast<const char*>(s.data()), bytes}));
    }
    members_[me].passive = 1;
    if (others && mine) return false;
  }
  // Not under the lock: settling takes its time. A process that opens the queue meanwhile gets it
  // from somebody who has it, so there is none.
  if (!others) drain();
  const Lock lock(*this);
  members_.drop(me);
  self_.store(0, std::memory_order_release);
  head().departures.fetch_add(1, std::memory_order_acq_rel);
  return true;
}

void QueueMemory::come_back() {
  const std::size_t me = self();
  const Lock lock(*this);
  members_[me].passive = 0;
}

QueueMemory::Hands::Hands(QueueMemory& memory, std::size_t items)
    : member_(memory.members_[memory.self()]), left_(items) {
  member_.busy.fetch_add(static_cast<std::uint32_t>(items), std::memory_order_relaxed);
}

QueueMemory::Hands::~Hands() {
  if (left_ > 0)
    member_.busy.fetch_sub(static_cast<std::uint32_t>(left_), std::memory_order_relaxed);
}

}  // namespace convoy::share
