#include "share/depot.h"

#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include "base/error.h"
#include "base/log.h"
#include "os/fork_guard.h"
#include "os/machine.h"
#include "os/process.h"
#include "share/named.h"
#include "share/pool.h"
#include "transport/shm/fabric.h"

namespace convoy::share {

// A block that this process uses, or owns.
struct Holding {
  BlockRef ref;
  std::byte* data = nullptr;
  std::size_t count = 0;   // leases
  int slot = -1;           // this process's bit, where the block is another's
  Pool::Place place = {};  // where it is our own
  bool guest = false;      // ours, for memory of a group
};

namespace {

// Left to the rest of the machine when the pool grows.
constexpr std::uint64_t kMemoryReserve = std::uint64_t{256} << 20;
// Looked at in each allocation, so that what is abandoned comes back little by little.
constexpr std::size_t kLooksEachTime = 8;

std::uint64_t machine_headroom() {
  const std::uint64_t left = memory_state().headroom();
  return left - std::min(left, kMemoryReserve);
}

}  // namespace

struct Depot::State {
  Pool pool;
  std::unordered_map<const BookEntry*, std::unique_ptr<Holding>> holdings;
  std::vector<const BookEntry*> abandoned;  // ours, no lease here, somebody holds them
  std::map<Segment::Key, std::weak_ptr<Region>> regions;
  std::unordered_map<const std::byte*, const BookEntry*> guests;  // memory of groups, by address
  std::map<ProcessWord, UniqueFd> users;                          // of our pool: pidfds
  std::vector<std::weak_ptr<Reaper>> reapers;
  std::function<std::uint64_t()> headroom = machine_headroom;
  std::optional<NamedFolder> named;
  std::unordered_map<const Region*, int> slots;  // ours in regions of others

  Holding* add(BlockRef ref) {
    auto holding = std::make_unique<Holding>();
    holding->data = ref.memory->data() + ref.offset;
    holding->ref = std::move(ref);
    holding->count = 1;
    auto* const made = holding.get();
    holdings[&made->ref.book->book().entry(made->ref.entry)] = std::move(holding);
    return made;
  }
  std::shared_ptr<Region> known(const Segment::Key& key) {
    const auto found = regions.find(key);
    return found == regions.end() ? nullptr : found->second.lock();
  }
  void remember(const std::shared_ptr<Region>& region) {
    std::erase_if(regions, [](const auto& item) { return item.second.expired(); });
    std::erase_if(slots, [this](const auto& item) {
      return std::none_of(regions.begin(), regions.end(), [&](const auto& known) {
        return known.second.lock().get() == item.first;
      });
    });
    regions[region->key()] = region;
  }

  int slot_in(const Region& region) {
    const auto found = slots.find(&region);
    if (found != slots.end()) return found->second;
    const ProcessWord self =
        region.kind() == Region::Kind::kNamed ? named->number() : own_process_word();
    return slots[&region] = region.book().claim_slot(self);
  }

  // Nobody here uses the block: true if it is free again.
  bool end_own(const BookEntry* entry) {
    Holding& holding = *holdings.at(entry);
    if (!holding.ref.book->book().try_end(holding.ref.entry)) return false;
    if (holding.guest) guests.erase(holding.data);
    pool.give_back(holding.place);
    holdings.erase(entry);
    return true;
  }

  void look_at_abandoned(std::size_t most) {
    for (std::size_t i = 0; i < most && !abandoned.empty(); ++i) {
      // Round robin: the last goes to the front of the line's other end.
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
  std::size_t next_look = 0;

  void drop_user(ProcessWord user) {
    pool.for_each_region([&](const std::shared_ptr<Region>& region) {
      for (int i = 0; i < kMostHolders; ++i) {
        if (region->book().slot(i) == user) region->book().drop_slot(i);
      }
    });
  }

  // Finds out which processes use the pool, and which of them are gone.
  void look_for_deaths() {
    pool.for_each_region([&](const std::shared_ptr<Region>& region) {
      for (int i = 0; i < kMostHolders; ++i) {
        const ProcessWord user = region->book().slot(i);
        if (user == 0 || users.contains(user)) continue;
        // Opened before the look at its start time: so it is that process's, or that of none.
        UniqueFd pidfd = open_pidfd(pid_of(user));
        if (is_running(user)) {
          users[user] = std::move(pidfd);  // empty where descriptors have run out
        } else {
          region->book().drop_slot(i);
        }
      }
    });
    for (auto i = users.begin(); i != users.end();) {
      pollfd item{i->second.get(), POLLIN, 0};
      const bool gone = i->second ? ::poll(&item, 1, 0) > 0 : !is_running(i->first);
      if (gone) drop_user(i->first);
      i = gone ? users.erase(i) : std::next(i);
    }
  }

  void sweep() {
    if (!abandoned.empty()) look_for_deaths();
    for (std::size_t left = abandoned.size(); left > 0; --left) look_at_abandoned(1);
  }
};

namespace {

std::atomic<Depot*> current{nullptr};

// Blocks that this process's parents had when it was forked. Written in the child, before it has
// another thread.
std::set<std::pair<Segment::Key, std::uint64_t>>& inherited() {
  static auto* const blocks = new std::set<std::pair<Segment::Key, std::uint64_t>>;
  return *blocks;
}

}  // namespace

// A forked child has its parent's tensors, and nobody knows but the two. Until the child has set
// its bits, the blocks count as being under way.
namespace {

void for_each_held(auto& holdings, auto visit) {
  for (const auto& [entry, holding] : holdings) {
    if (holding->count > 0) visit(*holding);
  }
}

}  // namespace

struct Depot::Fork {
  using Lock = Guarded<State>::Lock;
  // Of the fork under way in this thread.
  static std::optional<Lock>& lock() {
    static thread_local std::optional<Lock> held;
    return held;
  }
  static void before();
  static void in_parent() { lock().reset(); }
  static void in_child();
};

void Depot::Fork::before() {
  Depot* const depot = current.load(std::memory_order_acquire);
  if (!depot || depot->generation_ != fork_generation()) return;
  auto& held = lock();
  held.emplace(depot->state_->lock());
  for_each_held((*held)->holdings, [](const Holding& holding) {
    holding.ref.book->book().enter_transit(holding.ref.entry);
  });
}

void Depot::Fork::in_child() {
  auto& held = lock();
  if (!held) return;
  try {
    std::unordered_map<const Region*, int> slots;
    const ProcessWord self = own_process_word();
    for_each_held((*held)->holdings, [&](const Holding& holding) {
      const Region& region = *holding.ref.book;
      // A named block is a file of its own: the child's mapping is all it needs.
      if (region.kind() != Region::Kind::kNamed) {
        auto slot = slots.find(&region);
        if (slot == slots.end())
          slot = slots.emplace(&region, region.book().claim_slot(self)).first;
        region.book().acquire(holding.ref.entry, holding.ref.generation, slot->second);
        inherited().emplace(region.key(), holding.ref.entry);
      }
      region.book().leave_transit(holding.ref.entry);
    });
  } catch (const std::exception& error) {
    // What is left counts as under way for good: safe, but never free again.
    log_warn("a forked child could not say what it inherited: ", error.what());
  }
  held.reset();
}

Depot& Depot::instance() {
  Depot* depot = current.load(std::memory_order_acquire);
  while (!depot || depot->generation_ != fork_generation()) {
    // A lock would be of no use: it could have been held when this process was forked. The parent's
    // object stays as it is: inherited leases refer to it.
    auto* const made = new Depot();
    if (current.compare_exchange_strong(depot, made)) return *made;
    delete made;
  }
  return *depot;
}

Depot::Depot() : generation_(fork_generation()), state_(std::make_unique<Guarded<State>>()) {
  // After those of fork_guard (installed by the call above), so that in the child they run later.
  static const int error = pthread_atfork(Fork::before, Fork::in_parent, Fork::in_child);
  CONVOY_CHECK(error == 0, errno_text(error));
}

Depot::~Depot() = default;

Lease Depot::allocate(std::size_t bytes) {
  const auto lease = [&](State& state, Pool::Place place) {
    BlockRef ref{.book = place.region,
                 .entry = place.offset,
                 .generation = place.region->book().begin(place.offset, bytes),
                 .memory = place.region,
                 .offset = place.offset,
                 .bytes = bytes};
    Holding* const holding = state.add(std::move(ref));
    holding->place = std::move(place);
    return Lease(this, holding);
  };
  if (bytes > SIZE_MAX / 4)
    fail(ErrorKind::kResource, "shared memory of ", bytes, " bytes: too large");
  {
    auto state = state_->lock();
    state->look_at_abandoned(kLooksEachTime);
    if (auto place = state->pool.take(bytes)) return lease(*state, std::move(*place));
  }
  run_reapers();
  std::size_t size = 0;
  {
    auto state = state_->lock();
    state->sweep();
    if (auto place = state->pool.take(bytes)) return lease(*state, std::move(*place));
    size = state->pool.next_region_bytes(bytes);
    const std::uint64_t headroom = state->headroom();
    const std::size_t least = Pool::region_bytes_for(bytes);
    if (size > headroom) size = least;  // a small machine: take what is asked for and no more
    if (size > headroom) {
      fail(ErrorKind::kResource, "memory for shared tensors cannot grow by ", bytes,
           " bytes: ", headroom, " are left before this machine or its cgroup runs out (",
           state->pool.bytes(), " are in the pool, ", state->abandoned.size(),
           " blocks of it only in use by other processes); free tensors or raise the memory limit");
    }
  }
  // Unlocked: it takes long.
  auto region = Region::create_pool(size);
  auto state = state_->lock();
  state->remember(region);
  state->pool.add(std::move(region));
  auto place = state->pool.take(bytes);
  while (!place) {  // others were quicker
    state.unlock();
    region = Region::create_pool(size);
    state.relock();
    state->remember(region);
    state->pool.add(std::move(region));
    place = state->pool.take(bytes);
  }
  return lease(*state, std::move(*place));
}

Lease Depot::allocate_named(std::size_t bytes) {
  auto state = state_->lock();
  if (!state->named) state->named.emplace();
  auto region = state->named->create(bytes);
  state->remember(region);
  const Book& book = region->book();
  const std::uint64_t first = book.head().first;
  const std::uint32_t generation = book.begin(first, bytes);
  const int slot = state->slot_in(*region);
  book.acquire(first, generation, slot);
  Holding* const holding = state->add({region, first, generation, region, first, bytes});
  holding->slot = slot;
  state->named->join();
  return {this, holding};
}

std::optional<Lease> Depot::lease_group_memory(const void* data, std::size_t bytes) {
  // Not while our lock is held: the Fabric asks us under its own.
  shm::Fabric* const fabric = shm::Fabric::existing();
  if (!fabric) return std::nullopt;
  const auto location = fabric->locate(data, bytes);
  if (!location) return std::nullopt;
  const auto* const address = static_cast<const std::byte*>(data);
  {
    auto state = state_->lock();
    const auto found = state->guests.find(address);
    if (found != state->guests.end()) {
      Holding* const holding = state->holdings.at(found->second).get();
      if (holding->ref.bytes >= bytes) {
        ++holding->count;
        return Lease(this, holding);
      }
    }
  }
  auto shared = fabric->share_segment(location.segment);
  // The entry of a page of ours stands for the block.
  Lease page = allocate(1);
  auto state = state_->lock();
  auto region = state->known(Segment::key_of(shared.fd.get()));
  if (!region) {
    region = Region::borrow(std::move(shared.fd), shared.data, shared.bytes);
    state->remember(region);
  }
  Holding* const holding = page.holding_;
  holding->ref.memory = region;
  holding->ref.offset = location.offset;
  holding->ref.bytes = bytes;
  holding->data = region->data() + location.offset;
  holding->guest = true;
  const auto* const entry = &holding->ref.book->book().entry(holding->ref.entry);
  state->guests[address] = entry;
  const std::uint32_t generation = holding->ref.generation;
  state.unlock();
  fabric->quarantine(location, [this, entry, generation] {
    auto locked = state_->lock();
    const auto found = locked->holdings.find(entry);
    if (found == locked->holdings.end() || found->second->ref.generation != generation) return true;
    return found->second->count == 0 && locked->end_own(entry);
  });
  return page;
}

Lease Depot::open(const BlockRef& ref) {
  const Book& book = ref.book->book();
  const std::uint64_t inside = ref.book == ref.memory ? ref.bytes : 1;
  const Region& memory = *ref.memory;
  if (!book || !book.is_block(ref.entry, inside) || ref.bytes == 0 || ref.offset > memory.bytes() ||
      ref.bytes > memory.bytes() - ref.offset ||
      (ref.book == ref.memory && ref.offset != ref.entry) ||
      (ref.book != ref.memory && memory.kind() != Region::Kind::kPlain)) {
    fail(ErrorKind::kInvalidArgument, "a handle names ", ref.bytes, " bytes at offset ", ref.offset,
         " of shared memory of ", memory.bytes(), ": refused");
  }
  const auto gone = [&] {
    fail(ErrorKind::kPeerLost, "a tensor of ", ref.bytes, " bytes of pid ",
         pid_of(book.head().owner),
         " is no more: its sender ended before the handle was received, or it was received before");
  };
  auto state = state_->lock();
  const auto* const entry = &book.entry(ref.entry);
  const auto found = state->holdings.find(entry);
  if (found != state->holdings.end()) {
    Holding* const holding = found->second.get();
    if (holding->ref.generation != ref.generation || holding->data != memory.data() + ref.offset ||
        holding->ref.bytes < ref.bytes) {
      gone();
    }
    ++holding->count;
    return {this, holding};
  }
  if (ref.book->own()) gone();
  const bool named = ref.book->kind() == Region::Kind::kNamed;
  const int slot = state->slot_in(*ref.book);
  if (!book.acquire(ref.entry, ref.generation, slot)) {
    if (named) state->named->rest();
    gone();
  }
  Holding* const holding = state->add(ref);
  holding->slot = slot;
  // What this process inherited when it was forked it keeps: one lease more than it knows of.
  if (inherited().contains({ref.book->key(), ref.entry})) ++holding->count;
  if (named) state->named->join();
  return {this, holding};
}

bool Depot::held_elsewhere(const BlockRef& ref) {
  auto state = state_->lock();
  state->look_for_deaths();
  return !ref.book->book().unheld(ref.entry);
}

void Depot::release(Holding* holding) noexcept {
  // In a forked child the leases are its parent's; it keeps what it inherited until it ends.
  if (fork_generation() != generation_) return;
  std::shared_ptr<Region> last;  // unmapped after the lock
  auto state = state_->lock();
  if (--holding->count > 0) return;
  const auto* const entry = &holding->ref.book->book().entry(holding->ref.entry);
  const Book& book = holding->ref.book->book();
  if (holding->slot < 0) {
    if (holding->guest || !state->end_own(entry)) state->abandoned.push_back(entry);
    return;
  }
  book.release(holding->ref.entry, holding->slot);
  last = holding->ref.book;
  if (last->kind() == Region::Kind::kNamed) {
    bool ended = book.try_end_shared(holding->ref.entry);
    if (!ended) {  // the others may be dead
      state->named->drop_dead(book);
      ended = book.try_end_shared(holding->ref.entry);
    }
    state->slots.erase(last.get());
    state->named->leave(*last, ended);
  }
  state->holdings.erase(entry);
  state.unlock();
}

std::shared_ptr<Region> Depot::adopt(UniqueFd fd, std::size_t bytes, Region::Kind kind) {
  auto state = state_->lock();
  if (auto region = state->known(Segment::key_of(fd.get()))) {
    if (region->bytes() != bytes || region->kind() != kind) {
      fail(ErrorKind::kInvalidArgument, "shared memory was announced with ", bytes,
           " bytes and is known with ", region->bytes());
    }
    return region;
  }
  auto region = Region::adopt(std::move(fd), bytes, kind);
  state->remember(region);
  return region;
}

std::shared_ptr<Region> Depot::find(const Segment::Key& key) { return state_->lock()->known(key); }

std::shared_ptr<Region> Depot::open_named(const std::string& path) {
  auto state = state_->lock();
  if (!state->named) state->named.emplace();
  return state->named->open(
      path, [&](const Segment::Key& key) { return state->known(key); },
      [&](const std::shared_ptr<Region>& made) { state->remember(made); });
}

void Depot::on_shortage(const std::weak_ptr<Reaper>& reaper) {
  auto state = state_->lock();
  const auto added = reaper.lock();
  std::erase_if(state->reapers, [&](const auto& weak) {
    const auto known = weak.lock();
    return !known || known == added;
  });
  state->reapers.push_back(reaper);
}

void Depot::run_reapers() {
  const auto reapers = state_->lock()->reapers;
  for (const auto& weak : reapers) {
    if (const auto reaper = weak.lock()) (*reaper)();
  }
}

std::size_t Depot::trim() {
  run_reapers();
  std::vector<std::shared_ptr<Region>> unused;
  std::size_t bytes = 0;
  auto state = state_->lock();
  state->sweep();
  while (auto region = state->pool.take_unused()) {
    bytes += region->bytes();
    region->book().head().retired.store(1);
    unused.push_back(std::move(region));
  }
  state.unlock();
  return bytes;
}

Depot::Stats Depot::stats() {
  run_reapers();
  auto state = state_->lock();
  state->look_for_deaths();
  state->sweep();
  Stats stats{.pool_bytes = state->pool.bytes(), .pool_regions = state->pool.regions()};
  for (const auto& [entry, holding] : state->holdings) {
    if (holding->slot >= 0) {
      ++stats.foreign;
    } else {
      ++stats.blocks;
      if (holding->count == 0) ++stats.abandoned;
    }
  }
  for (const auto& [key, region] : state->regions) {
    if (!region.expired()) ++stats.regions;
  }
  return stats;
}

std::vector<int> Depot::descriptors() {
  std::vector<int> found;
  auto state = state_->lock();
  for (const auto& [key, weak] : state->regions) {
    const auto region = weak.lock();
    if (region && region->fd() >= 0) found.push_back(region->fd());
  }
  for (const auto& [user, pidfd] : state->users) {
    if (pidfd) found.push_back(pidfd.get());
  }
  if (state->named && state->named->fd() >= 0) found.push_back(state->named->fd());
  return found;
}

void Depot::set_headroom_for_testing(std::function<std::uint64_t()> headroom) {
  state_->lock()->headroom = headroom ? std::move(headroom) : machine_headroom;
}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    reset();
    depot_ = other.depot_;
    holding_ = std::exchange(other.holding_, nullptr);
  }
  return *this;
}

void Lease::reset() noexcept {
  if (holding_) depot_->release(std::exchange(holding_, nullptr));
}

std::byte* Lease::data() const { return holding_->data; }
std::size_t Lease::bytes() const { return holding_->ref.bytes; }
const BlockRef& Lease::ref() const { return holding_->ref; }

}  // namespace convoy::share
