#include "simulated.h"

#include <utility>

#include "agent/agent.h"
#include "base/concat.h"
#include "convoy/autograd.h"
#include "rpc/session_impl.h"

namespace convoy::autograd::test {

SimulatedWorkers::SimulatedWorkers(transport::World& world, const std::vector<int>& threads,
                                   const Send& send)
    : world_(world) {
  std::vector<agent::Member> members;
  for (int rank = 0; rank < static_cast<int>(threads.size()); ++rank) {
    auto& hooks = *hooks_.emplace_back(std::make_unique<agent::test::Hooks>());
    hooks.send = [rank, send](transport::Remote& remote, const transport::Letter& letter) {
      return send(rank, remote, letter);
    };
    const auto impl = rpc::detail::SessionImpl::make_apart(
        {.rank = rank, .threads = threads[static_cast<std::size_t>(rank)]},
        [&](agent::AgentOptions& options) {
          options.make_endpoint = [this, &hooks, name = options.name](transport::Inbox& inbox) {
            return std::make_unique<agent::test::HookedEndpoint>(
                inbox, hooks, [&](transport::Inbox& inner) {
                  auto endpoint = world_.join(inner, name);
                  endpoints_.push_back(endpoint.get());
                  return endpoint;
                });
          };
          options.start_thread = [this](std::function<void()> run) {
            world_.start(std::move(run));
          };
        });
    members.push_back({concat("worker", rank), impl->agent().address()});
    sessions_.push_back(std::make_unique<rpc::Session>(impl));
  }
  const Id session = Id::random();
  for (const auto& each : sessions_) each->impl()->agent().admit(session, members);
}

void SimulatedWorkers::crash(int rank) {
  crashed_ = rank;
  world_.crash(*endpoints_[static_cast<std::size_t>(rank)]);
}

bool SimulatedWorkers::is_empty() const {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == crashed_) continue;
    const auto now = stats(*sessions_[static_cast<std::size_t>(rank)]);
    if (now.contexts != 0 || now.passes != 0) return false;
  }
  return true;
}

}  // namespace convoy::autograd::test
