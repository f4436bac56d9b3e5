#pragma once

#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/guarded.h"
#include "share/depot.h"
#include "share/descriptor_store.h"
#include "share/message.h"
#include "share/queue_memory.h"

namespace convoy::share {

// A queue whose items name memory of processes: the items, and the descriptors of that memory,
// which stay with the queue when its owner has ended. All methods may be called from any thread.
class QueueCore {
 public:
  explicit QueueCore(const QueueMemory::Shape& shape);
  // Memory and store of another process's.
  QueueCore(Segment memory, UniqueFd writer, UniqueFd reader);

  QueueMemory& memory() { return memory_; }
  // QueueMemory::leave: items that name memory of this process concern it, and who has the writing
  // end of the store can join the queue.
  bool leave();
  void come_back(UniqueFd writer);  // after leave() was false
  std::vector<int> descriptors() const;

  // Puts the region into the store, if it was not there in this epoch of the memory.
  void deposit(const std::shared_ptr<Region>& region, std::uint32_t epoch);
  // The memory that an item names. kPeerLost if it is gone.
  std::shared_ptr<Region> find(const WireRegion& wire);

  // Files (strategy kFile) last only as long as a process holds them: this one does until the item
  // that names them was taken.
  void keep(Lease lease);
  void drop_taken();

  // Lets go of the blocks that an item holds, from number `progress` on.
  void settle(std::string_view item, std::atomic<std::uint32_t>& progress) noexcept;

 private:
  void leave_blocks(const WireMessage& message, std::uint32_t& number,
                    std::atomic<std::uint32_t>& progress);
  // `departed`: processes have left or died since the last time.
  void prune(bool departed);

  QueueMemory memory_;
  DescriptorStore store_;  // under the lock of the memory

  struct Deposited {
    std::uint32_t epoch = 0;
    std::uint32_t departures = 0;               // when the store was pruned last
    std::unordered_set<std::uint64_t> regions;  // serials
  };
  Guarded<Deposited> deposited_;
  // Regions that came from the store stay mapped while their owners live.
  Guarded<std::unordered_map<std::uint64_t, std::shared_ptr<Region>>> used_;  // by inode
  Guarded<std::vector<Lease>> kept_;  // of files in items that this process has put
};

}  // namespace convoy::share
