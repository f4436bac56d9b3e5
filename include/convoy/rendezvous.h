#pragma once

#include <memory>
#include <optional>
#include <string>

#include "convoy/deadline.h"
#include "convoy/store.h"

namespace convoy {

// A rank's place in a job, and the store through which the ranks have met.
struct Meeting {
  std::shared_ptr<Store> store;  // shared by all ranks of this meeting; empty
  int rank = 0;
  int size = 1;
  // Rank and size on this host, if the launcher tells them. Otherwise the same as rank and size.
  int local_rank = 0;
  int local_size = 1;
  // What started this rank: "convoy run", "torchrun", "Open MPI", "MPICH" (any launcher that uses
  // PMI), "Slurm", "environment" (variables set by hand or by Kubernetes) or "none". For the
  // methods file:// and tcp:// it is "file" or "tcp".
  std::string launcher;
};

struct RendezvousOptions {
  // env:// (what the launcher set), file:///path or tcp://host:port; each may end with
  // ?rank=0&world_size=2.
  std::string method = "env://";
  std::optional<int> rank = std::nullopt;  // override method and environment
  std::optional<int> size = std::nullopt;
  // Until when all ranks must have come: a duration (0: expired at once) or a Deadline. Not set: 5
  // minutes.
  Timeout timeout = Store::kDefaultTimeout;
};

// Finds out which rank this process is, and blocks until all ranks of the job have come. All ranks
// must call it equally often; each call is a meeting of its own. A process without a launcher is a
// group of one.
//
// The server of the store lives as long as its process. Thread-safe; calls of one rank run one
// after another.
//
// Throws kInvalidArgument if method, arguments or environment are incomplete or contradictory (the
// text says what to set), if two processes come as the same rank, or if ranks disagree about the
// size. Throws kTimeout, naming the ranks that did not come; kPeerLost if rank 0 has gone;
// kUnsupported in a forked child of a process that has met.
Meeting rendezvous(const RendezvousOptions& options = {});

}  // namespace convoy
