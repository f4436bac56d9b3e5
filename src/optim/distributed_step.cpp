// What a distributed optimizer does at the owners of its parameters.
#include <algorithm>
#include <optional>
#include <utility>

#include "optim/distributed_optimizer_impl.h"
#include "rpc/recording.h"

namespace convoy {
namespace {

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
    return {ErrorKind::kRemote, "an exception not derived from std::exception", ""};
  }
}

std::vector<OwnerStep> DistributedOptimizer::Impl::at_owners(const std::vector<std::size_t>& which,
                                                             const char* doing, const char* done,
                                                             const AtOwner& what) {
  const rpc::detail::RecorderScope not_recorded(nullptr);
  struct Pending {
    std::optional<rpc::Future<detail::LocalStep>> future = {};
    std::exception_ptr error = nullptr;
  };
  std::vector<Pending> pending(which.size());
  for (std::size_t i = 0; i < which.size(); ++i) {
    const Owner& owner = owners_[which[i]];
    if (owner.here) continue;
    try {
      pending[i].future = what.start(owner.reference.with(call_options()), which[i]);
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
      bool halfway = false;
      try {
        if (pending[i].error) std::rethrow_exception(pending[i].error);
        const detail::LocalStep result =
            local ? what.here(*owner.here, which[i]) : pending[i].future->wait();
        what.note(step, which[i], result);
        halfway = !result.trouble.empty();
        if (halfway) fail(ErrorKind::kRemote, result.trouble);
        step.state = OwnerStep::State::kStepped;
      } catch (...) {
        OwnerFailure failure = failure_of(std::current_exception());
        // A call that was not answered may have run.
        const bool answered = local || pending[i].error || failure.kind == ErrorKind::kRemote ||
                              failure.kind == ErrorKind::kInvalidArgument;
        step.state =
            answered && !halfway ? OwnerStep::State::kNotStepped : OwnerStep::State::kUnknown;
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
  std::vector<detail::RuleList> news(owners_.size());
  std::uint64_t version = 0;
  {
    auto rules = rules_.lock();
    version = rules->list.version;
    for (std::size_t i = 0; i < owners_.size(); ++i) {
      if (rules->known[i] < version) news[i] = rules->list;
    }
  }
  return at_owners(owners_named(""), "the step", "stepped",
                   {[&](const auto& target, std::size_t i) {
                      return target.template rpc_async<&detail::LocalOptimizer::step_here>(id,
                                                                                           news[i]);
                    },
                    [&](detail::LocalOptimizer& here, std::size_t i) {
                      return here.step_in(session_, id, news[i]);
                    },
                    [&](OwnerStep& step, std::size_t i, const detail::LocalStep& result) {
                      step.stepped = result.stepped;
                      step.skipped = result.skipped;
                      if (news[i].rules.empty()) return;
                      auto rules = rules_.lock();
                      rules->known[i] = std::max(rules->known[i], version);
                    }});
}

// Rules that have changed go before the pass, which does not carry them.
autograd::StepId DistributedOptimizer::Impl::in_backward() {
  detail::RuleList news;
  std::vector<std::size_t> late;
  {
    auto rules = rules_.lock();
    for (std::size_t i = 0; i < owners_.size(); ++i) {
      if (rules->known[i] < rules->list.version) late.push_back(i);
    }
    if (late.empty()) return id_;
    news = rules->list;
  }
  at_owners(late, "setting rules", "set",
            {[&](const auto& target, std::size_t) {
               return target.template rpc_async<&detail::LocalOptimizer::set_rules>(news);
             },
             [&](detail::LocalOptimizer& here, std::size_t) { return here.set_rules(news); },
             [&](OwnerStep&, std::size_t i, const detail::LocalStep&) {
               auto rules = rules_.lock();
               rules->known[i] = std::max(rules->known[i], news.version);
             }});
  return id_;
}

}  // namespace convoy
