#include "share/cache.h"

#include <atomic>
#include <cstring>

#include "base/error.h"
#include "os/fork_guard.h"
#include "transport/shm/fabric.h"

namespace convoy::share {

// What a storage's memory belongs to.
struct StorageContext {
  SharedCache* cache;
  Lease lease;
  std::uint64_t serial;

  ~StorageContext() { cache->forget(lease.data(), serial); }  // before the lease goes
};

namespace {

std::atomic<SharedCache*> current{nullptr};

void release_context(void* context) { delete static_cast<StorageContext*>(context); }

// nullptr if the memory is not ours.
const StorageContext* context_of(const c10::Storage& storage) {
  const c10::DataPtr& data = storage.data_ptr();
  return data.get_deleter() == &release_context ? static_cast<StorageContext*>(data.get_context())
                                                : nullptr;
}

c10::Storage make_storage(std::size_t bytes, c10::DataPtr data) {
  // Not resizable: other processes would keep the old memory, and nobody would know.
  return {c10::Storage::use_byte_size_t(), bytes, std::move(data), nullptr, false};
}

}  // namespace

SharedCache::SharedCache() : generation_(fork_generation()) {}

SharedCache& SharedCache::instance() {
  SharedCache* cache = current.load(std::memory_order_acquire);
  while (!cache || cache->generation_ != fork_generation()) {
    // As Depot: no lock, and the parent's object stays for the contexts that refer to it.
    auto* const made = new SharedCache();
    if (current.compare_exchange_strong(cache, made)) return *made;
    delete made;
  }
  return *cache;
}

c10::DataPtr SharedCache::adopt(Lease lease, std::uint64_t serial) {
  void* const data = lease.data();
  auto* const context = new StorageContext{this, std::move(lease), serial};
  return {data, context, &release_context, c10::Device(c10::DeviceType::CPU)};
}

void SharedCache::insert(State& state, const void* data, const c10::Storage& storage,
                         std::uint64_t serial) {
  if (state.entries.size() >= state.limit) {
    std::erase_if(state.entries, [](const auto& item) { return item.second.storage.expired(); });
    state.limit = std::max<std::size_t>(128, 2 * state.entries.size());
  }
  state.entries.insert_or_assign(data, Entry{storage.getWeakStorageImpl(), serial});
}

void SharedCache::forget(const void* data, std::uint64_t serial) noexcept {
  if (fork_generation() != generation_) return;  // the lock may be held for ever
  auto state = state_.lock();
  const auto found = state->entries.find(data);
  // Another storage may stand for the block already: this one was dying when it came again.
  if (found == state->entries.end() || found->second.serial != serial) return;
  const auto keep = std::move(found->second.storage);  // let go after the lock
  state->entries.erase(found);
  state.unlock();
}

c10::Storage SharedCache::allocate(std::size_t bytes, Strategy strategy) {
  Depot& depot = Depot::instance();
  Lease lease = strategy == Strategy::kFile ? depot.allocate_named(bytes) : depot.allocate(bytes);
  const void* const data = lease.data();
  auto state = state_.lock();
  const std::uint64_t serial = state->next_serial++;
  auto storage = make_storage(bytes, adopt(std::move(lease), serial));
  insert(*state, data, storage, serial);
  return storage;
}

Parcel SharedCache::share(const c10::Storage& storage, Strategy strategy) {
  if (!storage.device().is_cpu()) {
    fail(ErrorKind::kUnsupported, "memory of ", storage.device().str(), " cannot be shared here");
  }
  if (storage.nbytes() == 0) return {storage, {}, {}};
  if (const auto* const context = context_of(storage)) return {storage, {}, context->lease.ref()};
  const std::size_t bytes = storage.nbytes();
  if (auto lease = Depot::instance().lease_group_memory(storage.data(), bytes)) {
    insert(*state_.lock(), storage.data(), storage, 0);
    BlockRef ref = lease->ref();
    return {storage, std::move(*lease), std::move(ref)};
  }
  const std::scoped_lock moving(moving_);
  if (const auto* const context = context_of(storage)) return {storage, {}, context->lease.ref()};
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  const void* const source = impl->mutable_data();  // of its own, if it was copied lazily
  Depot& depot = Depot::instance();
  Lease lease = strategy == Strategy::kFile ? depot.allocate_named(bytes) : depot.allocate(bytes);
  std::memcpy(lease.data(), source, bytes);
  const void* const data = lease.data();
  const BlockRef ref = lease.ref();
  c10::DataPtr old;
  {
    auto state = state_.lock();
    const std::uint64_t serial = state->next_serial++;
    old = impl->set_data_ptr(adopt(std::move(lease), serial));
    impl->set_resizable(false);
    insert(*state, data, storage, serial);
  }
  return {storage, {}, ref};
}

c10::Storage SharedCache::storage_of(Lease lease, std::size_t bytes) {
  const void* const data = lease.data();
  c10::intrusive_ptr<c10::StorageImpl> there;  // let go after the lock
  auto state = state_.lock();
  const auto found = state->entries.find(data);
  if (found != state->entries.end()) {
    there = found->second.storage.lock();
    if (there && there->nbytes() == bytes) return c10::Storage(there);
  }
  const std::uint64_t serial = state->next_serial++;
  auto storage = make_storage(bytes, adopt(std::move(lease), serial));
  insert(*state, data, storage, serial);
  return storage;
}

bool SharedCache::is_shared(const c10::Storage& storage) {
  if (!storage.device().is_cpu() || storage.nbytes() == 0) return false;
  if (context_of(storage)) return true;
  shm::Fabric* const fabric = shm::Fabric::existing();
  return fabric && fabric->locate(storage.data(), storage.nbytes());
}

std::size_t SharedCache::size() const { return state_.lock()->entries.size(); }

std::size_t SharedCache::free_dead_references() {
  auto state = state_.lock();
  std::erase_if(state->entries, [](const auto& item) { return item.second.storage.expired(); });
  return state->entries.size();
}

}  // namespace convoy::share
