#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
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
  // The thread that serves waits for descriptors, too (shm_watch): it sleeps on epoll, and whoever
  // wakes it writes to an eventfd. One descriptor more for each remote, at its side.
  bool descriptors = false;
  // Pieces that stay are read where they are from this size on, where that is allowed. Smaller ones
  // are copied sooner by two cores at once than by the kernel.
  std::size_t least_direct = std::size_t{32} << 20;
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

// Of an endpoint made for descriptors: calls `ready` on the thread that serves when `fd` has one of
// `events` (EPOLLIN, EPOLLOUT; errors and hang-ups always), as an inbox is called: one call at a
// time, and one that waits or has handed over does not count. It is called again and again while
// this holds, but not while it runs. The caller keeps the descriptor open until shm_unwatch(),
// which returns false if it has to do with a call that runs just now.
std::uint64_t shm_watch(transport::Endpoint& endpoint, int fd, std::uint32_t events,
                        std::function<void(std::uint32_t)> ready);
bool shm_unwatch(transport::Endpoint& endpoint, std::uint64_t id);

}  // namespace convoy::shm
