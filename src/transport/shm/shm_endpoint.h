#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "transport/endpoint.h"

namespace convoy::shm {

struct ShmEndpointOptions {
  // What may be on its way to one remote, or be held by it, in pieces; at most 256 letters.
  std::size_t quota = std::size_t{1} << 30;
  // A thread serves: it polls when nobody waits, and sleeps when there is nothing. Without one,
  // somebody must poll(Serve::kAll).
  bool service_thread = true;
  // How long connecting may take.
  std::chrono::nanoseconds connect_timeout = std::chrono::seconds(30);
  // Pieces that stay are read where they are from this size on, where that is allowed. Of what fits
  // into caches two copies in user space are faster than one by the kernel.
  std::size_t least_direct = std::size_t{1} << 20;
};

// An endpoint for processes of one host, and one user. Calls of the inbox may begin before this
// returns. Made by any thread, and destroyed by one that is not in a call of its inbox; by then
// nobody may be in any of its methods.
std::unique_ptr<transport::Endpoint> make_shm_endpoint(transport::Inbox& inbox,
                                                       const ShmEndpointOptions& options = {});

struct ShmEndpointStats {
  std::size_t remotes = 0;      // that are not lost
  std::size_t lent_bytes = 0;   // that remotes have not given back
  std::size_t heap_bytes = 0;   // mapped for lending
  std::size_t limbo_loans = 0;  // of remotes that were lost while they live
};
ShmEndpointStats shm_stats(transport::Endpoint& endpoint);
// Gives memory for lending that is not lent back to the system; returns the bytes.
std::size_t shm_trim(transport::Endpoint& endpoint);

}  // namespace convoy::shm
