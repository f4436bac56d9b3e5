#include "optim/local_optimizer.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <map>
#include <set>
#include <utility>

#include "autograd/step_hook.h"
#include "base/error.h"
#include "base/guarded.h"

namespace convoy::detail {
namespace {

template <class... Text>
[[noreturn]] void refuse_parameter(const std::string& name, const Text&... text) {
  fail(ErrorKind::kInvalidArgument, name, ": ", text...);
}

// Those with which nothing happens to rows that have no gradient.
bool steps_rows_only(const OptimizerRule& rule) {
  if (const auto* const sgd = std::get_if<Sgd>(&rule)) {
    return sgd->momentum == 0 && sgd->weight_decay == 0;
  }
  const auto* const adagrad = std::get_if<Adagrad>(&rule);
  return adagrad != nullptr && adagrad->weight_decay == 0;
}
// As torch.optim has it.
bool takes_sparse(const OptimizerRule& rule) {
  const auto* const sgd = std::get_if<Sgd>(&rule);
  return (sgd != nullptr && sgd->weight_decay == 0) || steps_rows_only(rule);
}

// Those that passes may step, by session and number.
using OptimizersHere =
    std::map<std::pair<const void*, autograd::StepId>, std::weak_ptr<LocalOptimizer>>;
Guarded<OptimizersHere>& optimizers_here() {
  static auto* const all = new Guarded<OptimizersHere>();  // they may outlive main()
  return *all;
}

std::size_t step_in_pass(rpc::detail::SessionImpl& session,
                         const std::vector<autograd::StepId>& optimizers,
                         const autograd::Gradients& gradients) {
  std::size_t stepped = 0;
  for (const autograd::StepId id : optimizers) {
    const auto optimizer = [&] {
      auto all = optimizers_here().lock();
      const auto found = all->find({&session, id});
      return found == all->end() ? nullptr : found->second.lock();
    }();
    if (optimizer) stepped += optimizer->step(gradients, {}).stepped;
  }
  return stepped;
}
[[maybe_unused]] const bool kStepsInPasses = autograd::detail::set_step_hook(&step_in_pass);

}  // namespace

LocalOptimizer::LocalOptimizer(const rpc::Session& session, autograd::StepId id,
                               const std::vector<OwnedParameter>& parameters, const RuleList& rules)
    : key_(session.impl().get(), id), rules_(rules) {
  std::map<const void*, std::string> known;
  std::vector<at::Tensor> tensors;
  for (const OwnedParameter& each : parameters) {
    Member member;
    try {
      member.parameter = each.reference.local_value();
    } catch (const Error& error) {
      throw Error(error.kind(), concat(each.name, ": ", error.what()));
    }
    const at::Tensor& parameter = member.parameter;
    if (!parameter.defined()) refuse_parameter(each.name, "it is an undefined tensor");
    if (!parameter.is_leaf()) {
      refuse_parameter(each.name, "can't optimize a non-leaf Tensor: it was computed from others");
    }
    if (parameter.layout() != c10::kStrided || !parameter.device().is_cpu()) {
      refuse_parameter(each.name, "it is not a dense tensor of the CPU's");
    }
    if (!SteppedParameter::can_step(parameter)) {
      refuse_parameter(each.name, "it is of ", parameter.scalar_type(),
                       ", which is too coarse to add small steps to; keep it in f32");
    }
    const auto [other, fresh] = known.emplace(parameter.unsafeGetTensorImpl(), each.name);
    if (!fresh) refuse_parameter(each.name, "it is the same tensor as ", other->second);
    member.number = each.number;
    member.group = static_cast<std::size_t>(each.group);
    member.name = each.name;
    tensors.push_back(parameter);
    members_.push_back(std::move(member));
  }
  turns_ = std::make_unique<StepTurns>(tensors);
}

// A later session may have its address, and an optimizer of this number.
LocalOptimizer::~LocalOptimizer() {
  auto all = optimizers_here().lock();
  const auto found = all->find(key_);
  if (found != all->end() && found->second.expired()) all->erase(found);
}

void LocalOptimizer::take_rules(const RuleList& rules) {
  if (!rules.rules.empty() && rules.version > rules_.version) rules_ = rules;
}

LocalStep LocalOptimizer::set_rules(const RuleList& rules) {
  const auto turn = turns_->take();
  take_rules(rules);
  return {};
}

// Throws if the gradient is none for this parameter and rule.
LocalOptimizer::Update LocalOptimizer::update_of(Member& member, const at::Tensor& gradient) const {
  const OptimizerRule& rule = rules_.rules.at(member.group);
  if (gradient.scalar_type() != member.parameter.scalar_type() ||
      !gradient.sizes().equals(member.parameter.sizes())) {
    refuse_parameter(member.name, "its gradient is ", gradient.scalar_type(), " of sizes ",
                     gradient.sizes(), ", not ", member.parameter.scalar_type(), " of sizes ",
                     member.parameter.sizes());
  }
  if (gradient.layout() == c10::kStrided) return {&member, member.laid_out(gradient)};
  if (gradient.layout() != c10::kSparse || !takes_sparse(rule)) {
    refuse_parameter(member.name, "its gradient is sparse, which ", describe(rule),
                     " does not take; SGD and Adagrad without weight decay do");
  }
  const bool rows = steps_rows_only(rule) && gradient.sparse_dim() == 1;
  return {&member, rows ? gradient.coalesce() : member.laid_out(gradient.to_dense())};
}

std::vector<LocalOptimizer::Update> LocalOptimizer::prepare(const autograd::Gradients& gradients) {
  std::vector<Update> updates;
  updates.reserve(members_.size());
  try {
    for (Member& member : members_) {
      if (!gradients.contains(member.parameter)) continue;
      updates.push_back(update_of(member, gradients.at(member.parameter)));
    }
    for (Update& update : updates) {
      update.first = update.member->make_states(rules_.rules.at(update.member->group));
    }
  } catch (...) {
    for (const Update& update : updates) {
      if (update.first) update.member->states = {};  // as if it had never been tried
    }
    throw;
  }
  return updates;
}

LocalStep LocalOptimizer::step(const autograd::Gradients& gradients, const RuleList& rules) {
  const at::NoGradGuard no_grad;
  const auto turn = turns_->take();
  take_rules(rules);
  const auto updates = prepare(gradients);
  for (const auto& [member, gradient, first] : updates) {
    const OptimizerRule& rule = rules_.rules.at(member->group);
    if (gradient.is_sparse()) {
      member->step_rows_made(rule, first, gradient);
    } else {
      member->step_made(rule, first, gradient, 1);
    }
  }
  return {updates.size(), members_.size() - updates.size()};
}

LocalStep LocalOptimizer::step_in(const rpc::Session& session, autograd::ContextId context,
                                  const RuleList& rules) {
  const auto gradients = [&] {
    try {
      return autograd::find(session, context).gradients();
    } catch (const Error& error) {
      // This worker has had no part in it, and so no gradients.
      if (error.kind() != ErrorKind::kInvalidArgument) throw;
      return autograd::Gradients();
    }
  }();
  return step(gradients, rules);
}

LocalStep LocalOptimizer::step_here(autograd::ContextId context, const RuleList& rules) {
  return step_in(rpc::current().session(), context, rules);
}

std::vector<KeptOfParameter> LocalOptimizer::kept(Kept with) const {
  const auto turn = turns_->take();
  std::vector<KeptOfParameter> all;
  for (const Member& member : members_) {
    KeptOfParameter one;
    one.number = member.number;
    one.rule = rules_.rules.at(member.group).index();
    one.steps = member.steps;
    one.elements = static_cast<std::uint64_t>(member.parameter.numel());
    if (with == Kept::kAll) {
      for (const at::Tensor& state : member.states) {
        one.states.push_back(state.defined() ? state.clone() : at::Tensor());
      }
    }
    all.push_back(std::move(one));
  }
  return all;
}

LocalStep LocalOptimizer::load(const std::vector<KeptOfParameter>& all) {
  const auto turn = turns_->take();
  std::map<std::uint64_t, Member*> by_number;
  for (Member& member : members_) by_number.emplace(member.number, &member);
  std::vector<std::pair<Member*, Member>> loaded;
  for (const KeptOfParameter& one : all) {
    const auto found = by_number.find(one.number);
    if (found == by_number.end() || one.states.size() != kMostStates) {
      fail(ErrorKind::kInvalidArgument, "there is no parameter ", one.number, " here");
    }
    const Member& now = *found->second;
    if (one.rule != rules_.rules.at(now.group).index()) {
      refuse_parameter(now.name, "what was kept of it is another rule's, not that of ",
                       describe(rules_.rules.at(now.group)));
    }
    Member next = now;
    next.steps = one.steps;
    for (std::size_t k = 0; k < kMostStates; ++k) {
      next.states[k].reset();
      if (!one.states[k].defined()) continue;
      if (one.states[k].numel() != now.parameter.numel()) {
        refuse_parameter(now.name, "what was kept of it has ", one.states[k].numel(),
                         " elements, not ", now.parameter.numel());
      }
      next.states[k] = next.state_from(one.states[k]);
    }
    loaded.emplace_back(found->second, std::move(next));
  }
  for (auto& [member, next] : loaded) *member = std::move(next);
  return {loaded.size(), 0};
}

LocalOptimizerPtr make_optimizer_in(const rpc::Session& session, autograd::StepId id,
                                    const std::vector<OwnedParameter>& parameters,
                                    const RuleList& rules) {
  const auto made = std::make_shared<LocalOptimizer>(session, id, parameters, rules);
  (*optimizers_here().lock())[{session.impl().get(), id}] = made;
  return made;
}
LocalOptimizerPtr make_local_optimizer(autograd::StepId id,
                                       const std::vector<OwnedParameter>& parameters,
                                       const RuleList& rules) {
  return make_optimizer_in(rpc::current().session(), id, parameters, rules);
}
CONVOY_RPC(make_local_optimizer);
CONVOY_RPC(&LocalOptimizer::step_here);
CONVOY_RPC(&LocalOptimizer::set_rules);
CONVOY_RPC(&LocalOptimizer::kept);
CONVOY_RPC(&LocalOptimizer::load);

}  // namespace convoy::detail
