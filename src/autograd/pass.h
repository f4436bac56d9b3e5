#pragma once

#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "autograd/context.h"
#include "autograd/walk.h"
#include "autograd/wire.h"
#include "convoy/deadline.h"

namespace torch::autograd {
struct AccumulateGrad;
}

namespace convoy::autograd::detail {

class RecvNode;
class Registry;

// One worker's part of a backward pass: what of its graph takes part, the gradients that have come
// for it, and those that it has computed. Its states: discovery (the walk grows), running (one run
// of libtorch's engine), done (the root decides), committed; ended, when the registry has let go of
// it.
// Thread-safe, but for run().
class Pass : public std::enable_shared_from_this<Pass> {
 public:
  Pass(std::shared_ptr<ContextState> context, const PassHead& head);

  const PassId& id() const { return id_; }
  ContextState& context() const { return *context_; }
  // As it is sent on, with what is left of its time.
  PassHead head() const;
  const Deadline& deadline() const { return deadline_; }
  bool fast() const { return fast_; }

  // --- discovery ---

  void follow(const std::vector<torch::autograd::Edge>& roots);
  // Every send of the context.
  void follow_all_sends();
  // What the answer to this batch is; the same, if it is asked again. kInvalidArgument.
  std::vector<Ports> expand(std::uint32_t batch, const std::vector<Ports>& ports);
  std::vector<Ports> expand_here(const std::vector<Ports>& ports);
  std::vector<Ports> take_reached();

  // --- execution ---

  // Runs the engine on this thread until all gradients have come and gone. Throws what a node
  // throws, kTimeout at the deadline, kCancelled after abort().
  void run(const std::vector<torch::autograd::Edge>& roots, std::vector<at::Tensor> gradients);
  // Gradients of a message that this worker sent. The first one starts it. Ignored if they have
  // come before.
  void deliver(std::uint64_t message, const std::vector<at::Tensor>& gradients);
  // At a worker that is not the root: what goes there goes as an answer to one of its calls, if
  // that can be. The same one, if the call comes again.
  rpc::Future<GradientReply> answer_for_root(std::uint64_t message,
                                             const std::vector<at::Tensor>& gradients);
  static rpc::Future<GradientReply> nothing_for_root();

  // --- the end ---

  // What run() has computed becomes the context's. Once.
  void commit();
  // Of one that is over here: until the root has decided. kTimeout.
  void wait_for_decision() const;
  // A running engine stops before its next node. What it waits for.
  AbortReply abort(const std::string& why);
  bool aborted() const { return aborted_.load(); }
  std::vector<WorkerId> engaged() const;
  bool has_engaged(WorkerId worker) const;
  PassReport report() const;
  // Which gradients have not come: "the gradient of its reply of f to worker0 (message 3)".
  std::string waits_for() const;
  PassError describe(const std::exception_ptr& error, const std::string& node = {}) const;
  // That threw out of run().
  const std::string& last_node() const { return node_; }

  // --- for nodes, on the thread of run() ---

  struct Arrived {
    const Walk::ActiveSend* send = nullptr;
    std::vector<at::Tensor> gradients;
  };
  Arrived next_gradient();
  void send_back(const RecvNode& recv, torch::autograd::variable_list&& gradients);
  void begin_task();
  void arrived_at(const torch::autograd::AccumulateGrad& leaf, const at::Tensor& gradient);
  void before_node(const char* name);
  void after_node();
  bool is_current_task() const;

 private:
  enum class State { kDiscovery, kRunning, kDone, kCommitted };

  std::vector<Ports> expand_locked(const std::vector<Ports>& ports);
  void send(WorkerId to, std::uint64_t message, const std::vector<at::Tensor>& gradients);
  void tell_root(const PassError& error);
  void took_answer(const GradientReply& reply, WorkerId from);
  // What the root is to have. Of an end: all calls of the root are answered.
  void flush(bool done);
  // All calls of the root but one, with nothing: it can have only so many that are not answered.
  void answer_most();
  void answer_all();
  void run_for_root() noexcept;
  std::string waits_for_locked() const;

  const std::shared_ptr<ContextState> context_;
  Registry& registry_;
  const PassId id_;
  const std::uint64_t floor_;
  const bool fast_;
  const bool retain_;
  const Deadline deadline_;

  std::atomic<bool> aborted_{false};
  mutable std::mutex mutex_;
  // Guarded by mutex_; the walk is constant once it runs.
  State state_ = State::kDiscovery;
  Walk walk_;
  std::map<std::uint32_t, std::vector<Ports>> answers_;
  std::set<std::uint64_t> came_;
  std::deque<std::pair<std::uint64_t, std::vector<at::Tensor>>> arrived_;
  std::set<WorkerId> engaged_;
  std::string why_;  // it was aborted
  struct RootCall {
    std::vector<rpc::Promise<GradientReply>> waiting;
    std::optional<GradientReply> answer;
  };
  std::map<std::uint64_t, RootCall> root_calls_;  // by message
  std::set<std::uint64_t> open_calls_;            // those of them that wait
  bool answered_all_ = false;

  // Of the thread of run(), and of commit() after it.
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
  std::vector<MessageGradients> for_root_;
  std::chrono::steady_clock::time_point for_root_since_;
  int task_ = -1;
  std::string node_;  // that runs, or ran last
};

}  // namespace convoy::autograd::detail
