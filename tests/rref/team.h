#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../agent/support.h"
#include "rref/refs.h"

namespace convoy::rref::test {

// Agents of one process with references, and functions that make, keep and give values (numbers).
class Team {
 public:
  explicit Team(std::size_t size,
                const std::function<void(agent::AgentOptions&)>& choose = nullptr);
  ~Team();

  agent::Agent& agent(std::size_t worker) { return **members_[worker]->agent; }
  Refs& operator[](std::size_t worker) { return *members_[worker]->refs; }
  std::size_t size() const { return members_.size(); }
  // Its agent ends, as it is.
  void end(std::size_t worker) { members_[worker]->agent->reset(); }

  // A value of `owner`; what its function throws, if `value` is negative. Waits for the call.
  Ref create(std::size_t creator, std::size_t owner, int value,
             const agent::CallOptions& options = {});
  // A call that gives references to another worker, which keeps them. Throws what it throws.
  void give(std::size_t from, std::size_t to, const std::vector<Ref>& refs,
            const agent::CallOptions& options = {});
  // What it keeps, from then on the caller's.
  std::vector<Ref> kept(std::size_t worker);
  // The value, by a call to the owner. Throws what it throws.
  int fetch(std::size_t worker, const Ref& ref);
  void shutdown_all(std::chrono::seconds timeout = std::chrono::seconds(60));
  // Nobody refers to anything, within a minute.
  bool becomes_empty();

  std::atomic<int> alive{0};  // values

 private:
  struct Member {
    std::unique_ptr<agent::test::TestAgent> agent;
    std::unique_ptr<Refs> refs;
    Guarded<std::vector<Ref>> kept;
  };

  Value value(int number);
  Member& of(const agent::Request& request);
  void serve_create(const agent::RequestRef& request);
  void serve_keep(const agent::RequestRef& request);
  void serve_fetch(const agent::RequestRef& request);

  std::vector<std::unique_ptr<Member>> members_;
};

}  // namespace convoy::rref::test
