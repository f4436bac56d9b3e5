#pragma once

#include <chrono>
#include <memory>

#include "base/function_ref.h"
#include "support.h"
#include "transport/shm/shm_endpoint.h"

// For tests of the endpoint of processes that share memory.
namespace convoy::transport::test {

inline constexpr auto kLimit = std::chrono::seconds(30);

inline std::unique_ptr<Party> join(const shm::ShmEndpointOptions& options = {}) {
  auto party = std::make_unique<Party>();
  party->endpoint = shm::make_shm_endpoint(party->inbox, options);
  party->inbox.wakes = party->endpoint.get();
  return party;
}

inline bool until(Party& party, FunctionRef<bool()> ready) {
  return party.endpoint->wait(Deadline::after(kLimit), ready);
}

}  // namespace convoy::transport::test
