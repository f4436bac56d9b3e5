#include "share/sync_memory.h"

#include <algorithm>

#include "base/error.h"
#include "os/machine.h"

namespace convoy::share {
namespace {

// Waiting spins for a moment where there is more than one core.
WaitPolicy policy() {
  static const WaitPolicy chosen{.spins = usable_cores() > 1 ? 200 : 0, .yields = 10};
  return chosen;
}

constexpr auto kLookInterval = std::chrono::milliseconds(100);  // for processes that have ended

}  // namespace

void EventMemory::set() noexcept {
  std::uint32_t seen = word_.value.load(std::memory_order_relaxed);
  while ((seen & 1) == 0) {
    if (word_.value.compare_exchange_weak(seen, seen + 1, std::memory_order_release,
                                          std::memory_order_relaxed)) {
      return word_.wake();
    }
  }
  // It was set already: what this thread wrote before goes with that.
  word_.value.fetch_or(1, std::memory_order_release);
}

void EventMemory::clear() noexcept {
  std::uint32_t seen = word_.value.load(std::memory_order_relaxed);
  // From set to not set is a step up too: every round has its own number.
  while ((seen & 1) == 1 &&
         !word_.value.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel,
                                            std::memory_order_relaxed)) {
  }
}

bool EventMemory::wait(const Deadline& deadline) {
  const std::uint32_t before = word_.value.load(std::memory_order_acquire);
  return wait_until(word_, policy(), deadline,
                    [before](std::uint32_t now) { return (now & 1) == 1 || now != before; });
}

// What a dead process may leave half done is nothing: each change is one store.
class BarrierMemory::Guard {
 public:
  explicit Guard(BarrierMemory& memory) : memory_(memory) {
    if (!memory_.mutex_.lock(Deadline::after(std::chrono::seconds(5)))) {
      fail(ErrorKind::kTimeout, "a process holds the lock of a barrier and does not go on");
    }
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard() {
    try {
      memory_.mutex_.unlock();
    } catch (const Error&) {
      // The memory was damaged; the next one hears of it.
    }
  }

 private:
  BarrierMemory& memory_;
};

void BarrierMemory::init(std::uint32_t parties) {
  mutex_.init();
  head.domain = own_domain();
  parties_ = parties;
}

void BarrierMemory::join() {
  const Guard guard(*this);
  members().claim(own_process_word());
}

void BarrierMemory::leave() {
  const Guard guard(*this);
  members().drop(members().claim(own_process_word()));
}

bool BarrierMemory::look_for_dead() {
  const auto dead = members().find_dead();
  const Guard guard(*this);
  for (const auto& one : dead) {
    if (members_[one.index].process.load(std::memory_order_relaxed) != one.process) continue;
    members().drop(one.index);
    culprit_ = one.process;
    broken_ = 1;
    end_round(false);
  }
  return broken_ == 1;
}

void BarrierMemory::end_round(bool good) {
  const std::uint32_t round = round_.value.load(std::memory_order_relaxed);
  const std::uint32_t bit = std::uint32_t{1} << (round % 32);
  failed_ = good ? failed_ & ~bit : failed_ | bit;
  arrived_.store(0, std::memory_order_release);
  round_.store_and_wake(round + 1);
}

void BarrierMemory::fail_broken(bool by_death) const {
  if (!by_death) {
    fail(ErrorKind::kPeerLost, "the barrier was reset while others waited at it");
  }
  fail(ErrorKind::kPeerLost, "the barrier is broken: pid ", pid_of(culprit_),
       " had it and has ended; reset() makes it usable again");
}

std::size_t BarrierMemory::wait(const Deadline& deadline) {
  std::uint32_t round = 0;
  std::size_t index = 0;
  {
    const Guard guard(*this);
    members().claim(own_process_word());
    if (broken_ == 1) fail_broken(true);
    round = round_.value.load(std::memory_order_relaxed);
    index = arrived_.load(std::memory_order_relaxed) + 1;
    if (index == parties_) {
      end_round(true);
      return 0;
    }
    arrived_.store(static_cast<std::uint32_t>(index), std::memory_order_release);
  }
  for (;;) {
    const auto turn = std::min(deadline, Deadline::after(kLookInterval));
    const bool moved =
        wait_until(round_, policy(), turn, [round](std::uint32_t now) { return now != round; });
    const bool dead = !moved && look_for_dead();
    const Guard guard(*this);
    const bool over = round_.value.load(std::memory_order_relaxed) != round;
    if (over && ((failed_ >> (round % 32)) & 1) != 0) fail_broken(broken_ == 1);
    if (over) return index;
    if (dead || !deadline.expired()) continue;
    arrived_.fetch_sub(1, std::memory_order_acq_rel);
    fail(ErrorKind::kTimeout, "barrier: ", index, " of ", parties_, " were there by the deadline");
  }
}

void BarrierMemory::reset() {
  const Guard guard(*this);
  broken_ = 0;
  end_round(false);
}

}  // namespace convoy::share
