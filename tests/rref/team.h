#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../agent/support.h"
#include "base/guarded.h"
#include "base/random.h"
#include "rref/refs.h"

namespace convoy::rref::test {

// An agent with references, and functions that make, keep and give values (numbers).
class Worker {
 public:
  explicit Worker(const agent::AgentOptions& options);
  ~Worker();

  agent::Agent& agent() { return **agent_; }
  Refs& refs() { return refs_; }
  // After the agent has met the others.
  void met_all();
  // The agent ends, as it is.
  void end() { agent_->reset(); }

  // A value of `owner`; what its function throws, if `value` is negative. Waits for the call.
  Ref create(std::size_t owner, int value, const agent::CallOptions& options = {});
  // A call that gives references to another worker, which keeps them. Throws what it throws.
  void give(std::size_t to, const std::vector<Ref>& refs, const agent::CallOptions& options = {});
  // What it keeps, from then on the caller's.
  std::vector<Ref> kept();
  // The value, by a call to the owner. Throws what it throws.
  int fetch(const Ref& ref);
  // Something of the program that `random` makes; errors of calls are swallowed if `faulty`.
  void act(std::vector<Ref>& held, Random& random, bool faulty);
  // No values, and nobody refers to anything.
  bool is_empty();

  std::atomic<bool> keeps{true};                // false: what it is given is dropped
  std::atomic<int> alive{0};                    // values
  std::function<void()> in_function = nullptr;  // called in each

 private:
  Value value(int number);
  void serve_create(const agent::RequestRef& request);
  void serve_keep(const agent::RequestRef& request);
  void serve_fetch(const agent::RequestRef& request);

  Guarded<std::vector<Ref>> kept_;
  std::unique_ptr<agent::test::TestAgent> agent_;
  Refs refs_;
};

// Some in one process.
class Team {
 public:
  explicit Team(std::size_t size,
                const std::function<void(agent::AgentOptions&)>& choose = nullptr);
  ~Team();

  Worker& operator[](std::size_t worker) { return *workers_[worker]; }
  std::size_t size() const { return workers_.size(); }
  void shutdown_all(std::chrono::seconds timeout = std::chrono::seconds(60));
  // Nobody refers to anything, within a minute. What comes meanwhile is dropped.
  bool becomes_empty();

 private:
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace convoy::rref::test
