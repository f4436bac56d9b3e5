#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "agent/agent.h"
#include "agent/membership.h"
#include "convoy/rpc.h"
#include "os/fork_guard.h"
#include "rpc/recording.h"
#include "rref/refs.h"

namespace convoy::rpc::detail {

// A session: an agent, and what its functions need to know. Futures and handlers refer to it, too;
// whoever is the last ends it.
class SessionImpl : public std::enable_shared_from_this<SessionImpl> {
 public:
  static std::shared_ptr<SessionImpl> make(const SessionOptions& options);
  // For tests: with an agent whose options `choose` changes (simulated endpoints). The caller
  // admits the agents to each other.
  using Choose = std::function<void(agent::AgentOptions&)>;
  static std::shared_ptr<SessionImpl> make_apart(const SessionOptions& options,
                                                 const Choose& choose);
  SessionImpl(const SessionImpl&) = delete;
  SessionImpl& operator=(const SessionImpl&) = delete;

  agent::Agent& agent() { return *agent_; }
  rref::Refs& refs() { return *refs_; }
  agent::Membership& membership() { return *membership_; }
  // Of distributed autograd; nullptr without it.
  Recordings* recordings() const { return recordings_.get(); }
  bool allows(const std::string& op) const;
  // Of a call whose handler runs. kCancelled if the session is about to end.
  static std::shared_ptr<SessionImpl> of(const agent::Request& request);
  static std::weak_ptr<SessionImpl> weak_of(const agent::Request& request);

 private:
  // Meets nobody: calls of others need its shared_ptr.
  SessionImpl(const SessionOptions& options, agent::AgentOptions made);
  ~SessionImpl();
  static void destroy(SessionImpl* session) noexcept;

  const HomeProcess home_;
  std::set<std::string, std::less<>> operators_;
  std::unique_ptr<Recordings> recordings_;  // handlers use it: it goes after the agent
  std::unique_ptr<rref::Refs> refs_;        // likewise
  std::shared_ptr<agent::Membership> membership_;
  std::unique_ptr<agent::Agent> agent_;
};

// The engine's; beyond a century: never.
std::chrono::nanoseconds within_clock(std::chrono::milliseconds timeout);

// As the engine takes it: nullopt: the session's; 0: never.
std::optional<std::chrono::nanoseconds> timeout_of(const CallOptions& options);

// While one lives, this thread waits, perhaps in a callback of a future: callbacks of what ends
// meanwhile run at once, and do not wait for that one to return.
class WaitScope {
 public:
  WaitScope() noexcept;
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;
  ~WaitScope();

 private:
  const int depth_;  // of callbacks
};

// Gives a thread of ours the state of a new one, before it runs somebody's function.
void clean_thread_state();

}  // namespace convoy::rpc::detail
