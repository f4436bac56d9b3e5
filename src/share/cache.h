#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/guarded.h"
#include "convoy/share.h"
#include "share/depot.h"

namespace convoy::share {

// A storage that is under way: it and its memory are kept until the receiver has it.
struct Parcel {
  c10::Storage storage;
  Lease lease;  // of memory of a group, or torch's; other storages hold theirs themselves
};

// Where a storage's memory lies.
struct StoragePlace {
  const BlockRef* block = nullptr;  // valid as long as the parcel is
  std::uint64_t offset = 0;         // in the block
};

// Which storage of this process stands for which block of shared memory: a block that comes twice
// is one storage, and one that comes home is the storage that was sent. Refers to storages weakly;
// a storage's entry goes with it. Made on first use, anew in a forked child. All methods may be
// called from any thread.
class SharedCache {
 public:
  static SharedCache& instance();

  // Makes the storage's memory shared, in place, if it is not: a copy, once. It is not empty.
  // Memory that others share already (torch, mmap) stays where it is: who has it would be cut off.
  // Throws kResource, kUnsupported for memory that is not the CPU's, or that others share and that
  // cannot be passed on.
  Parcel share(const c10::Storage& storage, Strategy strategy);
  static StoragePlace place_of(const Parcel& parcel);
  // One lease more of its block.
  static Lease lease_of(const Parcel& parcel);
  // The same for many small ones, which then lie side by side in few blocks: their memory is free
  // again when all of a block are gone. What is shared already stays where it is.
  void share_together(const std::vector<c10::Storage>& storages);
  // A new one. At least one byte.
  c10::Storage allocate(std::size_t bytes, Strategy strategy);
  // The storage of so many bytes of a block that was received: the one that is there, or a new one.
  c10::Storage storage_of(const Lease& lease, std::uint64_t offset, std::size_t bytes);

  // True for memory of this module's, and for memory of a group.
  static bool is_shared(const c10::Storage& storage);
  // True for these, and for memory that others share: share() does not move it. kResource if that
  // cannot be found out.
  static bool stays(const c10::Storage& storage);

  std::size_t size() const;  // entries
  // Drops entries whose storage is gone, which only those of groups' memory leave; the rest.
  std::size_t free_dead_references();

 private:
  friend struct StorageContext;
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Entry {
    WeakStorage storage;
    std::uint64_t serial;  // of the context; 0: memory of a group
  };
  struct State {
    std::unordered_map<const void*, Entry> entries;  // by the block's address here
    std::uint64_t next_serial = 1;
    std::size_t limit = 128;  // of entries, before dead ones are looked for
  };

  SharedCache();
  static std::optional<Lease> lease_outside(const c10::Storage& storage);
  c10::DataPtr adopt(Lease lease, std::uint64_t offset, std::uint64_t serial);
  void replace_memory(const c10::Storage& storage, Lease lease, std::uint64_t offset);
  void forget(const void* data, std::uint64_t serial) noexcept;
  static void insert(State& state, const void* data, const c10::Storage& storage,
                     std::uint64_t serial);

  const unsigned generation_;
  mutable Guarded<State> state_;
  std::mutex moving_;  // while a storage's memory is replaced
};

}  // namespace convoy::share
