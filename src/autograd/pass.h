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
#include "autograd/gated.h"
#include "autograd/pass_parts.h"
#include "autograd/pass_record.h"
#include "autograd/walk.h"
#include "autograd/wire.h"
#include "convoy/deadline.h"
#include "ddp/gradient_home.h"

namespace convoy::autograd::detail {

class Registry;

// One worker's part of a backward pass: what of its graph takes part, the gradients that have come
// for it, and those that it has computed. Its states: discovery (the walk grows), running (one run
// of libtorch's engine), done (the root decides), committed; ended, when the registry has let go of
// it.
// Thread-safe, but for run().
class Pass final : public GatedRun::Host,
                   public GradientHome,
                   public std::enable_shared_from_this<Pass> {
 public:
  Pass(std::shared_ptr<ContextState> context, const PassHead& head);

  const PassId& id() const { return told_.pass; }
  ContextState& context() const { return *context_; }
  PassRecord& record() { return record_; }
  // As it is sent on, with what is left of its time.
  PassHead head() const;
  const Deadline& deadline() const { return deadline_; }

  // --- discovery ---

  void follow(const std::vector<torch::autograd::Edge>& roots);
  // Every send of the context.
  void follow_all_sends();
  // What the answer to this batch is; the same, if it is asked again. kInvalidArgument.
  std::vector<Ports> expand(std::uint32_t batch, const std::vector<Ports>& ports);
  std::vector<Ports> expand_here(const std::vector<Ports>& ports);
  std::vector<Ports> take_reached();
  // At the root: if what was reached says itself what it depends on, the others who take part.
  // Nobody is asked then; they get their parts with gradients, or before.
  std::optional<std::set<WorkerId>> make_plan();
  // At another worker: its part. kInvalidArgument. The same may come again.
  void follow_plan(const PlanPart& part);

  // --- execution ---

  // At the root, before others are asked: if what was reached from the roots shares nothing with
  // what gradients could come for, it can run while they are. What it sends goes with
  // discovery_ended().
  bool prepare_early();
  void run_early(const std::vector<torch::autograd::Edge>& roots,
                 std::vector<at::Tensor>&& gradients);
  void discovery_ended();
  // Runs the engine on this thread until all gradients have come and gone. Throws what a node
  // throws, kTimeout at the deadline, kCancelled after abort().
  void run(const std::vector<torch::autograd::Edge>& roots, std::vector<at::Tensor>&& gradients);
  // Gradients of a message that this worker sent. The first one starts it. Ignored if they have
  // come before.
  void deliver(std::uint64_t message, const std::vector<at::Tensor>& gradients);
  // The same of a call. At a worker that is not the root: what goes there goes as an answer to one
  // of its calls, if that can be. The same one, if the call comes again.
  rpc::Future<GradientReply> take(std::uint64_t message, const std::vector<at::Tensor>& gradients,
                                  bool from_root);
  static rpc::Future<GradientReply> nothing_for_root();

  // The optimizers of the pass step here. Behind run().
  void step();
  // Waits a little for a step that is under way.
  Stepped stepped() const;

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
  // `where`: empty, or the user's code that threw it: then it is this worker's failure, whatever
  // that was waiting for (kRemote).
  PassError describe(const std::exception_ptr& error, const std::string& where = {}) const;
  // What threw out of run() or step(): "in MulBackward0"; empty: neither a node nor a hook.
  const std::string& failed_in() const { return failed_in_; }

  // --- for the engine's run ---

  Arrived next_gradient(std::uint64_t message) override;
  void send_back(const Received& received, std::vector<at::Tensor>&& gradients) override;
  void arrived_at(torch::autograd::AccumulateGrad& leaf, const at::Tensor& gradient) override;
  bool engine_accumulates(torch::autograd::AccumulateGrad& leaf) override;
  bool sends_zeros() const override { return told_.fast; }
  void before_node(const char* name) override;
  bool after_node() override;
  // GradientHome
  bool is_current() const override { return engine_ != nullptr && engine_->is_current_task(); }
  void lend(const std::shared_ptr<Reducer::Impl>& reducer) override;
  std::string given_up() const override;

 private:
  enum class State { kDiscovery, kRunning, kDone, kCommitted };

  struct Gradient {
    std::uint64_t message = 0;
    std::vector<at::Tensor> tensors;
  };

  std::vector<Ports> expand_locked(const std::vector<Ports>& ports);
  std::shared_ptr<const SentMessage> sent(std::uint64_t message) const;
  void require_expected(const Gradient& gradient) const;
  void start();
  void run_engine(GatedRun& engine, const std::vector<torch::autograd::Edge>& roots,
                  std::vector<at::Tensor>&& gradients);
  void end_loans();
  // Parts that have not gone with a gradient; those alone that gradients may not take along.
  void send_plans(bool all);
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
  const PassHead told_;  // as it came here: head() has what is sent on
  const Deadline deadline_;

  PassRecord record_;
  std::atomic<bool> aborted_{false};
  mutable std::mutex mutex_;
  // Guarded by mutex_; the walk is constant once it runs.
  State state_ = State::kDiscovery;
  Walk walk_;
  std::map<std::uint32_t, std::vector<Ports>> answers_;
  PassPlan plan_;
  std::set<std::uint64_t> came_;
  std::deque<Gradient> arrived_;
  std::set<WorkerId> engaged_;
  std::string why_;  // it was aborted
  Stepped stepped_ = Stepped::kNothing;
  RootCalls root_calls_;

  // Of the thread of run(), and of commit() after it.
  ComputedGradients computed_;
  std::map<std::shared_ptr<Reducer::Impl>, std::unique_ptr<GradientLoan>> loans_;
  GatedRun* engine_ = nullptr;  // while it runs
  HeldGradients for_root_;
  EarlyRun early_;
  std::optional<ContextState::Ordered> ordered_;  // deterministic, until it has run
  EnginePlace place_;
  std::string failed_in_;  // see failed_in()
};

std::size_t bytes_of(const at::Tensor& gradient);
std::size_t bytes_of(const std::vector<at::Tensor>& gradients);

}  // namespace convoy::autograd::detail
