#include "convoy/distributed_optimizer.h"

#include <ATen/Functions.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/guarded.h"
#include "ddp/hook_state.h"
#include "optim/local_optimizer.h"
#include "optim/optimizer_rule.h"
#include "rpc/recording.h"

namespace convoy {
namespace {

using detail::KeptOfParameter;
using detail::LocalOptimizer;
using detail::LocalOptimizerPtr;
using detail::LocalStep;
using detail::OwnedParameter;
using detail::RuleList;

constexpr const char* kDistributed = "DistributedOptimizer";
constexpr const char* kRulesName = "rules";

template <class... Text>
[[noreturn]] void refuse_distributed(const Text&... text) {
  fail(ErrorKind::kInvalidArgument, kDistributed, ": ", text...);
}

// Unique in a session: the worker that makes it, and its number there.
autograd::StepId next_step_id(const rpc::Session& session) {
  static std::atomic<std::uint32_t> last{0};
  const auto worker = static_cast<std::uint32_t>(session.worker_info().rank);
  return (autograd::StepId{worker} << 32U) | ++last;
}

// What is thrown of an owner's error.
struct OwnerFailure {
  ErrorKind kind = ErrorKind::kRemote;
  std::string text;
  std::string type;
};
OwnerFailure failure_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const rpc::RemoteError& error) {
    return {error.kind(), error.what(), error.remote_type()};
  } catch (const Error& error) {
    return {error.kind(), error.what(), ""};
  } catch (const std::exception& error) {
    return {ErrorKind::kRemote, error.what(), ""};
  } catch (...) {
    return {ErrorKind::kRemote, "something that is no std::exception", ""};
  }
}

// "stepped: worker1 (2 parameters); not stepped: worker2; not known: worker3"
std::string summary_of(const std::vector<OwnerStep>& owners, const char* done) {
  const auto list = [&](OwnerStep::State state, const std::string& title) {
    std::string text;
    for (const OwnerStep& owner : owners) {
      if (owner.state != state) continue;
      text += concat(text.empty() ? title + ": " : ", ", owner.worker);
      if (state == OwnerStep::State::kStepped && owner.stepped + owner.skipped != 0) {
        text += concat(" (", owner.stepped, owner.stepped == 1 ? " parameter)" : " parameters)");
      }
    }
    return text.empty() ? text : text + "; ";
  };
  std::string text = list(OwnerStep::State::kStepped, done) +
                     list(OwnerStep::State::kNotStepped, concat("not ", done)) +
                     list(OwnerStep::State::kUnknown, "not known");
  text.resize(text.size() - std::min<std::size_t>(text.size(), 2));
  return text;
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

class DistributedOptimizer::Impl {
 public:
  Impl(const rpc::Session& session, const std::vector<DistributedGroup>& groups,
       const DistributedOptimizerOptions& options);

  std::vector<OwnerStep> step(const autograd::ContextRef& context);
  autograd::StepId in_backward();
  void change_rules(const std::function<void(std::vector<OptimizerRule>&)>& change);
  std::vector<OptimizerRule> rules() { return rules_.lock()->list.rules; }
  std::vector<std::string> owners() const;
  // Of these owners; all, if there is no name.
  void save(torch::serialize::OutputArchive& archive, const std::string& owner) const;
  void load(torch::serialize::InputArchive& archive, const std::string& owner);

 private:
  struct Owner {
    rpc::WorkerInfo worker;
    std::vector<OwnedParameter> parameters;
    LocalOptimizerPtr here;             // this worker's
    RRef<LocalOptimizerPtr> reference;  // another's
  };
  struct Rules {
    RuleList list;
    std::vector<std::uint64_t> known;  // the version that each owner has
  };

  void check(const std::vector<DistributedGroup>& groups) const;
  void make_owners(const std::vector<DistributedGroup>& groups);
  void make_optimizers();
  // To all of these owners at once: those of others first. Throws StepError with what each of them
  // did; `done` is the word for it.
  template <class Start, class Here, class Note>
  std::vector<OwnerStep> at_owners(const std::vector<std::size_t>& which, const char* doing,
                                   const char* done, Start start, Here here, Note note);
  std::vector<std::size_t> owners_named(const std::string& owner) const;
  std::vector<KeptOfParameter> kept_of(const std::string& owner, LocalOptimizer::Kept with) const;
  rpc::CallOptions call_options() const {
    rpc::CallOptions options;
    options.timeout = options_.timeout;
    options.stays = true;
    return options;
  }

  const rpc::Session session_;
  const autograd::StepId id_;
  const DistributedOptimizerOptions options_;
  std::vector<Owner> owners_;
  Guarded<Rules> rules_;
};

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
  const RuleList rules = rules_.lock()->list;
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

// --- steps -------------------------------------------------------------------------------------

template <class Start, class Here, class Note>
std::vector<OwnerStep> DistributedOptimizer::Impl::at_owners(const std::vector<std::size_t>& which,
                                                             const char* doing, const char* done,
                                                             Start start, Here here, Note note) {
  using Result = decltype(here(*owners_.front().here, 0));
  const rpc::detail::RecorderScope not_recorded(nullptr);
  struct Pending {
    std::optional<rpc::Future<Result>> future = {};
    std::exception_ptr error = nullptr;
  };
  std::vector<Pending> pending(which.size());
  for (std::size_t i = 0; i < which.size(); ++i) {
    const Owner& owner = owners_[which[i]];
    if (owner.here) continue;
    try {
      pending[i].future = start(owner.reference.with(call_options()), which[i]);
    } catch (...) {
      pending[i].error = std::current_exception();
    }
  }
  std::vector<OwnerStep> steps(which.size());
  std::optional<std::size_t> failed;
  OwnerFailure cause;
  for (const bool local : {true, false}) {
    for (std::size_t i = 0; i < which.size(); ++i) {
      const Owner& owner = owners_[which[i]];
      if ((owner.here != nullptr) != local) continue;
      OwnerStep& step = steps[i];
      step.worker = owner.worker.name;
      try {
        if (pending[i].error) std::rethrow_exception(pending[i].error);
        note(step, which[i], local ? here(*owner.here, which[i]) : pending[i].future->wait());
        step.state = OwnerStep::State::kStepped;
      } catch (...) {
        OwnerFailure failure = failure_of(std::current_exception());
        // A call that was not answered may have run.
        const bool answered = local || pending[i].error || failure.kind == ErrorKind::kRemote ||
                              failure.kind == ErrorKind::kInvalidArgument;
        step.state = answered ? OwnerStep::State::kNotStepped : OwnerStep::State::kUnknown;
        step.error = failure.text;
        if (failed && *failed < i) continue;
        failed = i;
        cause = std::move(failure);
      }
    }
  }
  if (!failed) return steps;
  const std::string& worker = steps[*failed].worker;
  const auto kind = cause.kind == ErrorKind::kInvalidArgument ? ErrorKind::kRemote : cause.kind;
  throw StepError(kind,
                  concat(kDistributed, ": ", doing, " failed on ", worker, ": ", cause.text, " [",
                         summary_of(steps, done), "]"),
                  worker, cause.type, steps);
}

std::vector<OwnerStep> DistributedOptimizer::Impl::step(const autograd::ContextRef& context) {
  if (context.session().impl() != session_.impl()) {
    refuse_distributed("context ", context.id(), " is of another session");
  }
  const autograd::ContextId id = autograd::find(session_, context.id()).id();  // is it still there?
  std::vector<RuleList> news(owners_.size());
  std::uint64_t version = 0;
  {
    auto rules = rules_.lock();
    version = rules->list.version;
    for (std::size_t i = 0; i < owners_.size(); ++i) {
      if (rules->known[i] < version) news[i] = rules->list;
    }
  }
  return at_owners(
      owners_named(""), "the step", "stepped",
      [&](const auto& target, std::size_t i) {
        return target.template rpc_async<&LocalOptimizer::step_here>(id, news[i]);
      },
      [&](LocalOptimizer& here, std::size_t i) { return here.step_in(session_, id, news[i]); },
      [&](OwnerStep& step, std::size_t i, const LocalStep& result) {
        step.stepped = result.stepped;
        step.skipped = result.skipped;
        if (news[i].rules.empty()) return;
        auto rules = rules_.lock();
        rules->known[i] = std::max(rules->known[i], version);
      });
}

// Rules that have changed go before the pass, which does not carry them.
autograd::StepId DistributedOptimizer::Impl::in_backward() {
  RuleList news;
  std::vector<std::size_t> late;
  {
    auto rules = rules_.lock();
    for (std::size_t i = 0; i < owners_.size(); ++i) {
      if (rules->known[i] < rules->list.version) late.push_back(i);
    }
    if (late.empty()) return id_;
    news = rules->list;
  }
  at_owners(
      late, "setting rules", "set",
      [&](const auto& target, std::size_t) {
        return target.template rpc_async<&LocalOptimizer::set_rules>(news);
      },
      [&](LocalOptimizer& here, std::size_t) { return here.set_rules(news); },
      [&](OwnerStep&, std::size_t i, const LocalStep&) {
        auto rules = rules_.lock();
        rules->known[i] = std::max(rules->known[i], news.version);
      });
  return id_;
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

// --- what it keeps -----------------------------------------------------------------------------

std::vector<KeptOfParameter> DistributedOptimizer::Impl::kept_of(const std::string& owner,
                                                                 LocalOptimizer::Kept with) const {
  const rpc::detail::RecorderScope not_recorded(nullptr);
  std::vector<rpc::Future<std::vector<KeptOfParameter>>> others;
  std::vector<KeptOfParameter> all;
  for (const std::size_t i : owners_named(owner)) {
    if (owners_[i].here) {
      all = owners_[i].here->kept(with);
    } else {
      others.push_back(
          owners_[i].reference.with(call_options()).rpc_async<&LocalOptimizer::kept>(with));
    }
  }
  for (auto& other : others) {
    for (const KeptOfParameter& one : other.wait()) all.push_back(one);
  }
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return a.number < b.number; });
  return all;
}

void DistributedOptimizer::Impl::save(torch::serialize::OutputArchive& archive,
                                      const std::string& owner) const {
  ByParameter steps, rules;
  std::array<ByParameter, kMostStates> states;
  for (const KeptOfParameter& one : kept_of(owner, LocalOptimizer::Kept::kAll)) {
    const auto number = static_cast<std::size_t>(one.number);
    steps[number] = at::full({1}, one.steps, at::kLong);
    rules[number] = at::full({1}, static_cast<std::int64_t>(one.rule), at::kLong);
    for (std::size_t k = 0; k < kMostStates; ++k) {
      if (one.states.at(k).defined()) states[k][number] = one.states[k];
    }
  }
  write_state(archive, kCountsName, steps);
  write_state(archive, kRulesName, rules);
  for (std::size_t k = 0; k < kMostStates; ++k) write_state(archive, kStateNames[k], states[k]);
}

void DistributedOptimizer::Impl::load(torch::serialize::InputArchive& archive,
                                      const std::string& owner) {
  const auto steps = read_state(archive, kCountsName);
  const auto rules = read_state(archive, kRulesName);
  std::array<ByParameter, kMostStates> states;
  for (std::size_t k = 0; k < kMostStates; ++k) states[k] = read_state(archive, kStateNames[k]);
  // Compared here, so that an archive of something else changes nothing anywhere.
  std::map<std::uint64_t, KeptOfParameter> loaded;
  for (KeptOfParameter& one : kept_of(owner, LocalOptimizer::Kept::kShapes)) {
    const auto number = static_cast<std::size_t>(one.number);
    const auto count = steps.find(number), rule = rules.find(number);
    if (count == steps.end() || rule == rules.end()) {
      refuse_distributed("the archive has no parameter ", number);
    }
    if (rule->second.item<std::int64_t>() != static_cast<std::int64_t>(one.rule)) {
      refuse_distributed("the archive has parameter ", number, " with another rule");
    }
    one.steps = count->second.item<std::int64_t>();
    one.states.resize(kMostStates);
    for (std::size_t k = 0; k < kMostStates; ++k) {
      const auto found = states[k].find(number);
      if (found == states[k].end()) continue;
      check_state(found->second, static_cast<std::int64_t>(one.elements), number, kDistributed);
      one.states[k] = found->second;
    }
    loaded.emplace(one.number, std::move(one));
  }
  if (owner.empty() && steps.size() != loaded.size()) {
    refuse_distributed("the archive has ", steps.size(), " parameters, not ", loaded.size());
  }
  const auto part_of = [&](std::size_t i) {
    std::vector<KeptOfParameter> part;
    for (const OwnedParameter& parameter : owners_[i].parameters) {
      part.push_back(loaded.at(parameter.number));
    }
    return part;
  };
  at_owners(
      owners_named(owner), "load", "loaded",
      [&](const auto& target, std::size_t i) {
        return target.template rpc_async<&LocalOptimizer::load>(part_of(i));
      },
      [&](LocalOptimizer& here, std::size_t i) { return here.load(part_of(i)); },
      [](OwnerStep& step, std::size_t, const LocalStep& result) { step.stepped = result.stepped; });
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
                         describe(rule), ": what it keeps would mean something else");
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
