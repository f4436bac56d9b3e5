#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "../agent/hooked_endpoint.h"
#include "convoy/rpc.h"
#include "transport/simulation.h"

namespace convoy::autograd::test {

// Workers of one session in a simulated world, which they do not outlive.
class SimulatedWorkers {
 public:
  // A letter that a worker is about to send.
  struct Sending {
    int from;
    int to;
    // The name of what it calls, or answers: "convoy::autograd::detail::expand". Empty: neither.
    std::string_view function;
    bool answer;
    transport::Remote& remote;
    const transport::Letter& letter;
  };
  // nullopt: it goes.
  using Send = std::function<std::optional<transport::SendResult>(const Sending&)>;

  // As many as `threads` has numbers: the size of their pools.
  SimulatedWorkers(transport::World& world, const std::vector<int>& threads, Send send);
  SimulatedWorkers(const SimulatedWorkers&) = delete;
  SimulatedWorkers& operator=(const SimulatedWorkers&) = delete;

  rpc::Session& operator[](int rank) { return *sessions_[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(sessions_.size()); }
  void crash(int rank);
  // In `send`: this letter goes once more, or instead, in a while. Nobody is asked then.
  void send_after(std::chrono::nanoseconds delay, const Sending& sending);
  // Of those who live: how many passes, and whether they have neither contexts nor passes.
  std::size_t passes() const;
  bool is_empty() const;

 private:
  std::optional<transport::SendResult> ask(int from, transport::Remote& remote,
                                           const transport::Letter& letter);
  std::string_view function_of(int from, int to, const transport::Letter& letter);

  transport::World& world_;
  const Send send_;
  bool passing_ = false;  // of send_after()
  // What was called, by caller, callee and number of the call.
  std::map<std::tuple<int, int, std::uint64_t>, std::string_view> calls_;
  std::optional<int> crashed_;
  std::vector<transport::Endpoint*> endpoints_;
  std::vector<std::unique_ptr<agent::test::Hooks>> hooks_;
  std::vector<std::unique_ptr<rpc::Session>> sessions_;
};

}  // namespace convoy::autograd::test
