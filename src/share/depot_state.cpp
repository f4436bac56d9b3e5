#include "share/depot_state.h"

#include <algorithm>

#include "os/machine.h"
#include "os/process.h"

namespace convoy::share {

std::uint64_t machine_headroom() {
  // Left to the rest of the machine when the pool grows.
  constexpr std::uint64_t kMemoryReserve = std::uint64_t{256} << 20;
  const std::uint64_t left = memory_state().headroom();
  return left - std::min(left, kMemoryReserve);
}

Depot::State::State() : headroom(machine_headroom) {}

Holding* Depot::State::add(BlockRef ref) {
  auto holding = std::make_unique<Holding>();
  holding->data = ref.memory->data() + ref.offset;
  holding->ref = std::move(ref);
  holding->count = 1;
  auto* const made = holding.get();
  holdings[&made->ref.book->book().entry(made->ref.entry)] = std::move(holding);
  return made;
}

Holding* Depot::State::find_guest(const std::byte* address, std::size_t bytes) {
  const auto found = guests.find(address);
  if (found == guests.end()) return nullptr;
  Holding* const holding = holdings.at(found->second).get();
  if (holding->ref.bytes < bytes) return nullptr;
  ++holding->count;
  return holding;
}

void Depot::State::make_guest(Holding* holding, const std::shared_ptr<Region>& region,
                              std::uint64_t offset, std::size_t bytes, const std::byte* address) {
  holding->ref.memory = region;
  holding->ref.offset = offset;
  holding->ref.bytes = bytes;
  holding->data = region->data() + offset;
  holding->guest = address;
  guests[address] = &holding->ref.book->book().entry(holding->ref.entry);
}

std::shared_ptr<Region> Depot::State::known(const Segment::Key& key) {
  const auto found = regions.find(key);
  return found == regions.end() ? nullptr : found->second.lock();
}

void Depot::State::remember(const std::shared_ptr<Region>& region) {
  std::erase_if(regions, [](const auto& item) { return item.second.expired(); });
  std::erase_if(slots, [this](const auto& item) {
    return std::none_of(regions.begin(), regions.end(),
                        [&](const auto& known) { return known.second.lock().get() == item.first; });
  });
  regions[region->key()] = region;
}

int Depot::State::slot_in(const Region& region) {
  const auto found = slots.find(&region);
  if (found != slots.end()) return found->second;
  const Book& book = region.book();
  if (region.kind() == Region::Kind::kNamed) return slots[&region] = named->claim_slot(book);
  const std::uint64_t domain = book.head().domain;
  return slots[&region] = book.claim_slot(
             own_process_word(), [domain](ProcessWord word) { return is_dead(word, domain); });
}

bool Depot::State::end_own(const BookEntry* entry) {
  Holding& holding = *holdings.at(entry);
  if (!holding.ref.book->book().try_end(holding.ref.entry)) return false;
  if (holding.guest) guests.erase(holding.guest);
  if (holding.keep) dropped.push_back(std::move(holding.keep));
  pool.give_back(holding.place);
  holdings.erase(entry);
  return true;
}

void Depot::State::look_at_abandoned(std::size_t most) {
  for (std::size_t i = 0; i < most && !abandoned.empty(); ++i) {
    const std::size_t at = next_look++ % abandoned.size();
    const auto* const entry = abandoned[at];
    const auto found = holdings.find(entry);
    const bool back = found != holdings.end() && found->second->count > 0;
    if (back || found == holdings.end() || end_own(entry)) {
      abandoned[at] = abandoned.back();
      abandoned.pop_back();
    }
  }
}

void Depot::State::drop_user(ProcessWord user) {
  const ProcessWord self = own_process_word();
  pool.for_each_region([&](const std::shared_ptr<Region>& region) {
    for (int i = 0; i < kMostHolders; ++i) {
      if (region->book().slot(i) == user) region->book().drop_slot(i, user, self);
    }
  });
}

// A pidfd that is held is asked. Without one the kernel is, and a pidfd is kept if there is one: it
// needs no descriptor when none is left.
bool Depot::State::is_gone(ProcessWord user, UniqueFd& pidfd) {
  if (pidfd && liveness_by(pidfd.get()) != Liveness::kUnknown) {
    return liveness_by(pidfd.get()) == Liveness::kDead;
  }
  // Opened before the look at its start time: so it is that process's, or is not kept.
  pidfd = open_pidfd(pid_of(user));
  const Liveness found = word_liveness(user, own_domain());
  if (found != Liveness::kAlive) pidfd.reset();
  return found == Liveness::kDead;
}

void Depot::State::look_for_deaths() {
  pool.for_each_region([&](const std::shared_ptr<Region>& region) {
    for (int i = 0; i < kMostHolders; ++i) {
      const ProcessWord user = region->book().slot(i);
      if (user != 0) users.try_emplace(user);
    }
  });
  for (auto i = users.begin(); i != users.end();) {
    const bool gone = is_gone(i->first, i->second);
    if (gone) drop_user(i->first);
    i = gone ? users.erase(i) : std::next(i);
  }
}

void Depot::State::sweep() {
  if (!abandoned.empty()) look_for_deaths();
  for (std::size_t left = abandoned.size(); left > 0; --left) look_at_abandoned(1);
}

}  // namespace convoy::share
