#include "autograd/coordinator.h"

#include <algorithm>
#include <atomic>
#include <exception>

#include "autograd/functions.h"
#include "autograd/registry.h"
#include "base/duration.h"
#include "base/error.h"
#include "base/log.h"

namespace convoy::autograd::detail {
namespace {

using namespace std::chrono_literals;

// How long the others are waited for that hear of the end of a pass, and how long they are told.
constexpr auto kMostAbortTime = 5s;
constexpr auto kMostTellTime = 60s;
constexpr auto kLeastCommitTime = 10s;

}  // namespace

Coordinator::Coordinator(std::shared_ptr<ContextState> context, const BackwardOptions& options)
    : context_(std::move(context)),
      registry_(context_->registry()),
      fast_(options.mode == Mode::kFast),
      steps_(!options.optimizers.empty()),
      timeout_(options.timeout) {
  PassHead head = registry_.new_pass(*context_, fast_, options.retain_graph);
  head.deterministic = options.deterministic;
  head.optimizers = options.optimizers;
  if (const auto within = rpc::detail::within_clock(timeout_); within.count() != 0) {
    head.remaining = static_cast<std::uint64_t>(within.count());
  }
  id_ = head.pass;
  pass_ = std::make_shared<Pass>(context_, head);
}

template <class Ready>
void Coordinator::wait(Ready ready) {
  const auto session = registry_.session();
  const bool in_time = session->agent().wait(pass_->deadline(), [&] {
    const std::scoped_lock lock(mutex_);
    return error_.has_value() || session->agent().is_shut_down() || ready();
  });
  check();
  if (session->agent().is_shut_down()) {
    failed({static_cast<std::int32_t>(ErrorKind::kCancelled), registry_.self(), "",
            "the session was shut down"});
  } else if (!in_time) {
    failed({static_cast<std::int32_t>(ErrorKind::kTimeout), registry_.self(), "",
            concat("it has not ended within ", format_duration(timeout_), who_is_missing())});
  }
  check();
}

bool Coordinator::has_failed() const {
  const std::scoped_lock lock(mutex_);
  return error_.has_value();
}

// Ends a pass that has failed.
void Coordinator::check() {
  if (has_failed()) fail(ErrorKind::kCancelled, "autograd: the backward pass has failed");
}

void Coordinator::run(const std::vector<torch::autograd::Edge>& roots,
                      std::vector<at::Tensor> gradients) {
  // However it ends: older numbers are said to be over by the oldest that is not.
  struct End {
    Registry& registry;
    const PassId& id;
    ~End() { registry.end_pass(id); }
  };
  const End end{registry_, id_};
  registry_.add(pass_);
  registry_.add(shared_from_this());
  try {
    pass_->follow(roots);
    if (fast_) {
      pass_->follow_all_sends();
      pass_->run(roots, std::move(gradients));
    } else if (const auto others = pass_->make_plan()) {
      {
        const std::scoped_lock lock(mutex_);
        participants_ = *others;
      }
      pass_->run(roots, std::move(gradients));
    } else {
      run_after_discovery(roots, std::move(gradients));
    }
    pass_->step();
    pass_->record().waits();
    done(registry_.self(), pass_->engaged());
    wait_for_all();
  } catch (...) {
    if (!has_failed()) failed(pass_->describe(std::current_exception(), pass_->failed_in()));
  }
  const std::optional<PassError> error = [this] {
    const std::scoped_lock lock(mutex_);
    decided_ = !error_;
    return error_;
  }();
  pass_->record().ends(error ? PassRecord::End::kFailed : PassRecord::End::kWell);
  if (error) throw_failure(*error);
  commit();
}

// --- discovery ---------------------------------------------------------------------------------

// What has nothing to do with what others are asked for runs meanwhile.
void Coordinator::run_after_discovery(const std::vector<torch::autograd::Edge>& roots,
                                      std::vector<at::Tensor>&& gradients) {
  const bool early = pass_->prepare_early();
  spread(pass_->take_reached());
  if (early) pass_->run_early(roots, std::move(gradients));
  pass_->record().waits();
  wait([this] { return open_ == 0; });
  pass_->discovery_ended();
  if (early) {
    pass_->run({}, {});
  } else {
    // NOLINTNEXTLINE(bugprone-use-after-move): they went only if it has run early
    pass_->run(roots, std::move(gradients));
  }
}

void Coordinator::heard(WorkerId worker, const rpc::Future<std::vector<Ports>>& answer) noexcept {
  try {
    // Before this one is no longer open: others may be then.
    if (answer.error()) std::rethrow_exception(answer.error());
    spread(std::vector<Ports>(answer.result()));
    {
      const std::scoped_lock lock(mutex_);
      --open_;
    }
    registry_.wake();
  } catch (...) {
    PassError error = pass_->describe(std::current_exception());
    error.worker = worker;
    failed(error);
  }
}

// Asks those who sent these messages where they lead to.
void Coordinator::spread(std::vector<Ports>&& ports) {
  const WorkerId self = registry_.self();
  std::map<WorkerId, std::vector<Ports>> by_worker;
  while (!ports.empty()) {
    std::vector<Ports> own;
    for (Ports& each : ports) {
      auto& list = each.sender == self ? own : by_worker[each.sender];
      list.push_back(std::move(each));
    }
    ports = own.empty() ? std::vector<Ports>() : pass_->expand_here(own);
  }
  for (auto& [asked, list] : by_worker) {
    const WorkerId worker = asked;
    std::uint32_t batch = 0;
    {
      const std::scoped_lock lock(mutex_);
      // Those who take part may have been told of the end already; nobody else is to begin.
      if (error_) return;
      participants_.insert(worker);
      batch = ++batches_[worker];
      ++open_;
    }
    registry_.ask<expand>(
        worker, pass_->deadline(),
        [self = shared_from_this(), worker](const rpc::Future<std::vector<Ports>>& answer) {
          self->heard(worker, answer);
        },
        pass_->head(), batch, std::move(list));
  }
}

// --- ends --------------------------------------------------------------------------------------

void Coordinator::done(WorkerId worker, const std::vector<WorkerId>& engaged) {
  std::optional<PassError> error;
  {
    const std::scoped_lock lock(mutex_);
    done_.insert(worker);
    for (const WorkerId other : engaged) {
      if (other != registry_.self()) participants_.insert(other);
    }
    for (const WorkerId other : participants_) {
      const auto gone = lost_.find(other);
      if (gone == lost_.end() || done_.contains(other)) continue;
      error = PassError{static_cast<std::int32_t>(ErrorKind::kPeerLost), other, "", gone->second};
    }
  }
  if (error) return failed(*error);
  registry_.wake();
}

void Coordinator::failed(const PassError& error) {
  const bool shut_down = registry_.is_shut_down();
  {
    const std::scoped_lock lock(mutex_);
    if (error_ || decided_) return;
    error_ = error;
    // Calls may end before we hear why.
    if (shut_down) {
      error_ = PassError{static_cast<std::int32_t>(ErrorKind::kCancelled), id_.root, "",
                         "the session was shut down"};
    }
  }
  // The engine stops here, too.
  pass_->abort(error.text);
}

void Coordinator::lost(WorkerId worker, const std::string& why) {
  {
    const std::scoped_lock lock(mutex_);
    lost_.emplace(worker, why);
    if (!participants_.contains(worker) || done_.contains(worker)) return;
  }
  failed({static_cast<std::int32_t>(ErrorKind::kPeerLost), worker, "", why});
}

void Coordinator::participant_lost(WorkerId worker, const std::string& why) {
  {
    const std::scoped_lock lock(mutex_);
    participants_.insert(worker);
  }
  lost(worker, why);
}

void Coordinator::wait_for_all() {
  wait([this] {
    return done_.contains(registry_.self()) &&
           std::includes(done_.begin(), done_.end(), participants_.begin(), participants_.end());
  });
}

std::string Coordinator::who_is_missing() const {
  const std::scoped_lock lock(mutex_);
  std::string names;
  for (const WorkerId worker : participants_) {
    if (!done_.contains(worker)) {
      names += concat(names.empty() ? "" : ", ", registry_.name_of(worker));
    }
  }
  return names.empty() ? "" : concat("; it waits for ", names);
}

// In a context of its own nobody is waited for: whoever asks another worker for its gradients waits
// there until this has come (Pass::wait_for_decision()), and the context goes with its creator. One
// of another worker may outlive this one: who is told that all went well must find them everywhere.
void Coordinator::commit() {
  std::exception_ptr error;  // of memory: it is decided, and the others are told all the same
  try {
    pass_->commit();
  } catch (...) {
    error = std::current_exception();
  }
  registry_.end_pass(id_);
  const auto session = registry_.session();
  const auto least = Deadline::after(kLeastCommitTime, session->agent().now());
  const auto deadline = std::max(pass_->deadline(), least);
  const PassHead head = pass_->head();
  const auto others = [this] {
    const std::scoped_lock lock(mutex_);
    return participants_;
  }();
  const auto untold = std::make_shared<std::atomic<std::size_t>>(others.size());
  for (const WorkerId worker : others) {
    registry_.ask<detail::commit>(
        worker, deadline,
        [worker, untold, registry = registry_.shared_from_this()](const rpc::Future<void>& answer) {
          // What a lost worker had of it is lost with it.
          if (answer.error()) {
            log_info("autograd: worker ", worker, " was not told that a backward pass is over");
          }
          if (untold->fetch_sub(1) == 1) registry->wake();
        },
        head);
  }
  if (context_->creator() != registry_.self()) {
    session->agent().wait(deadline,
                          [&] { return untold->load() == 0 || session->agent().is_shut_down(); });
  }
  if (error) std::rethrow_exception(error);
}

Coordinator::Aborted Coordinator::abort_all(const std::string& why) noexcept {
  try {
    const Stepped here = pass_->abort(why).stepped;
    registry_.end_pass(id_);
    struct Answers {
      std::mutex mutex;
      std::size_t open = 0;
      std::set<WorkerId> told;
      std::set<WorkerId> heard_of;
      std::map<WorkerId, std::string> waiting;
      std::map<WorkerId, Stepped> stepped;
    };
    const auto answers = std::make_shared<Answers>();
    answers->stepped[registry_.self()] = here;
    std::set<WorkerId> lost;  // told, if they can be, but not waited for
    {
      const std::scoped_lock lock(mutex_);
      answers->heard_of = participants_;
      for (const auto& [worker, reason] : lost_) lost.insert(worker);
    }
    for (const WorkerId worker : pass_->engaged()) answers->heard_of.insert(worker);
    const auto session = registry_.session();
    const auto deadline = Deadline::after(kMostAbortTime, session->agent().now());
    const auto told_until = Deadline::after(kMostTellTime, session->agent().now());
    for (;;) {
      std::vector<WorkerId> next;
      {
        const std::scoped_lock lock(answers->mutex);
        for (const WorkerId worker : answers->heard_of) {
          if (worker != registry_.self() && answers->told.insert(worker).second) {
            next.push_back(worker);
            if (!lost.contains(worker)) ++answers->open;
          }
        }
      }
      for (const WorkerId worker : next) {
        if (lost.contains(worker)) {
          registry_.ask<abort_pass>(
              worker, told_until, [](const rpc::Future<AbortReply>&) {}, pass_->head(), why);
          continue;
        }
        registry_.ask<abort_pass>(
            worker, told_until,
            [answers, worker,
             registry = registry_.shared_from_this()](const rpc::Future<AbortReply>& answer) {
              {
                const std::scoped_lock lock(answers->mutex);
                --answers->open;
                if (!answer.error()) {
                  const AbortReply& reply = answer.result();
                  answers->heard_of.insert(reply.engaged.begin(), reply.engaged.end());
                  answers->stepped[worker] = reply.stepped;
                  if (!reply.waits_for.empty()) answers->waiting[worker] = reply.waits_for;
                }
              }
              registry->wake();
            },
            pass_->head(), why);
      }
      const bool in_time = session->agent().wait(deadline, [&] {
        const std::scoped_lock lock(answers->mutex);
        return answers->open == 0;
      });
      const std::scoped_lock lock(answers->mutex);
      const bool all =
          std::all_of(answers->heard_of.begin(), answers->heard_of.end(), [&](WorkerId worker) {
            return worker == registry_.self() || answers->told.contains(worker);
          });
      if (!in_time || (all && answers->open == 0)) {
        std::string text;
        for (const auto& [worker, waits] : answers->waiting) {
          text += concat(text.empty() ? "" : "; ", registry_.name_of(worker), " waits for ", waits);
        }
        return {text, answers->stepped};
      }
    }
  } catch (const std::exception& error) {
    log_warn("autograd: a backward pass could not be ended everywhere: ", error.what());
  }
  return {};
}

std::string Coordinator::who_stepped(const Aborted& aborted) const {
  std::set<WorkerId> all{registry_.self()};
  {
    const std::scoped_lock lock(mutex_);
    all.insert(participants_.begin(), participants_.end());
  }
  std::string stepped, not_stepped, not_known;
  for (const WorkerId worker : all) {
    const auto known = aborted.stepped.find(worker);
    const bool told = known != aborted.stepped.end() && known->second != Stepped::kIsBeing;
    std::string& list = !told                                ? not_known
                        : known->second == Stepped::kStepped ? stepped
                                                             : not_stepped;
    list += concat(list.empty() ? "" : ", ", registry_.name_of(worker));
  }
  const auto part = [](const char* title, const std::string& names) {
    return names.empty() ? names : concat("; ", title, ": ", names);
  };
  const std::string text =
      part("stepped", stepped) + part("not stepped", not_stepped) + part("not known", not_known);
  return concat(" [", text.substr(2), "]");
}

void Coordinator::throw_failure(const PassError& error) {
  const std::string name = registry_.name_of(error.worker);
  const auto kind = static_cast<ErrorKind>(error.kind);
  const Aborted aborted = abort_all(concat("Error on Node ", error.worker, ": ", error.text));
  std::string text =
      concat("autograd: backward pass ", id_.number, " of context ", context_->id(), " failed on ",
             name, ": Error on Node ", error.worker, ": ", error.text);
  if (kind == ErrorKind::kTimeout && !aborted.waiting.empty()) {
    text += concat("; ", aborted.waiting);
  }
  if (steps_) text += who_stepped(aborted);
  throw rpc::RemoteError(kind, text, name, error.type);
}

}  // namespace convoy::autograd::detail
