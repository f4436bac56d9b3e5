#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "autograd/gated.h"
#include "autograd/walk.h"
#include "autograd/wire.h"
#include "convoy/future.h"
#include "ddp/gradient_home.h"

// What a Pass is made of. Each part says which thread or lock it belongs to.
namespace convoy::autograd::detail {

// Who takes part, where lineages say so and nobody is asked. Guarded by the pass's lock.
struct PassPlan {
  bool made = false;                      // by the root
  bool followed = false;                  // its own part, at another worker
  std::map<WorkerId, PlanPart> unsent{};  // at the root
};

// Calls of the root with gradients for this worker. Their answers take along what the root is to
// have. Guarded by the pass's lock, behind which the promises are kept.
class RootCalls {
 public:
  using Promises = std::vector<rpc::Promise<GradientReply>>;

  // The same answer, if the call comes again. `at_once`: it does not stay open.
  rpc::Future<GradientReply> add(std::uint64_t message, bool at_once);
  void drop(std::uint64_t message);
  // Of one that is open, which is answered with this. Empty: none is.
  Promises answer_one(const GradientReply& reply);
  // Of all that are open but one: the root can have only so many that are not answered.
  Promises answer_most();
  // Of all, and of those that come from now on.
  Promises answer_all();

 private:
  struct Call {
    Promises waiting;
    std::optional<GradientReply> answer;
  };

  std::map<std::uint64_t, Call> calls_;  // by message
  std::set<std::uint64_t> open_;         // those of them that wait
  bool answered_all_ = false;
};

// Gradients for the root that go with the end of this worker's part, if that is near: they are
// small, few nodes are left, and all before took little time. Of the thread of run().
class HeldGradients {
 public:
  static constexpr std::size_t kMostBytes = 16384;

  // The engine starts. It will run so many nodes that send or compute something.
  void starts() { began_ = std::chrono::steady_clock::now(); }
  void expect(std::size_t nodes) { nodes_left_ = nodes; }
  void node_ended() {
    if (nodes_left_ != 0) --nodes_left_;
  }

  void hold(std::uint64_t message, std::vector<at::Tensor>&& gradients) {
    held_.push_back({message, std::move(gradients)});
  }
  bool empty() const { return held_.empty(); }
  std::vector<MessageGradients> take() { return std::exchange(held_, {}); }
  // The end is not near.
  bool must_go() const { return nodes_left_ > kMostNodesLeft || is_late(); }
  bool is_late() const { return std::chrono::steady_clock::now() - began_ > kMostTime; }

 private:
  static constexpr std::size_t kMostNodesLeft = 5;  // with the one that sends
  static constexpr std::chrono::microseconds kMostTime{50};

  std::vector<MessageGradients> held_;
  std::size_t nodes_left_ = 0;
  std::chrono::steady_clock::time_point began_;
};

// Where the engine is, so that a failure can be told by its node. Of the thread of run().
class EnginePlace {
 public:
  void enters(const char* node) {
    node_ = node;
    inside_ = true;
  }
  void leaves();  // also while the node's exception is on its way
  // Within a catch: "in MulBackward0", "in a hook after it". Empty: in a node of ours, which runs
  // nobody's code.
  std::string where_it_failed() const;

 private:
  std::string node_;  // that runs, or ran last
  bool inside_ = false;
};

// At the root: a run while others are still asked who takes part. Of the thread of run().
struct EarlyRun {
  std::optional<GatedRun> engine{};
  bool discovering = false;  // what it sends goes with the end of discovery
  std::vector<std::pair<Received, std::vector<at::Tensor>>> unsent{};
  std::size_t leaves = 0;  // of the walk, that it has run
};

// What a run has computed, until it is the context's. Of the thread of run(), and of commit() after
// it.
struct ComputedGradients {
  std::vector<std::pair<at::Tensor, at::Tensor>> by_leaf{};
  // Of reducers' parameters: instead of what the context has.
  std::vector<std::pair<std::shared_ptr<Reducer::Impl>, ContextGradients>> reduced{};
};

}  // namespace convoy::autograd::detail
