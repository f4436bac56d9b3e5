#include "optim/local_optimizer.h"

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "autograd/registry.h"
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

void step_in_pass(rpc::detail::SessionImpl& session,
                  const std::vector<autograd::StepId>& optimizers,
                  const autograd::Gradients& gradients, std::size_t& begun) {
  std::vector<LocalOptimizerPtr> here;
  {
    auto all = optimizers_here().lock();
    for (const autograd::StepId id : optimizers) {
      const auto found = all->find({&session, id});
      if (found == all->end()) continue;
      auto optimizer = found->second.lock();
      const bool is_new = std::find(here.begin(), here.end(), optimizer) == here.end();
      if (optimizer && is_new) here.push_back(std::move(optimizer));
    }
  }
  LocalOptimizer::step_all(here, gradients, begun);
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
    if (at::has_internal_overlap(parameter) == at::MemOverlap::Yes) {
      refuse_parameter(each.name, "several of its elements are one number in memory (expand)");
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
  if (!member.is_as_before()) {
    refuse_parameter(member.name, "it is now ", member.parameter.scalar_type(), " of sizes ",
                     member.parameter.sizes(), ": its optimizer was not made for that");
  }
  if (gradient.layout() == c10::kStrided) return {&member, &rule, member.laid_out(gradient)};
  if (gradient.layout() != c10::kSparse || !takes_sparse(rule)) {
    refuse_parameter(member.name, "its gradient is sparse, which ", describe(rule),
                     " does not take; SGD and Adagrad without weight decay do");
  }
  check_places(member, gradient);
  const bool rows = steps_rows_only(rule) && gradient.sparse_dim() == 1;
  return {&member, &rule, rows ? gradient.coalesce() : member.laid_out(gradient.to_dense())};
}

// libtorch believes the indices of a sparse tensor, and would write anywhere.
void LocalOptimizer::check_places(const Member& member, const at::Tensor& gradient) {
  const at::Tensor indices = gradient._indices();
  if (indices.numel() == 0) return;
  for (std::int64_t d = 0; d < gradient.sparse_dim(); ++d) {
    const auto least = indices[d].min().item<std::int64_t>();
    const auto most = indices[d].max().item<std::int64_t>();
    if (least >= 0 && most < gradient.size(d)) continue;
    refuse_parameter(member.name, "its sparse gradient has index ", least < 0 ? least : most,
                     " in dimension ", d, " of size ", gradient.size(d));
  }
}

std::vector<LocalOptimizer::Update> LocalOptimizer::prepare(
    const std::vector<LocalOptimizer*>& optimizers, const autograd::Gradients& gradients) {
  std::vector<Update> updates;
  try {
    for (LocalOptimizer* const optimizer : optimizers) {
      for (Member& member : optimizer->members_) {
        if (!gradients.contains(member.parameter)) continue;
        updates.push_back(optimizer->update_of(member, gradients.at(member.parameter)));
      }
    }
    for (Update& update : updates) {
      update.first = !update.member->states[0].defined();  // also if there is no memory for them
      update.member->make_states(*update.rule);
    }
  } catch (...) {
    for (const Update& update : updates) {
      if (update.first) update.member->states = {};  // as if it had never been tried
    }
    throw;
  }
  return updates;
}

void LocalOptimizer::run(const std::vector<Update>& updates, std::size_t& begun) {
  for (const auto& [member, rule, gradient, first] : updates) {
    ++begun;
    if (gradient.is_sparse()) {
      member->step_rows_made(*rule, first, gradient);
    } else {
      member->step_made(*rule, first, gradient, 1);
    }
  }
}

LocalStep LocalOptimizer::step(const autograd::Gradients& gradients, const RuleList& rules) {
  const at::NoGradGuard no_grad;
  const auto turn = turns_->take();
  take_rules(rules);
  const auto updates = prepare({this}, gradients);
  std::size_t begun = 0;
  LocalStep step{updates.size(), members_.size() - updates.size()};
  try {
    run(updates, begun);
  } catch (const std::exception& error) {
    step.stepped = begun;
    step.trouble = concat("after ", begun - 1, " of ", updates.size(), " parameters, ",
                          updates.at(begun - 1).member->name, ": ", error.what());
  }
  return step;
}

void LocalOptimizer::step_all(const std::vector<LocalOptimizerPtr>& optimizers,
                              const autograd::Gradients& gradients, std::size_t& begun) {
  const at::NoGradGuard no_grad;
  std::vector<LocalOptimizer*> all;
  std::vector<const StepTurns*> sets;
  for (const LocalOptimizerPtr& optimizer : optimizers) {
    all.push_back(optimizer.get());
    sets.push_back(optimizer->turns_.get());
  }
  const auto turns = StepTurns::take_all(sets);
  run(prepare(all, gradients), begun);
}

LocalStep LocalOptimizer::step_in(const rpc::Session& session, autograd::ContextId context,
                                  const RuleList& rules) {
  const auto gradients = [&] {
    try {
      return autograd::find(session, context).gradients();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInvalidArgument) throw;
      if (autograd::detail::Registry::of(session).was_released(context)) {
        fail(ErrorKind::kInvalidArgument, "autograd: context ", context, " has been released");
      }
      return autograd::Gradients();  // this worker has had no part in it, and so no gradients
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
      refuse_parameter(now.name, "its saved state belongs to another rule, not ",
                       describe(rules_.rules.at(now.group)));
    }
    Member next = now;
    next.steps = one.steps;
    for (std::size_t k = 0; k < kMostStates; ++k) {
      next.states[k].reset();
      if (!one.states[k].defined()) continue;
      if (one.states[k].numel() != now.parameter.numel()) {
        refuse_parameter(now.name, "its saved state has ", one.states[k].numel(), " elements, not ",
                         now.parameter.numel());
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
