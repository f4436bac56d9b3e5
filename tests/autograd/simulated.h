#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "../agent/hooked_endpoint.h"
#include "convoy/rpc.h"
#include "transport/simulation.h"

namespace convoy::autograd::test {

// Workers of one session in a simulated world, which they do not outlive.
class SimulatedWorkers {
 public:
  // A letter that a worker is about to send; nullopt: it goes.
  using Send = std::function<std::optional<transport::SendResult>(int from, transport::Remote& to,
                                                                  const transport::Letter&)>;

  // As many as `threads` has numbers: the size of their pools.
  SimulatedWorkers(transport::World& world, const std::vector<int>& threads, const Send& send);
  SimulatedWorkers(const SimulatedWorkers&) = delete;
  SimulatedWorkers& operator=(const SimulatedWorkers&) = delete;

  rpc::Session& operator[](int rank) { return *sessions_[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(sessions_.size()); }
  void crash(int rank);
  // Nobody who lives has contexts or passes.
  bool is_empty() const;

 private:
  transport::World& world_;
  std::optional<int> crashed_;
  std::vector<transport::Endpoint*> endpoints_;
  std::vector<std::unique_ptr<agent::test::Hooks>> hooks_;
  std::vector<std::unique_ptr<rpc::Session>> sessions_;
};

}  // namespace convoy::autograd::test
