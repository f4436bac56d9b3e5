#include "share/members.h"

#include "base/error.h"

namespace convoy::share {

void Member::count_put(std::uint64_t number) {
  const std::uint64_t counted = number << 32;
  std::uint64_t seen = hands.load(std::memory_order_relaxed);
  std::uint64_t next = 0;
  do {
    const std::uint64_t left = seen & 0xffffffff;
    if ((seen & ~std::uint64_t{0xffffffff}) == counted || left == 0) return;
    next = counted | (left - 1);
  } while (!hands.compare_exchange_weak(seen, next, std::memory_order_relaxed));
}

std::size_t Members::claim(ProcessWord process) const {
  require_own_domain(domain_, "this queue or barrier");
  std::size_t free = kMostMembers;
  for (std::size_t i = 0; i < kMostMembers; ++i) {
    const ProcessWord there = first_[i].process.load(std::memory_order_relaxed);
    if (there == process) return i;
    if (there == 0 && free == kMostMembers) free = i;
  }
  if (free == kMostMembers) {
    fail(ErrorKind::kResource, "it is used by ", kMostMembers,
         " processes already, which is the limit");
  }
  first_[free].process.store(process, std::memory_order_release);
  return free;
}

void Members::drop(std::size_t index) const {
  Member& member = first_[index];
  member.hands.store(0, std::memory_order_relaxed);
  member.passive = 0;
  member.asleep = {};
  member.process.store(0, std::memory_order_release);
}

std::vector<Members::Dead> Members::find_dead() const {
  std::vector<Dead> found;
  const ProcessWord self = own_process_word();
  for (std::size_t i = 0; i < kMostMembers; ++i) {
    const ProcessWord process = first_[i].process.load(std::memory_order_acquire);
    if (process != 0 && process != self && is_dead(process, domain_)) found.push_back({i, process});
  }
  return found;
}

}  // namespace convoy::share
