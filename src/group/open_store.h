#pragma once

#include <memory>
#include <optional>

#include "convoy/rendezvous.h"
#include "convoy/store.h"

namespace convoy {

// The store of a job, for who does not wait for all of its ranks.
struct OpenStore {
  std::shared_ptr<Store> store;
  std::optional<int> rank = std::nullopt;  // as the launcher says, or what was given
  bool served_here = false;                // it ends with this process, or with the last copy
};

// By the same methods and environment as rendezvous(), but nobody need say how many ranks there
// are. With tcp://, and with MASTER_ADDR set by hand, the process with rank 0 serves it, and others
// need no rank; under `convoy run` and torchrun the launcher does; a file needs nobody.
// kUnsupported under MPI and Slurm without MASTER_ADDR.
OpenStore open_store(const RendezvousOptions& options);

}  // namespace convoy
