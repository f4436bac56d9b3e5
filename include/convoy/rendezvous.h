#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "convoy/store.h"

namespace convoy {

// A rank's place in a job, and the store through which its ranks have met.
struct Meeting {
  std::shared_ptr<Store> store;  // the same for all ranks of this meeting, and empty
  int rank = 0;
  int size = 1;
  // On this host, as the launcher says; rank and size where it does not say.
  int local_rank = 0;
  int local_size = 1;
  // Who started this rank: "convoy run", "torchrun", "Open MPI", "MPICH" (all that speak PMI),
  // "Slurm", "environment" (set by hand or by Kubernetes), "none"; or "file", "tcp": the method.
  std::string launcher;
};

struct RendezvousOptions {
  // env:// (what the launcher set), file:///path or tcp://host:port; each may end with
  // ?rank=0&world_size=2.
  std::string method = "env://";
  std::optional<int> rank = std::nullopt;  // win over method and environment
  std::optional<int> size = std::nullopt;
  std::chrono::milliseconds timeout = Store::kDefaultTimeout;
};

// Finds out which rank this process is and waits until all ranks of the job have come. Every rank
// calls it, equally often; each call is a meeting of its own. A process that nobody launched is a
// group of one.
//
// What serves the store lives as long as the process. Any thread may call it; calls of one rank
// come one after another.
//
// Throws kInvalidArgument when method, arguments or environment are incomplete or contradict each
// other (the text says what to set), when two processes come as the same rank and when ranks
// disagree about the size; kTimeout naming the ranks that did not come; kPeerLost when rank 0 went
// away; kUnsupported in a forked child of a process that has met.
Meeting rendezvous(const RendezvousOptions& options = {});

}  // namespace convoy
