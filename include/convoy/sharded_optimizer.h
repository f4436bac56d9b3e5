#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <array>
#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "convoy/join.h"
#include "convoy/optimizer_rules.h"
#include "convoy/reducer.h"

namespace convoy {

struct ShardedOptimizerOptions {
  // Makes backward() the whole step; step() throws then. If buckets travel early (see
  // BucketLaunch), each is updated while backward goes on, unless all gradients must be known first
  // (max_norm, skip_nonfinite, NonFinite).
  bool in_backward = false;
  // Clips the gradients of all groups together to this norm. 0: no clipping.
  double max_norm = 0;
  double norm_type = 2;  // 2 or infinity
  // Skips the step, on all ranks, if the gradient norm is NaN or Inf.
  bool skip_nonfinite = false;
};

// The part of ShardedOptimizer that does not depend on its rule.
class ShardedOptimizerBase : public torch::optim::Optimizer, public Joinable {
 public:
  ~ShardedOptimizerBase() override;
  ShardedOptimizerBase(const ShardedOptimizerBase&) = delete;
  ShardedOptimizerBase& operator=(const ShardedOptimizerBase&) = delete;

  // Collective: averages `.grad` over the ranks and updates the parameters. Blocks. Gradients are
  // undefined afterwards. A parameter without a gradient does not change. Throws kInvalidArgument
  // on all ranks, before anything is changed, if only some ranks have that gradient or options
  // differ. Throws kPeerLost or kTimeout if ranks are lost or late: see
  // DistributedDataParallel::update_process_group(). Throws kUnsupported in a forked child, as
  // states(), load_states(), save() and load() do.
  at::Tensor step(LossClosure closure = nullptr) override;

  struct Stats {
    std::uint64_t steps = 0, skipped = 0;
    double norm = 0;                // of the last step's gradients, if it was computed
    std::uint64_t numbers = 0;      // elements that this rank updates
    std::uint64_t state_bytes = 0;  // bytes of state that this rank keeps
  };
  Stats stats() const;

  // The state of one parameter.
  struct ParameterState {
    std::int64_t steps = 0;
    // Shaped as the parameter; undefined if the rule has none. SGD: momentum. Adam and AdamW:
    // means, squares, largest squares. Adagrad: sum. RMSprop: squares, momentum, means. Adadelta:
    // squares, squared changes. Adamax: means, largest. Rprop: step sizes, last gradients.
    std::array<at::Tensor, 3> states = {};
  };
  using States = std::map<std::size_t, ParameterState>;  // by number in the reducer
  // Collective: returns the whole state on every rank.
  States states() const;
  // Collective: all ranks load the same states. Throws kInvalidArgument if they belong to other
  // parameters.
  void load_states(const States& states);

  // Collective: every rank gets the whole state, and one of them may write it. Options are not part
  // of it. It can be loaded with any number of ranks, and by OptimizerInBackward.
  void save(torch::serialize::OutputArchive& archive) const override;
  // Collective: all ranks load the same archive. Throws kInvalidArgument if it belongs to other
  // parameters.
  void load(torch::serialize::InputArchive& archive) override;

  // For Join: pass the optimizer after its model.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  const ProcessGroup& join_process_group() const override;

  class Impl;  // opaque

 protected:
  ShardedOptimizerBase(Reducer& reducer,
                       const std::vector<torch::optim::OptimizerParamGroup>& groups,
                       std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                       const ShardedOptimizerOptions& options);
  // Call it instead of step() on a rank that cannot make the step, so that the others do not wait
  // for it. Throws kInvalidArgument with the reason; on the other ranks the text says that this
  // rank refused.
  void refuse_step(const std::string& reason);

 private:
  friend class ShardedJoinHook;
  std::shared_ptr<Impl> impl_;  // shared with the reducer
};

// Holds a rule as the options of a libtorch parameter group, so that libtorch's schedulers find the
// learning rate.
class RuleOptions : public torch::optim::OptimizerOptions {
 public:
  template <IsRule Rule>
  RuleOptions(const Rule& rule) : rule_(rule) {}           // NOLINT(google-explicit-constructor)
  RuleOptions(const OptimizerRule& rule) : rule_(rule) {}  // NOLINT(google-explicit-constructor)
  RuleOptions(
      const torch::optim::OptimizerOptions& options);  // NOLINT(google-explicit-constructor)

  const OptimizerRule& rule() const { return rule_; }
  void set_rule(const OptimizerRule& rule) { rule_ = rule; }
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override;
  double get_lr() const override;
  void set_lr(double lr) override;

 private:
  OptimizerRule rule_;
};

namespace detail {
template <class Opt>
struct OptionsOf;
template <>
struct OptionsOf<OptimizerRule> {
  using Type = RuleOptions;
};
std::vector<torch::optim::OptimizerParamGroup> param_groups_of(
    const std::vector<OptimizerGroup>& groups);
template <>
struct OptionsOf<torch::optim::SGD> {
  using Type = torch::optim::SGDOptions;
};
template <>
struct OptionsOf<torch::optim::Adam> {
  using Type = torch::optim::AdamOptions;
};
template <>
struct OptionsOf<torch::optim::AdamW> {
  using Type = torch::optim::AdamWOptions;
};
template <>
struct OptionsOf<torch::optim::Adagrad> {
  using Type = torch::optim::AdagradOptions;
};
template <>
struct OptionsOf<torch::optim::RMSprop> {
  using Type = torch::optim::RMSpropOptions;
};
}  // namespace detail

// An optimizer that divides state and work among the ranks (ZeRO stage 1). Each rank sums the
// gradients of its shard over all ranks, updates the shard, and writes the result into the
// parameters of all ranks. With W ranks, each keeps 1/W of the state and does 1/W of the update.
//
//   convoy::DistributedDataParallel model(Net(), world);
//   convoy::ShardedOptimizer optimizer(model.reducer(), convoy::AdamW{.lr = 3e-4});
//   torch::optim::StepLR schedule(optimizer, 30, 0.1);
//   for (...) {
//     loss(model(input), target).backward();
//     optimizer.step();
//   }
//
// It is a torch::optim::Optimizer. Each group has a rule (RuleOptions), or with
// ShardedOptimizer<torch::optim::AdamW> the options of that optimizer. Schedulers and you may
// change them between steps, on all ranks alike. The result is bit-identical to that of
// OptimizerInBackward. Parameters move into memory that the ranks share, if the backend has such
// memory. Between backward() and step() `.grad` is this rank's own gradient. See
// docs/reference/sharded_optimizer.md. Thread-safety is as for Reducer. It cannot step once its
// reducer is gone.
template <class Opt = OptimizerRule>
class ShardedOptimizer : public ShardedOptimizerBase {
 public:
  using Options = typename detail::OptionsOf<Opt>::Type;

  // Collective: for all parameters of the reducer. Throws kInvalidArgument on all ranks if their
  // arguments differ or a value is out of range. The same goes for parameters that are not the
  // reducer's, are in two groups or have such an optimizer already. Throws kUnsupported if they are
  // sparse, share memory with each other, or are not f32, f64 or complex.
  ShardedOptimizer(Reducer& reducer, const Options& options,
                   const ShardedOptimizerOptions& more = {})
      : ShardedOptimizer(reducer, {torch::optim::OptimizerParamGroup(reducer.parameters())},
                         options, more) {}
  // For groups with options of their own. Options that a group does not set are those of
  // `defaults`.
  ShardedOptimizer(Reducer& reducer, const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const Options& defaults, const ShardedOptimizerOptions& more = {})
      : ShardedOptimizerBase(reducer, groups, std::make_unique<Options>(defaults), more) {}
  // For groups with one rule each.
  ShardedOptimizer(Reducer& reducer, const std::vector<OptimizerGroup>& groups,
                   const ShardedOptimizerOptions& more = {})
    requires std::same_as<Opt, OptimizerRule>
      : ShardedOptimizerBase(reducer, detail::param_groups_of(groups),
                             std::make_unique<Options>(OptimizerRule()), more) {}
};
// Deduces the type from a rule, from libtorch's options, or from groups.
template <class Rule>
ShardedOptimizer(Reducer&, const Rule&,
                 const ShardedOptimizerOptions& = {}) -> ShardedOptimizer<OptimizerRule>;

}  // namespace convoy
