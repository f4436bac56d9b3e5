#include "share/depot.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/error.h"
#include "os/fork_guard.h"
#include "share/depot_state.h"
#include "transport/shm/fabric.h"

namespace convoy::share {
namespace {

// Looked at in each allocation, so that what is abandoned comes back little by little.
constexpr std::size_t kLooksEachTime = 8;

std::atomic<Depot*> current_depot{nullptr};

}  // namespace

Depot& Depot::instance() {
  Depot* depot = current_depot.load(std::memory_order_acquire);
  while (!depot || depot->generation_ != fork_generation()) {
    // A lock would be of no use: it could have been held when this process was forked. The parent's
    // object stays as it is: inherited leases refer to it.
    auto* const made = new Depot();
    if (current_depot.compare_exchange_strong(depot, made)) return *made;
    delete made;
  }
  return *depot;
}

Depot* Depot::existing() noexcept {
  Depot* const depot = current_depot.load(std::memory_order_acquire);
  return depot && depot->generation_ == fork_generation() ? depot : nullptr;
}

Depot::Depot() : generation_(fork_generation()), state_(std::make_unique<Guarded<State>>()) {
  // After those of fork_guard (installed by the call above), so that in the child they run later.
  Fork::install();
}

Depot::~Depot() = default;

// Of this process's pool.
Lease Depot::begin_block(State& state, Pool::Place place, std::size_t bytes) {
  BlockRef ref{.book = place.region,
               .entry = place.offset,
               .generation = place.region->book().begin(place.offset, bytes),
               .memory = place.region,
               .offset = place.offset,
               .bytes = bytes};
  Holding* const holding = state.add(std::move(ref));
  holding->place = std::move(place);
  return {this, holding};
}

// What is there, after what can be had of others if need be.
std::optional<Lease> Depot::take_from_pool(std::size_t bytes) {
  if (bytes > SIZE_MAX / 4)
    fail(ErrorKind::kResource, "shared memory of ", bytes, " bytes: too large");
  std::vector<std::shared_ptr<void>> dropped;  // let go of after the lock
  {
    auto state = state_->lock();
    state->look_at_abandoned(kLooksEachTime);
    dropped.swap(state->dropped);
    if (auto place = state->pool.take(bytes)) return begin_block(*state, std::move(*place), bytes);
  }
  run_reapers();
  auto state = state_->lock();
  state->sweep();
  if (auto place = state->pool.take(bytes)) return begin_block(*state, std::move(*place), bytes);
  return std::nullopt;
}

std::size_t Depot::room_for(std::size_t bytes) {
  auto state = state_->lock();
  std::size_t size = state->pool.next_region_bytes(bytes);
  const std::uint64_t headroom = state->headroom();
  const std::size_t least = Pool::region_bytes_for(bytes);
  if (size > headroom) size = least;  // a small machine: take what is asked for and no more
  if (size > headroom) {
    fail(ErrorKind::kResource, "memory for shared tensors cannot grow by ", bytes,
         " bytes: ", headroom, " are left before this machine or its cgroup runs out (",
         state->pool.bytes(), " are in the pool, ", state->abandoned.size(),
         " blocks of it only in use by other processes); free tensors or raise the memory limit");
  }
  return size;
}

Lease Depot::allocate(std::size_t bytes) {
  if (auto lease = take_from_pool(bytes)) return std::move(*lease);
  const std::size_t size = room_for(bytes);
  auto region = Region::create_pool(size);  // unlocked: it takes long
  auto state = state_->lock();
  state->remember(region);
  return begin_block(*state, state->pool.add_in_use(std::move(region), bytes), bytes);
}

Lease Depot::allocate_copy(std::span<const std::byte> content) {
  constexpr std::size_t kWorthwhile = std::size_t{4} << 20;
  const std::size_t bytes = content.size();
  auto lease = bytes < kWorthwhile ? allocate(bytes) : take_from_pool(bytes);
  if (lease) {
    std::memcpy(lease->data(), content.data(), bytes);
    return std::move(*lease);
  }
  auto region = Region::create_pool_with(room_for(bytes), content);
  auto state = state_->lock();
  state->remember(region);
  return begin_block(*state, state->pool.add_in_use(std::move(region), bytes), bytes);
}

Lease Depot::allocate_named(std::size_t bytes) {
  auto state = state_->lock();
  if (!state->named) state->named.emplace();
  std::shared_ptr<Region> region;
  try {
    region = state->named->create(bytes);
  } catch (...) {
    state->named->rest();
    throw;
  }
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
    if (Holding* const known = state->find_guest(address, bytes)) return Lease(this, known);
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
  state->make_guest(holding, region, location.offset, bytes, address);
  const auto* const entry = &holding->ref.book->book().entry(holding->ref.entry);
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

Lease Depot::lease_outside_memory(OutsideMemory memory) {
  {
    auto state = state_->lock();
    // Nothing else can lie there: what is leased is kept.
    if (Holding* const known = state->find_guest(memory.data, memory.bytes)) return {this, known};
  }
  Lease page = allocate(1);
  // Not one of the regions that others find: it is mapped only as long as this block is.
  const auto region = Region::borrow(std::move(memory.fd), memory.mapped, memory.mapped_bytes,
                                     Region::Kind::kOutside);
  auto state = state_->lock();
  std::erase_if(state->outside, [](const auto& item) { return item.second.expired(); });
  state->outside[region->key()] = region;
  const auto offset = static_cast<std::uint64_t>(memory.data - memory.mapped);
  state->make_guest(page.holding_, region, offset, memory.bytes, memory.data);
  page.holding_->keep = std::move(memory.keep);
  return page;
}

Lease Depot::open(const BlockRef& ref) {
  const Book& book = ref.book->book();
  const std::uint64_t inside = ref.book == ref.memory ? ref.bytes : 1;
  const Region& memory = *ref.memory;
  if (!book || !book.is_block(ref.entry, inside) || ref.bytes == 0 || ref.offset > memory.bytes() ||
      ref.bytes > memory.bytes() - ref.offset ||
      (ref.book == ref.memory && ref.offset != ref.entry) ||
      (ref.book != ref.memory && memory.kind() != Region::Kind::kPlain &&
       memory.kind() != Region::Kind::kOutside)) {
    fail(ErrorKind::kInvalidArgument, "a handle names ", ref.bytes, " bytes at offset ", ref.offset,
         " of shared memory of ", memory.bytes(), ": refused");
  }
  const auto gone = [&] {
    fail(ErrorKind::kPeerLost, "a tensor of ", ref.bytes, " bytes of pid ",
         pid_of(book.head().owner),
         " no longer exists: its sender ended before the handle was received, or it was received "
         "before");
  };
  auto state = state_->lock();
  const auto* const entry = &book.entry(ref.entry);
  const auto found = state->holdings.find(entry);
  if (found != state->holdings.end()) {
    Holding* const holding = found->second.get();
    if (holding->ref.generation != ref.generation || holding->ref.memory->key() != memory.key() ||
        holding->ref.offset != ref.offset || holding->ref.bytes < ref.bytes) {
      gone();
    }
    ++holding->count;
    return {this, holding};
  }
  if (ref.book->own()) gone();
  const bool named = ref.book->kind() == Region::Kind::kNamed;
  const int slot = state->slot_in(*ref.book);
  if (!book.acquire(ref.entry, ref.generation, slot)) {
    if (named) {
      state->slots.erase(ref.book.get());
      state->named->rest();
    }
    gone();
  }
  Holding* const holding = state->add(ref);
  holding->slot = slot;
  // What this process inherited when it was forked it keeps: one lease more than it knows of.
  if (Fork::inherited(ref.book->key(), ref.entry)) ++holding->count;
  if (named) state->named->join();
  return {this, holding};
}

bool Depot::held_elsewhere(const BlockRef& ref) {
  auto state = state_->lock();
  state->look_for_deaths();
  return !ref.book->book().unheld(ref.entry);
}

void Depot::retain(Holding* holding) {
  const auto state = state_->lock();
  ++holding->count;
}

void Depot::release(Holding* holding) noexcept {
  // In a forked child the leases are its parent's; it keeps what it inherited until it ends.
  if (fork_generation() != generation_) return;
  std::shared_ptr<Region> last;                // unmapped after the lock
  std::vector<std::shared_ptr<void>> dropped;  // likewise
  auto state = state_->lock();
  if (--holding->count > 0) return;
  const auto* const entry = &holding->ref.book->book().entry(holding->ref.entry);
  const Book& book = holding->ref.book->book();
  if (holding->slot < 0) {
    // Memory of groups is asked for by the Fabric.
    const bool of_group = holding->guest && !holding->keep;
    if (of_group || !state->end_own(entry)) state->abandoned.push_back(entry);
    dropped.swap(state->dropped);
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
    // A file of others may have been mapped before it grew.
    const bool other_part = kind == Region::Kind::kOutside && region->kind() == kind;
    if (region->bytes() == bytes && region->kind() == kind) return region;
    if (!other_part) {
      fail(ErrorKind::kInvalidArgument, "shared memory was announced with ", bytes,
           " bytes and is known with ", region->bytes());
    }
  }
  auto region = Region::adopt(std::move(fd), bytes, kind);
  state->remember(region);
  return region;
}

std::shared_ptr<Region> Depot::find(const Segment::Key& key) { return state_->lock()->known(key); }

bool Depot::uses(const Segment::Key& key) {
  auto state = state_->lock();
  const auto outside = state->outside.find(key);
  return (outside != state->outside.end() && !outside->second.expired()) ||
         state->known(key) != nullptr;
}

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
  std::vector<std::shared_ptr<void>> dropped;
  std::size_t bytes = 0;
  auto state = state_->lock();
  state->sweep();
  dropped.swap(state->dropped);
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
  std::vector<std::shared_ptr<void>> dropped;
  auto state = state_->lock();
  state->look_for_deaths();
  state->sweep();
  dropped.swap(state->dropped);
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

Lease Lease::copy() const {
  depot_->retain(holding_);
  return {depot_, holding_};
}

std::byte* Lease::data() const { return holding_->data; }
std::size_t Lease::bytes() const { return holding_->ref.bytes; }
const BlockRef& Lease::ref() const { return holding_->ref; }

}  // namespace convoy::share
