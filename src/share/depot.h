#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/guarded.h"
#include "share/pool.h"
#include "share/region.h"

namespace convoy::share {

class Depot;
struct Holding;

// Where a block lies: its entry in a book, and its memory, which is the same place except for
// memory of a group.
struct BlockRef {
  std::shared_ptr<Region> book;
  std::uint64_t entry = 0;  // offset of the block in the book's region
  std::uint32_t generation = 0;
  std::shared_ptr<Region> memory;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// One reference of this process to a block: while it lives, the memory is there and is nobody
// else's. Movable; not thread-safe (its block is).
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept
      : depot_(other.depot_), holding_(std::exchange(other.holding_, {})) {}
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { reset(); }

  explicit operator bool() const { return holding_ != nullptr; }
  void reset() noexcept;
  // Another one to the same block.
  Lease copy() const;
  std::byte* data() const;
  std::size_t bytes() const;
  const BlockRef& ref() const;

 private:
  friend class Depot;
  Lease(Depot* depot, Holding* holding) : depot_(depot), holding_(holding) {}

  Depot* depot_ = nullptr;
  Holding* holding_ = nullptr;
};

// The process's shared tensors: its own pool, and what it uses of others'. Made on first use and
// never destroyed; a forked child makes another, and what it has inherited from its parent it keeps
// until it ends. All methods may be called from any thread.
class Depot {
 public:
  static Depot& instance();
  // nullptr if nobody has used it in this process.
  static Depot* existing() noexcept;

  // From the pool; begins at a page, not cleared. Throws kResource.
  Lease allocate(std::size_t bytes);
  // The same with a copy of `content` in it, which is quicker than both one after the other where
  // the pool has to grow.
  Lease allocate_copy(std::span<const std::byte> content);
  // In a file of its own: docs/reference/sharing.md. Throws kResource.
  Lease allocate_named(std::size_t bytes);
  // Memory of a group that begins at `data`, nullopt if it is none. Keeps it from being handed out
  // again while anybody has a lease on it.
  std::optional<Lease> lease_group_memory(const void* data, std::size_t bytes);
  // Memory that others of this process share, and that stays where it is: for as long as anybody
  // has a lease on it, or uses it in another process, `keep` is kept.
  struct OutsideMemory {
    UniqueFd fd;                  // of the file that is mapped
    std::byte* mapped = nullptr;  // from its beginning
    std::size_t mapped_bytes = 0;
    const std::byte* data = nullptr;  // of the block
    std::size_t bytes = 0;
    std::shared_ptr<void> keep;
  };
  Lease lease_outside_memory(OutsideMemory memory);
  // Another reference to a block, which a handle names. Throws kPeerLost if the block is no more.
  Lease open(const BlockRef& ref);

  // Whether another process holds the block, or a handle of it is under way.
  bool held_elsewhere(const BlockRef& ref);

  // A region that was passed to this process: the one that is there already, or a new one. Throws
  // kInvalidArgument.
  std::shared_ptr<Region> adopt(UniqueFd fd, std::size_t bytes, Region::Kind kind);
  // The one with this key, nullptr if there is none.
  std::shared_ptr<Region> find(const Segment::Key& key);
  // There is one with this key, or memory of others (lease_outside_memory).
  bool uses(const Segment::Key& key);
  // A file of another process, by its path; the one that is there already, or a new one.
  std::shared_ptr<Region> open_named(const std::string& path);

  // Called before the pool grows and by trim(): gives back what nobody waits for any more. Asked as
  // long as the function's owner lives.
  using Reaper = std::function<void()>;
  void on_shortage(const std::weak_ptr<Reaper>& reaper);

  // Gives unused memory back to the system; the bytes.
  std::size_t trim();

  struct Stats {
    std::size_t pool_bytes = 0;
    std::size_t pool_regions = 0;
    std::size_t blocks = 0;     // of the pool, in use by anybody
    std::size_t abandoned = 0;  // of those, no more in use here
    std::size_t foreign = 0;    // blocks of others in use here
    std::size_t regions = 0;    // mapped, of anybody
  };
  // Looks for dead processes first.
  Stats stats();
  // Every descriptor this object holds: for leak checks.
  std::vector<int> descriptors();
  // Tests: bytes by which the pool may grow, asked instead of the machine. nullptr: back.
  void set_headroom_for_testing(std::function<std::uint64_t()> headroom);

 private:
  friend class Lease;
  struct State;
  struct Fork;

  Depot();
  ~Depot();
  void release(Holding* holding) noexcept;
  void retain(Holding* holding);
  void run_reapers();
  Lease begin_block(State& state, Pool::Place place, std::size_t bytes);
  // By how much the pool shall grow. Throws kResource.
  std::size_t room_for(std::size_t bytes);
  std::optional<Lease> take_from_pool(std::size_t bytes);
  const unsigned generation_;  // fork_generation() of the process that made it
  const std::unique_ptr<Guarded<State>> state_;
};

}  // namespace convoy::share
