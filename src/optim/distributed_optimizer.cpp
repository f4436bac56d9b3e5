#include "convoy/distributed_optimizer.h"

#include <atomic>
#include <map>
#include <optional>
#include <utility>

#include "optim/distributed_optimizer_impl.h"
#include "optim/optimizer_rule.h"
#include "rpc/recording.h"

namespace convoy {
namespace {

// Unique in a session: the worker that makes it, and its number there.
autograd::StepId next_step_id(const rpc::Session& session) {
  static std::atomic<std::uint32_t> last{0};
  const auto worker = static_cast<std::uint32_t>(session.worker_info().rank);
  return (autograd::StepId{worker} << 32U) | ++last;
}

}  // namespace

DistributedGroup DistributedGroup::named(const std::map<std::string, RRef<at::Tensor>>& parameters,
                                         const OptimizerRule& rule) {
  DistributedGroup group{{}, rule, {}};
  for (const auto& [name, parameter] : parameters) {
    group.parameters.push_back(parameter);
    group.names.push_back(name);
  }
  return group;
}

StepError::StepError(ErrorKind kind, const std::string& message, std::string worker,
                     std::string remote_type, std::vector<OwnerStep> owners)
    : RemoteError(kind, message, std::move(worker), std::move(remote_type)),
      owners_(std::move(owners)) {}
StepError::~StepError() = default;

// --- construction ------------------------------------------------------------------------------

DistributedOptimizer::Impl::Impl(const rpc::Session& session,
                                 const std::vector<DistributedGroup>& groups,
                                 const DistributedOptimizerOptions& options)
    : session_(session), id_(next_step_id(session)), options_(options) {
  check(groups);
  make_owners(groups);
  {
    auto rules = rules_.lock();
    rules->list.version = 1;
    for (const DistributedGroup& group : groups) rules->list.rules.push_back(group.rule);
    rules->known.assign(owners_.size(), 1);
  }
  make_optimizers();
}

void DistributedOptimizer::Impl::check(const std::vector<DistributedGroup>& groups) const {
  std::size_t count = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const DistributedGroup& group = groups[g];
    check_rule(kDistributed, group.rule);
    if (!group.names.empty() && group.names.size() != group.parameters.size()) {
      refuse_distributed("group ", g, " has ", group.parameters.size(), " parameters, but ",
                         group.names.size(), " names");
    }
    for (const auto& parameter : group.parameters) {
      if (!parameter) refuse_distributed("parameter ", count, " is an empty reference");
      ++count;
    }
  }
  if (count == 0) refuse_distributed("optimizer got an empty parameter list");
  if (const auto left = options_.timeout.left(); left && left->count() < 0) {
    refuse_distributed("timeout must be >= 0 ms, got ",
                       std::chrono::duration_cast<std::chrono::milliseconds>(*left).count());
  }
}

void DistributedOptimizer::Impl::make_owners(const std::vector<DistributedGroup>& groups) {
  std::map<int, std::size_t> by_rank;
  std::uint64_t number = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].parameters.size(); ++i) {
      const auto& parameter = groups[g].parameters[i];
      const auto worker = parameter.owner();
      const auto [place, fresh] = by_rank.emplace(worker.rank, owners_.size());
      if (fresh) owners_.push_back({worker, {}, nullptr, {}});
      const std::string name =
          groups[g].names.empty() ? concat("parameter ", number) : groups[g].names[i];
      owners_[place->second].parameters.push_back({parameter, number++, g, name});
    }
  }
}

void DistributedOptimizer::Impl::make_optimizers() {
  const rpc::detail::RecorderScope not_recorded(nullptr);
  const detail::RuleList rules = rules_.lock()->list;
  const auto self = session_.worker_info();
  std::vector<rpc::Future<void>> made;
  for (Owner& owner : owners_) {
    if (owner.worker == self) continue;
    owner.reference = session_.to(owner.worker, call_options())
                          .remote<detail::make_local_optimizer>(id_, owner.parameters, rules);
    made.push_back(owner.reference.created());
  }
  // Everybody is waited for: an error says all that there is to say.
  std::optional<OwnerFailure> first;
  std::string where, text;
  std::size_t next = 0;
  for (Owner& owner : owners_) {
    try {
      if (owner.worker == self) {
        owner.here = detail::make_optimizer_in(session_, id_, owner.parameters, rules);
      } else {
        made[next++].wait();
      }
    } catch (...) {
      OwnerFailure failure = failure_of(std::current_exception());
      text += concat(text.empty() ? "" : "; ", "on ", owner.worker.name, ": ", failure.text);
      if (first) continue;
      where = owner.worker.name;
      first = std::move(failure);
    }
  }
  if (!first) return;
  const bool local = where == self.name && first->kind == ErrorKind::kInvalidArgument;
  throw rpc::RemoteError(local ? ErrorKind::kRemote : first->kind,
                         concat(kDistributed, ": it could not be made ", text), where, first->type);
}

void DistributedOptimizer::Impl::change_rules(
    const std::function<void(std::vector<OptimizerRule>&)>& change) {
  auto rules = rules_.lock();
  std::vector<OptimizerRule> changed = rules->list.rules;
  change(changed);
  for (const OptimizerRule& rule : changed) check_rule(kDistributed, rule);
  rules->list.rules = std::move(changed);
  ++rules->list.version;
}

std::vector<std::string> DistributedOptimizer::Impl::owners() const {
  std::vector<std::string> names;
  for (const Owner& owner : owners_) names.push_back(owner.worker.name);
  return names;
}

std::vector<std::size_t> DistributedOptimizer::Impl::owners_named(const std::string& name) const {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < owners_.size(); ++i) {
    if (name.empty() || owners_[i].worker.name == name) found.push_back(i);
  }
  if (found.empty()) refuse_distributed(name, " has none of its parameters");
  return found;
}

// --- the public class --------------------------------------------------------------------------

DistributedOptimizer::DistributedOptimizer(const rpc::Session& session,
                                           std::vector<RRef<at::Tensor>> parameters,
                                           const OptimizerRule& rule,
                                           const DistributedOptimizerOptions& options)
    : DistributedOptimizer(session, {DistributedGroup{std::move(parameters), rule, {}}}, options) {}

DistributedOptimizer::DistributedOptimizer(const rpc::Session& session,
                                           const std::vector<DistributedGroup>& groups,
                                           const DistributedOptimizerOptions& options)
    : impl_(std::make_shared<Impl>(session, groups, options)) {}

std::vector<OwnerStep> DistributedOptimizer::step(const autograd::ContextRef& context) const {
  return impl_->step(context);
}

autograd::StepId DistributedOptimizer::in_backward() const { return impl_->in_backward(); }

void DistributedOptimizer::set_lr(double lr) const {
  impl_->change_rules([&](std::vector<OptimizerRule>& rules) {
    for (OptimizerRule& rule : rules) std::visit([&](auto& one) { one.lr = lr; }, rule);
  });
}

void DistributedOptimizer::set_lr(std::size_t group, double lr) const {
  OptimizerRule changed = rule(group);
  std::visit([&](auto& one) { one.lr = lr; }, changed);
  set_rule(group, changed);
}

void DistributedOptimizer::set_rule(std::size_t group, const OptimizerRule& rule) const {
  impl_->change_rules([&](std::vector<OptimizerRule>& rules) {
    if (group >= rules.size()) refuse_distributed("there is no group ", group);
    if (rules[group].index() != rule.index()) {
      refuse_distributed("group ", group, " cannot change from ", describe(rules[group]), " to ",
                         describe(rule), ": its state belongs to the old rule");
    }
    rules[group] = rule;
  });
}

OptimizerRule DistributedOptimizer::rule(std::size_t group) const {
  const auto rules = impl_->rules();
  if (group >= rules.size()) refuse_distributed("there is no group ", group);
  return rules[group];
}

std::size_t DistributedOptimizer::groups() const { return impl_->rules().size(); }
std::vector<std::string> DistributedOptimizer::owners() const { return impl_->owners(); }

void DistributedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  impl_->save(archive, "");
}
void DistributedOptimizer::load(torch::serialize::InputArchive& archive) const {
  impl_->load(archive, "");
}
void DistributedOptimizer::save(torch::serialize::OutputArchive& archive,
                                const std::string& owner) const {
  impl_->save(archive, owner);
}
void DistributedOptimizer::load(torch::serialize::InputArchive& archive,
                                const std::string& owner) const {
  impl_->load(archive, owner);
}

}  // namespace convoy
