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
  // backward() is the whole step; step() is an error. Where buckets travel early (see
  // BucketLaunch), and unless all gradients have to be looked at first, each is updated while
  // backward goes on.
  bool in_backward = false;
  // Clips the gradients of all groups together to this norm; 0: no clipping.
  double max_norm = 0;
  double norm_type = 2;  // or infinity
  // A step whose gradient norm is NaN or Inf is skipped, on all ranks.
  bool skip_nonfinite = false;
};

// What ShardedOptimizer does, whatever its rule.
class ShardedOptimizerBase : public torch::optim::Optimizer, public Joinable {
 public:
  ~ShardedOptimizerBase() override;
  ShardedOptimizerBase(const ShardedOptimizerBase&) = delete;
  ShardedOptimizerBase& operator=(const ShardedOptimizerBase&) = delete;

  // Collective: averages what `.grad` holds over the ranks, and updates. Parameters without a
  // gradient are left alone: on all ranks, or it is kInvalidArgument on all of them, as it is for
  // options that differ; then nothing was changed. Gradients are undefined afterwards. Also
  // kPeerLost, kTimeout: see DistributedDataParallel::update_process_group().
  at::Tensor step(LossClosure closure = nullptr) override;

  struct Stats {
    std::uint64_t steps = 0, skipped = 0;
    double norm = 0;                // of the last step's gradients, if it was needed
    std::uint64_t numbers = 0;      // of all parameters that this rank updates
    std::uint64_t state_bytes = 0;  // that it keeps for them
  };
  Stats stats() const;

  // What it keeps of one parameter.
  struct ParameterState {
    std::int64_t steps = 0;
    // As the parameter is shaped, undefined where there is none: of SGD the momentum; of Adam and
    // AdamW means, squares, largest squares; of Adagrad the sum; of RMSprop squares, momentum,
    // means.
    std::array<at::Tensor, 3> states = {};
  };
  using States = std::map<std::size_t, ParameterState>;  // by number in the reducer
  // The whole of it on every rank. Collective.
  States states() const;
  // On all ranks, of the same states. kInvalidArgument if they belong to other parameters.
  void load_states(const States& states);

  // Collective. The whole state on every rank: one of them may write it. Options are not part of
  // it. It can be loaded with any number of ranks, and by OptimizerInBackward.
  void save(torch::serialize::OutputArchive& archive) const override;
  // On all ranks, of the same archive. kInvalidArgument if it belongs to other parameters.
  void load(torch::serialize::InputArchive& archive) override;

  // For Join: stands after the model.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  const ProcessGroup& join_process_group() const override;

  class Impl;  // opaque

 protected:
  ShardedOptimizerBase(Reducer& reducer,
                       const std::vector<torch::optim::OptimizerParamGroup>& groups,
                       std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                       const ShardedOptimizerOptions& options);
  // Instead of step(), where what leads to it has failed: the others do not wait for this rank.
  // Throws kInvalidArgument with the reason, and on the other ranks that this one has refused.
  void refuse_step(const std::string& reason);

 private:
  friend class ShardedJoinHook;
  std::shared_ptr<Impl> impl_;  // the reducer's, too
};

// A rule as options of a group of libtorch's, so that its schedulers find the learning rate.
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

// An optimizer whose state and work are divided among the ranks (ZeRO, stage 1): a rank sums the
// gradients of its part over all ranks, updates it, and writes the result into the parameters of
// all of them. State is divided by the number of ranks, and so is the time of the update.
//
//   convoy::DistributedDataParallel model(Net(), world);
//   convoy::ShardedOptimizer optimizer(model.reducer(), convoy::AdamW{.lr = 3e-4});
//   torch::optim::StepLR schedule(optimizer, 30, 0.1);
//   for (...) {
//     loss(model(input), target).backward();
//     optimizer.step();
//   }
//
// It is a torch::optim::Optimizer, with a rule (RuleOptions) for each group or, as
// ShardedOptimizer<torch::optim::AdamW>, with the options of that one; schedulers and you may
// change them between steps, on all ranks alike. The result is, to the bit, that of
// OptimizerInBackward. Parameters move into memory that the ranks share, where there is such.
// Between backward() and step() `.grad` is still this rank's own. See
// docs/reference/sharded_optimizer.md. Thread-safety as for Reducer; it is of no use without its
// reducer.
template <class Opt = OptimizerRule>
class ShardedOptimizer : public ShardedOptimizerBase {
 public:
  using Options = typename detail::OptionsOf<Opt>::Type;

  // Of all parameters of the reducer. Collective. kInvalidArgument on all ranks if they differ, for
  // values without a meaning, and for parameters that are not the reducer's, are in two groups or
  // have such an optimizer already; kUnsupported for sparse ones, for those that share memory, and
  // for types that are not f32, f64 or complex.
  ShardedOptimizer(Reducer& reducer, const Options& options,
                   const ShardedOptimizerOptions& more = {})
      : ShardedOptimizer(reducer, {torch::optim::OptimizerParamGroup(reducer.parameters())},
                         options, more) {}
  // Groups with options of their own; what these do not say is as in `defaults`.
  ShardedOptimizer(Reducer& reducer, const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const Options& defaults, const ShardedOptimizerOptions& more = {})
      : ShardedOptimizerBase(reducer, groups, std::make_unique<Options>(defaults), more) {}
  // Groups with a rule each.
  ShardedOptimizer(Reducer& reducer, const std::vector<OptimizerGroup>& groups,
                   const ShardedOptimizerOptions& more = {})
    requires std::same_as<Opt, OptimizerRule>
      : ShardedOptimizerBase(reducer, detail::param_groups_of(groups),
                             std::make_unique<Options>(OptimizerRule()), more) {}
};
// Of a rule, of libtorch's options, or of groups.
template <class Rule>
ShardedOptimizer(Reducer&, const Rule&,
                 const ShardedOptimizerOptions& = {}) -> ShardedOptimizer<OptimizerRule>;

}  // namespace convoy
