#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "transport/shm/arena.h"
#include "transport/shm/mapping.h"
#include "transport/shm/peer.h"

namespace convoy::shm {

// The memory that an endpoint lends. A block is in use by one loan, or in limbo. Not thread-safe:
// the owner locks.
struct LentHeap {
  // Loans of a remote that was lost while its process lives: it may still read them.
  struct Limbo {
    Mapping ring;
    std::shared_ptr<Peer> peer;
    std::map<std::uint16_t, Location> blocks;  // by number of the loan
  };

  std::optional<Arena> arena;
  std::vector<Limbo> limbo;

  // Frees what was given back since, and what belongs to processes that have ended.
  void sweep();
};

}  // namespace convoy::shm
