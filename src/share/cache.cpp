#include "share/cache.h"

#include <ATen/MapAllocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstring>

#include "base/error.h"
#include "os/fork_guard.h"
#include "os/mapping.h"
#include "transport/shm/fabric.h"

namespace convoy::share {

// What a storage's memory belongs to.
struct StorageContext {
  SharedCache* cache;
  Lease lease;
  std::uint64_t offset;
  std::uint64_t serial;

  ~StorageContext() { cache->forget(lease.data() + offset, serial); }  // before the lease goes
};

namespace {

std::atomic<SharedCache*> current_cache{nullptr};

void release_context(void* context) { delete static_cast<StorageContext*>(context); }

// nullptr if the memory is not ours.
const StorageContext* context_of(const c10::Storage& storage) {
  const c10::DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &release_context ? static_cast<StorageContext*>(data.get_context())
                                                : nullptr;
}

// The mapping that a storage is in, if others may have it too and can write to it. Memory of the
// usual allocators is not looked at: this costs system calls.
std::optional<Mapping> outside_mapping(const c10::Storage& storage) {
  const c10::DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  const auto deleter = data.get_deleter();
  if (!data.get() || deleter == c10::GetDefaultCPUAllocator()->raw_deleter() ||
      deleter == c10::GetCPUAllocator()->raw_deleter()) {
    return std::nullopt;
  }
  auto found = mapping_of(data.get());
  if (!found || !found->shared || !found->writable) return std::nullopt;
  return found;
}

// Of the memory that torch shares by descriptor; -1 if it is none.
int torch_descriptor(const c10::Storage& storage) {
  const auto* const torch =
      at::MapAllocator::fromDataPtr(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks());
  return torch ? torch->fd() : -1;
}

Lease allocate_block(std::size_t bytes, Strategy strategy) {
  Depot& depot = Depot::instance();
  return strategy == Strategy::kFile ? depot.allocate_named(bytes) : depot.allocate(bytes);
}

// Its own, if it was copied lazily.
std::span<const std::byte> bytes_of(const c10::Storage& storage) {
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  return {static_cast<const std::byte*>(impl->mutable_data()), impl->nbytes()};
}

Lease copy_to_block(std::span<const std::byte> content, Strategy strategy) {
  Depot& depot = Depot::instance();
  if (strategy != Strategy::kFile) return depot.allocate_copy(content);
  Lease lease = depot.allocate_named(content.size());
  std::memcpy(lease.data(), content.data(), content.size());
  return lease;
}

c10::Storage make_storage(std::size_t bytes, c10::DataPtr data) {
  // Not resizable: other processes would keep the old memory, and nobody would know.
  return {c10::Storage::use_byte_size_t(), bytes, std::move(data), nullptr, false};
}

}  // namespace

SharedCache::SharedCache() : generation_(fork_generation()) {}

SharedCache& SharedCache::instance() {
  SharedCache* cache = current_cache.load(std::memory_order_acquire);
  while (!cache || cache->generation_ != fork_generation()) {
    // As Depot: no lock, and the parent's object stays for the contexts that refer to it.
    auto* const made = new SharedCache();
    if (current_cache.compare_exchange_strong(cache, made)) return *made;
    delete made;
  }
  return *cache;
}

c10::DataPtr SharedCache::adopt(Lease lease, std::uint64_t offset, std::uint64_t serial) {
  void* const data = lease.data() + offset;
  auto* const context = new StorageContext{this, std::move(lease), offset, serial};
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
  Lease lease = allocate_block(bytes, strategy);
  const void* const data = lease.data();
  auto state = state_.lock();
  const std::uint64_t serial = state->next_serial++;
  auto storage = make_storage(bytes, adopt(std::move(lease), 0, serial));
  insert(*state, data, storage, serial);
  return storage;
}

StoragePlace SharedCache::place_of(const Parcel& parcel) {
  if (parcel.lease) return {&parcel.lease.ref(), 0};
  const auto* const context = context_of(parcel.storage);
  return {&context->lease.ref(), context->offset};
}

Lease SharedCache::lease_of(const Parcel& parcel) {
  return parcel.lease ? parcel.lease.copy() : context_of(parcel.storage)->lease.copy();
}

// Under moving_, to a place that has a copy of its bytes.
void SharedCache::replace_memory(const c10::Storage& storage, Lease lease, std::uint64_t offset) {
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  std::byte* const data = lease.data() + offset;
  c10::DataPtr old;  // let go after the lock
  auto state = state_.lock();
  const std::uint64_t serial = state->next_serial++;
  old = impl->set_data_ptr(adopt(std::move(lease), offset, serial));
  impl->set_resizable(false);
  insert(*state, data, storage, serial);
  state.unlock();
}

std::optional<Lease> SharedCache::lease_outside(const c10::Storage& storage) {
  const auto mapping = outside_mapping(storage);
  if (!mapping) return std::nullopt;
  const auto* const data = static_cast<const std::byte*>(storage.data());
  UniqueFd fd;
  const bool whole =
      mapping->file_offset == 0 && data >= mapping->begin &&
      storage.nbytes() <= mapping->bytes - static_cast<std::size_t>(data - mapping->begin);
  if (whole) fd = descriptor_of(*mapping, torch_descriptor(storage));
  if (!fd) {
    fail(
        ErrorKind::kUnsupported, "a tensor of ", storage.nbytes(),
        " bytes is in memory that this process shares with others already, in a way that cannot be "
        "passed on (no descriptor of it is open here, or it is only a part of a file); moving it "
        "would cut the others off: share a clone()");
  }
  return Depot::instance().lease_outside_memory({.fd = std::move(fd),
                                                 .mapped = mapping->begin,
                                                 .mapped_bytes = mapping->bytes,
                                                 .data = data,
                                                 .bytes = storage.nbytes(),
                                                 .keep = std::make_shared<c10::Storage>(storage)});
}

Parcel SharedCache::share(const c10::Storage& storage, Strategy strategy) {
  if (!storage.device().is_cpu()) {
    fail(ErrorKind::kUnsupported, "memory of ", storage.device().str(), " cannot be shared here");
  }
  if (context_of(storage)) return {storage, {}};
  const std::size_t bytes = storage.nbytes();
  if (auto lease = Depot::instance().lease_group_memory(storage.data(), bytes)) {
    insert(*state_.lock(), storage.data(), storage, 0);
    return {storage, std::move(*lease)};
  }
  if (auto lease = lease_outside(storage)) {
    insert(*state_.lock(), storage.data(), storage, 0);
    return {storage, std::move(*lease)};
  }
  const std::scoped_lock moving(moving_);
  if (!context_of(storage)) replace_memory(storage, copy_to_block(bytes_of(storage), strategy), 0);
  return {storage, {}};
}

void SharedCache::share_together(const std::vector<c10::Storage>& storages) {
  constexpr std::size_t kAlignment = 64;
  constexpr std::size_t kMostBytes = std::size_t{1} << 20;  // of a block: one storage keeps it
  const auto room = [](const c10::Storage& storage) {
    return (storage.nbytes() + kAlignment - 1) / kAlignment * kAlignment;
  };
  const std::scoped_lock moving(moving_);
  for (std::size_t first = 0, next = 0; first < storages.size(); first = next) {
    std::size_t bytes = 0;
    for (; next < storages.size() && (next == first || bytes + room(storages[next]) <= kMostBytes);
         ++next) {
      bytes += room(storages[next]);
    }
    const Lease block = Depot::instance().allocate(bytes);
    std::uint64_t offset = 0;
    for (std::size_t i = first; i < next; ++i) {
      if (stays(storages[i])) continue;  // also one that came twice
      const auto content = bytes_of(storages[i]);
      std::memcpy(block.data() + offset, content.data(), content.size());
      replace_memory(storages[i], block.copy(), offset);
      offset += room(storages[i]);
    }
  }
}

c10::Storage SharedCache::storage_of(const Lease& lease, std::uint64_t offset, std::size_t bytes) {
  const void* const data = lease.data() + offset;
  c10::intrusive_ptr<c10::StorageImpl> there;  // let go after the lock
  auto state = state_.lock();
  const auto found = state->entries.find(data);
  if (found != state->entries.end()) {
    there = found->second.storage.lock();
    if (there && there->nbytes() == bytes) return c10::Storage(there);
  }
  const std::uint64_t serial = state->next_serial++;
  auto storage = make_storage(bytes, adopt(lease.copy(), offset, serial));
  insert(*state, data, storage, serial);
  return storage;
}

bool SharedCache::is_shared(const c10::Storage& storage) {
  if (!storage.device().is_cpu() || storage.nbytes() == 0) return false;
  if (context_of(storage)) return true;
  const void* const data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  shm::Fabric* const fabric = shm::Fabric::existing();
  return data && fabric && fabric->locate(data, storage.nbytes());
}

bool SharedCache::stays(const c10::Storage& storage) {
  return is_shared(storage) || outside_mapping(storage).has_value();
}

std::size_t SharedCache::size() const { return state_.lock()->entries.size(); }

std::size_t SharedCache::free_dead_references() {
  auto state = state_.lock();
  std::erase_if(state->entries, [](const auto& item) { return item.second.storage.expired(); });
  return state->entries.size();
}

}  // namespace convoy::share
