// How a queue gets over the end of its users: the lock of the dead, their members, what they held,
// and who leaves.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "share/queue_head.h"

namespace convoy::share {
namespace {

constexpr auto kLookInterval = std::chrono::seconds(1);
// Of the lock, however short the call's own deadline is. It is held for less than a microsecond,
// but for a process that was stopped in between.
constexpr auto kLockPatience = std::chrono::seconds(5);

std::int64_t now_ns() { return Deadline::Clock::now().time_since_epoch().count(); }

}  // namespace

QueueMemory::Lock::Lock(QueueMemory& memory, const Deadline& deadline) : memory_(memory) {
  const auto least = Deadline::after(kLockPatience);
  const auto taken = memory_.head().mutex.lock(std::max(deadline, least));
  if (!taken) {
    fail(ErrorKind::kTimeout,
         "a process holds the lock of a queue and does not go on: is one of "
         "its users stopped?");
  }
  std::uint32_t& broken = memory_.head().broken;
  if (*taken == RobustMutex::Taken::kFromDead) broken = 1;
  if (broken == 0) return;
  try {
    memory_.repair();
    broken = 0;
  } catch (...) {
    unlock();  // the next one tries again
    throw;
  }
}

QueueMemory::Lock::Lock(QueueMemory& memory) : Lock(memory, Deadline::after(kLockPatience)) {}

QueueMemory::Lock::~Lock() {
  unlock();
  for (std::size_t i = 0; i < 2; ++i) {
    if (rings_[i] != 0) ring_anyway(memory_.head().lists[i].bell, rings_[i]);
  }
}

void QueueMemory::Lock::unlock() noexcept {
  try {
    memory_.head().mutex.unlock();
  } catch (const Error& error) {
    log_error("queue: ", error.what());  // its memory was damaged by another process
  }
}

void QueueMemory::Lock::ring(Which which) {
  List& list = memory_.head().lists[which];
  if (list.bell.sleepers.load(std::memory_order_relaxed) == 0 || list.waking != 0) return;
  list.waking = 1;
  rings_[which] = 1;
}

void QueueMemory::Lock::ring_all() { rings_[0] = rings_[1] = 0x7fffffff; }

// Under the lock: a process died with it. The slots tell what is there.
void QueueMemory::repair() {
  CONVOY_QUEUE_STEP("repair");
  Head& h = head();
  std::vector<std::pair<std::uint64_t, std::uint32_t>> ready;
  for (std::uint32_t i = 0; i < slots_; ++i) {
    const std::uint64_t word = slot(i).word.load(std::memory_order_acquire);
    if (state_of(word) == SlotState::kReady) ready.emplace_back(number_of(word), i);
  }
  std::sort(ready.begin(), ready.end());
  if (ready.size() > shape_.capacity) ready.resize(shape_.capacity);
  h.first = 0;
  h.last = 0;
  for (const auto& item : ready) order(h.last++) = item.second;
  if (!ready.empty() && ready.back().first >= h.next_number) {
    // It came in, and its producer may not have got to say so.
    h.next_number = ready.back().first + 1;
    const ProcessWord producer = slot(ready.back().second).producer;
    for (std::size_t i = 0; i < kMostMembers; ++i) {
      if (members_[i].process.load(std::memory_order_relaxed) != producer) continue;
      members_[i].count_put(ready.back().first);
    }
  }
  h.count.store(static_cast<std::uint32_t>(h.last), std::memory_order_release);
  for (std::size_t which = 0; which < 2; ++which) {
    List& list = h.lists[which];
    list.waking = 0;
    std::uint32_t asleep = 0;
    for (std::size_t i = 0; i < kMostMembers; ++i) asleep += members_[i].asleep[which];
    list.bell.sleepers.store(asleep, std::memory_order_relaxed);
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

// Under the lock. What it had taken is this process's now, to be settled by it without the lock.
void QueueMemory::bury(const Members::Dead& dead, std::vector<Item>& left) {
  Member& member = members_[dead.index];
  if (member.process.load(std::memory_order_relaxed) != dead.process) return;
  Head& h = head();
  const std::size_t me = (self_.load(std::memory_order_relaxed) & 0xffffffff) - 1;
  for (std::uint32_t i = 0; i < slots_; ++i) {
    Slot& s = slot(i);
    const std::uint64_t word = s.word.load(std::memory_order_acquire);
    const SlotState state = state_of(word);
    if (state != SlotState::kTaken && state != SlotState::kLeft) continue;
    if (member_of(word) != dead.index) continue;
    if (state == SlotState::kTaken) {
      note_loss(
          dead.process, 1,
          concat("died while it held item ", number_of(word), ", put by pid ", pid_of(s.producer)));
    }
    s.word.store(slot_word(SlotState::kLeft, number_of(word), me), std::memory_order_release);
    const std::size_t bytes = std::min(s.bytes, shape_.item_bytes);
    left.push_back({i, number_of(word), s.producer,
                    std::string(reinterpret_cast<const char*>(s.data()), bytes), &s.progress});
  }
  const std::uint32_t puts = member.puts();
  if (puts > 0) note_loss(dead.process, puts, "died while it put an item");
  for (std::size_t which = 0; which < 2; ++which) {
    List& list = h.lists[which];
    auto& sleepers = list.bell.sleepers;
    sleepers -= std::min(sleepers.load(std::memory_order_relaxed), member.asleep[which]);
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

// What nobody can take any more.
void QueueMemory::drain() {
  std::uint64_t dropped = 0;
  while (size() > 0) {
    std::vector<Item> items;
    try {
      items = take(32, Deadline::after(std::chrono::seconds(0)));
    } catch (const Error&) {
      break;  // another was quicker, and the queue is closed
    }
    for (const Item& item : items) {
      settle_(item.bytes, *item.progress);
      finish(item);
    }
    if (items.empty()) continue;
    dropped += items.size();
    const Lock lock(*this);
    note_loss(own_process_word(), items.size(), "was the last process to detach from the queue");
  }
  if (dropped > 0) {
    log_info("queue: ", dropped, " items were in it when the last process detached from it");
  }
}

bool QueueMemory::leave(const std::function<bool(std::string_view)>& concerns,
                        const std::function<bool()>& held_elsewhere) {
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
      if (state_of(s.word.load(std::memory_order_acquire)) == SlotState::kFree) continue;
      const std::size_t bytes = std::min(s.bytes, shape_.item_bytes);
      mine = mine || s.producer == self_word ||
             (concerns && concerns({reinterpret_cast<const char*>(s.data()), bytes}));
    }
    members_[me].passive = 1;
  }
  others = others || (held_elsewhere && held_elsewhere());
  if (others && mine) return false;
  if (!others) drain();  // not under the lock: settling takes its time
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

}  // namespace convoy::share
