#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "convoy/autograd.h"
#include "convoy/fields.h"
#include "convoy/optimizer_rules.h"
#include "convoy/rref.h"
#include "optim/step_turns.h"
#include "optim/stepped_parameter.h"

namespace convoy {

// Rules travel as their values.
inline auto fields(Sgd& r) {
  return std::tie(r.lr, r.momentum, r.dampening, r.weight_decay, r.nesterov, r.maximize);
}
inline auto fields(Adam& r) {
  return std::tie(r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, r.amsgrad, r.maximize);
}
inline auto fields(AdamW& r) {
  return std::tie(r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, r.amsgrad, r.maximize);
}
inline auto fields(Adagrad& r) {
  return std::tie(r.lr, r.lr_decay, r.weight_decay, r.initial_accumulator_value, r.eps, r.maximize);
}
inline auto fields(RmsProp& r) {
  return std::tie(r.lr, r.alpha, r.eps, r.weight_decay, r.momentum, r.centered, r.maximize);
}
inline auto fields(Adadelta& r) { return std::tie(r.lr, r.rho, r.eps, r.weight_decay, r.maximize); }
inline auto fields(Adamax& r) {
  return std::tie(r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, r.maximize);
}
inline auto fields(Rprop& r) {
  return std::tie(r.lr, r.eta_minus, r.eta_plus, r.step_min, r.step_max, r.maximize);
}
inline auto fields(OptimizerRule& r) { return std::tie(static_cast<detail::RuleVariant&>(r)); }

namespace detail {

// A parameter, as its owner is told of it.
struct OwnedParameter {
  RRef<at::Tensor> reference;
  std::uint64_t number = 0;  // in the whole optimizer
  std::uint64_t group = 0;
  std::string name;  // "parameter 3", "fc.weight"
  CONVOY_FIELDS(reference, number, group, name)
};

// By group; the newest counts.
struct RuleList {
  std::uint64_t version = 0;
  std::vector<OptimizerRule> rules;  // empty: as they are
  CONVOY_FIELDS(version, rules)
};

struct LocalStep {
  std::uint64_t stepped = 0, skipped = 0;  // parameters
  // What ended it in the middle: `stepped` are those that it began with.
  std::string trouble = {};
  CONVOY_FIELDS(stepped, skipped, trouble)
};

// What an optimizer keeps of one parameter.
struct KeptOfParameter {
  std::uint64_t number = 0;
  std::uint64_t rule = 0;  // OptimizerRule::index()
  std::int64_t steps = 0;
  std::uint64_t elements = 0;
  std::vector<at::Tensor> states;  // kMostStates; undefined where it keeps none
  CONVOY_FIELDS(number, rule, steps, elements, states)
};

// A DistributedOptimizer's part at one owner. Errors name the parameter; the caller adds the
// worker. Thread-safe.
class LocalOptimizer {
 public:
  // Waits until the parameters were made.
  LocalOptimizer(const rpc::Session& session, autograd::StepId id,
                 const std::vector<OwnedParameter>& parameters, const RuleList& rules);
  LocalOptimizer(const LocalOptimizer&) = delete;
  LocalOptimizer& operator=(const LocalOptimizer&) = delete;
  ~LocalOptimizer();

  // All parameters that have a gradient, or none and an exception.
  LocalStep step(const autograd::Gradients& gradients, const RuleList& rules);
  // The same of several optimizers: all of them, or none. Counts in `begun` what it begins with,
  // also if an exception then ends it in the middle.
  static void step_all(const std::vector<std::shared_ptr<LocalOptimizer>>& optimizers,
                       const autograd::Gradients& gradients, std::size_t& begun);
  LocalStep step_in(const rpc::Session& session, autograd::ContextId context,
                    const RuleList& rules);

  // For calls.
  LocalStep step_here(autograd::ContextId context, const RuleList& rules);
  LocalStep set_rules(const RuleList& rules);  // of nothing
  // `with` kShapes: without the states' values.
  enum class Kept { kShapes, kAll };
  std::vector<KeptOfParameter> kept(Kept with) const;
  // How many parameters. All or none.
  LocalStep load(const std::vector<KeptOfParameter>& all);

 private:
  struct Member : SteppedParameter {
    std::uint64_t number = 0;
    std::string name;
  };
  struct Update {
    Member* member;
    const OptimizerRule* rule;
    at::Tensor gradient;
    bool first = false;
  };

  void take_rules(const RuleList& rules);
  // All that can fail, but for memory. Changes nothing, if it throws.
  static std::vector<Update> prepare(const std::vector<LocalOptimizer*>& optimizers,
                                     const autograd::Gradients& gradients);
  static void run(const std::vector<Update>& updates, std::size_t& begun);
  Update update_of(Member& member, const at::Tensor& gradient) const;
  static void check_places(const Member& member, const at::Tensor& gradient);

  const std::pair<const void*, autograd::StepId> key_;  // of its session, in passes
  std::vector<Member> members_;
  RuleList rules_;
  std::unique_ptr<StepTurns> turns_;  // whose holder has members_ and rules_
};

using LocalOptimizerPtr = std::shared_ptr<LocalOptimizer>;
LocalOptimizerPtr make_optimizer_in(const rpc::Session& session, autograd::StepId id,
                                    const std::vector<OwnedParameter>& parameters,
                                    const RuleList& rules);
// For calls.
LocalOptimizerPtr make_local_optimizer(autograd::StepId id,
                                       const std::vector<OwnedParameter>& parameters,
                                       const RuleList& rules);

}  // namespace detail
}  // namespace convoy
