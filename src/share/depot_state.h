#pragma once

// What a Depot keeps, under its lock: included by the files that implement it.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "share/depot.h"
#include "share/named.h"
#include "share/pool.h"

namespace convoy::share {

// A block that this process uses, or owns.
struct Holding {
  BlockRef ref;
  std::byte* data = nullptr;
  std::size_t count = 0;   // leases
  int slot = -1;           // this process's bit, where the block is another's
  Pool::Place place = {};  // where it is our own
  // The block is an entry of ours that stands for memory which is not of the pool, at this address.
  const std::byte* guest = nullptr;
  std::shared_ptr<void> keep = {};  // of memory that others share: keeps it mapped
};

struct Depot::State {
  Pool pool;
  std::unordered_map<const BookEntry*, std::unique_ptr<Holding>> holdings;
  std::vector<const BookEntry*> abandoned;  // ours, no lease here, somebody holds them
  std::size_t next_look = 0;
  std::map<Segment::Key, std::weak_ptr<Region>> regions;
  std::map<Segment::Key, std::weak_ptr<Region>> outside;          // of lease_outside_memory
  std::unordered_map<const std::byte*, const BookEntry*> guests;  // by address
  // What blocks have kept that ended. Whoever has the lock takes them and lets go of them after it.
  std::vector<std::shared_ptr<void>> dropped;
  std::map<ProcessWord, UniqueFd> users;  // of our pool: pidfds
  std::vector<std::weak_ptr<Reaper>> reapers;
  std::function<std::uint64_t()> headroom;  // bytes by which the pool may grow
  std::optional<NamedFolder> named;
  std::unordered_map<const Region*, int> slots;  // ours in regions of others

  State();

  // With one lease.
  Holding* add(BlockRef ref);
  // Another lease of memory that is not of the pool, if it has one.
  Holding* find_guest(const std::byte* address, std::size_t bytes);
  // The block stands for so many bytes of `region` from now on, which lie at `address` here.
  void make_guest(Holding* holding, const std::shared_ptr<Region>& region, std::uint64_t offset,
                  std::size_t bytes, const std::byte* address);
  std::shared_ptr<Region> known(const Segment::Key& key);
  void remember(const std::shared_ptr<Region>& region);
  // This process's bit in a region of others.
  int slot_in(const Region& region);

  // Nobody here uses the block: true if it is free again.
  bool end_own(const BookEntry* entry);
  // At so many of them, the next ones each time.
  void look_at_abandoned(std::size_t most);
  // Finds out which processes use the pool, and which of them are gone.
  void look_for_deaths();
  // All of what nobody uses any more becomes free.
  void sweep();

 private:
  void drop_user(ProcessWord user);
  static bool is_gone(ProcessWord user, UniqueFd& pidfd);
};

// What becomes of a Depot when its process forks.
struct Depot::Fork {
  // Once for each process; a forked child inherits it.
  static void install();
  // Blocks that this process's parents had when it was forked: it keeps them until it ends.
  static bool inherited(const Segment::Key& key, std::uint64_t entry);

 private:
  using Lock = Guarded<State>::Lock;
  static std::optional<Lock>& lock();
  static void before();
  static void in_parent();
  static void in_child();
};

std::uint64_t machine_headroom();

}  // namespace convoy::share
