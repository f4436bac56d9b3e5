#include "autograd/pass.h"

#include <algorithm>
#include <exception>

#include "autograd/functions.h"
#include "autograd/registry.h"
#include "base/error.h"

namespace convoy::autograd::detail {
namespace {

namespace ag = torch::autograd;

// Questions of one pass to one worker.
constexpr std::uint32_t kMostBatches = std::uint32_t{1} << 20;

// How long whoever wants gradients waits at least for the root of a pass that is over here.
constexpr std::chrono::seconds kLeastDecisionTime(10);

// By the clock of this worker's endpoint.
Deadline deadline_after(const Registry& registry, std::uint64_t remaining) {
  if (remaining == kNoLimit) return Deadline::never();
  const auto most = static_cast<std::uint64_t>(INT64_MAX);
  return Deadline::after(std::chrono::nanoseconds(std::min(remaining, most)),
                         registry.session()->agent().now());
}

}  // namespace

Pass::Pass(std::shared_ptr<ContextState> context, const PassHead& head)
    : context_(std::move(context)),
      registry_(context_->registry()),
      told_(head),
      deadline_(deadline_after(registry_, head.remaining)),
      walk_(own_received_nodes(), context_->origin()),
      plan_{.made = head.planned} {}

PassHead Pass::head() const {
  PassHead head = told_;
  head.remaining = kNoLimit;
  {
    const std::scoped_lock lock(mutex_);
    head.planned = plan_.made;
  }
  if (!deadline_.is_never()) {
    const auto left = deadline_.when() - registry_.session()->agent().now();
    head.remaining = static_cast<std::uint64_t>(std::max<std::int64_t>(left.count(), 1));
  }
  return head;
}

// --- discovery ---------------------------------------------------------------------------------

void Pass::follow(const std::vector<ag::Edge>& roots) {
  const std::scoped_lock lock(mutex_);
  walk_.follow(roots);
}

void Pass::follow_all_sends() {
  const auto all = context_->all_sent();
  const std::scoped_lock lock(mutex_);
  for (const auto& sent : all) walk_.follow_all(sent);
}

std::shared_ptr<const SentMessage> Pass::sent(std::uint64_t message) const {
  auto found = context_->sent(message);
  if (!found) {
    fail(ErrorKind::kInvalidArgument, "autograd: ", registry_.name_of(registry_.self()),
         " has sent no message ", message, " in context ", context_->id());
  }
  return found;
}

std::vector<Ports> Pass::expand_locked(const std::vector<Ports>& ports) {
  if (state_ != State::kDiscovery || plan_.made || aborted()) {
    fail(ErrorKind::kInvalidArgument, "autograd: discovery of this backward pass is over");
  }
  for (const Ports& each : ports) walk_.follow(sent(each.message), each.tensors);
  return walk_.take_reached();
}

std::vector<Ports> Pass::expand_here(const std::vector<Ports>& ports) {
  const std::scoped_lock lock(mutex_);
  return expand_locked(ports);
}

std::vector<Ports> Pass::expand(std::uint32_t batch, const std::vector<Ports>& ports) {
  const std::scoped_lock lock(mutex_);
  const auto known = answers_.find(batch);
  if (known != answers_.end()) return known->second;
  if (batch > kMostBatches) {
    fail(ErrorKind::kInvalidArgument,
         "autograd: malformed question of a backward pass: it is number ", batch);
  }
  return answers_.emplace(batch, expand_locked(ports)).first->second;
}

std::vector<Ports> Pass::take_reached() {
  const std::scoped_lock lock(mutex_);
  return walk_.take_reached();
}

std::optional<std::set<WorkerId>> Pass::make_plan() {
  const WorkerId self = registry_.self();
  const std::scoped_lock lock(mutex_);
  auto plan = walk_.plan(self);
  if (!plan) return std::nullopt;
  const auto own = plan->find(self);
  if (own != plan->end()) {
    for (const PlannedSend& each : own->second.sends) {
      const auto sent = context_->sent(each.message);
      if (!sent) return std::nullopt;
      walk_.follow(sent, each.tensors);
    }
    // Otherwise somebody has said something else than there is: discovery finds out what.
    if (walk_.ports() != own->second.ports) return std::nullopt;
    plan->erase(own);
  }
  std::set<WorkerId> others;
  for (const auto& [worker, part] : *plan) {
    if (part.sends.empty()) return std::nullopt;
    others.insert(worker);
  }
  static_cast<void>(walk_.take_reached());
  plan_.unsent = std::move(*plan);
  plan_.made = true;
  return others;
}

void Pass::follow_plan(const PlanPart& part) {
  bool starts = false;
  {
    const std::scoped_lock lock(mutex_);
    if (plan_.followed || aborted() || state_ != State::kDiscovery) return;
    for (const PlannedSend& each : part.sends) walk_.follow(sent(each.message), each.tensors);
    if (!plan_.made || walk_.ports() != part.ports) {
      fail(ErrorKind::kInvalidArgument,
           "autograd: what messages said of those before them does not fit this backward pass: ",
           part.ports, " tensors of messages that came, but ", walk_.ports(), " are used");
    }
    for (const Gradient& each : arrived_) require_expected(each);
    plan_.followed = true;
    starts = !arrived_.empty();
    if (starts) state_ = State::kRunning;
  }
  if (starts) start();
}

void Pass::send_plans(bool all) {
  std::vector<std::pair<WorkerId, PlanPart>> parts;
  {
    const std::scoped_lock lock(mutex_);
    for (auto each = plan_.unsent.begin(); each != plan_.unsent.end();) {
      const bool goes = all || !each->second.from_root;
      if (goes) parts.emplace_back(each->first, std::move(each->second));
      each = goes ? plan_.unsent.erase(each) : std::next(each);
    }
  }
  for (auto& [worker, part] : parts) {
    registry_.ask<take_plan>(
        worker, deadline_,
        [self = shared_from_this(), to = worker](const rpc::Future<void>& answer) {
          if (!answer.error() || self->aborted()) return;
          PassError error = self->describe(answer.error());
          error.worker = to;
          self->tell_root(error);
        },
        head(), std::move(part));
  }
}

// --- the end -----------------------------------------------------------------------------------

void Pass::commit() {
  std::exception_ptr error;
  {
    const std::scoped_lock lock(mutex_);
    if (state_ == State::kCommitted || aborted()) return;
    if (state_ != State::kDone) {
      fail(ErrorKind::kInternal, "autograd: a backward pass that has not run is to be committed");
    }
    try {
      auto computed = std::exchange(computed_, {});
      context_->add(std::move(computed.by_leaf));
      for (auto& [reducer, now] : computed.reduced) context_->replace(reducer, std::move(now));
    } catch (...) {
      error = std::current_exception();
    }
    state_ = State::kCommitted;  // it is decided, whatever became of it: nobody waits any more
  }
  registry_.wake();
  if (error) std::rethrow_exception(error);
}

void Pass::wait_for_decision() const {
  const auto session = registry_.session();
  const auto decided = [this] {
    const std::scoped_lock lock(mutex_);
    return state_ != State::kDone || aborted();
  };
  const auto least = Deadline::after(kLeastDecisionTime, session->agent().now());
  const bool in_time = session->agent().wait(
      std::max(deadline_, least), [&] { return decided() || session->agent().is_shut_down(); });
  if (decided()) return;
  if (in_time) fail(ErrorKind::kCancelled, "autograd: the session was shut down");
  fail(ErrorKind::kTimeout, "autograd: ", registry_.name_of(told_.pass.root),
       " has not said whether backward pass ", told_.pass.number, " went well");
}

AbortReply Pass::abort(const std::string& why) {
  AbortReply reply;
  {
    const std::scoped_lock lock(mutex_);
    reply.engaged.assign(engaged_.begin(), engaged_.end());
    reply.stepped = stepped_;
    if (state_ == State::kRunning && arrived_.empty()) reply.waits_for = waits_for_locked();
    if (aborted()) return reply;
    why_ = why;
    aborted_.store(true);
    if (state_ != State::kRunning) record_.ends(PassRecord::End::kFailed);
  }
  registry_.wake();
  return reply;
}

std::vector<WorkerId> Pass::engaged() const {
  const std::scoped_lock lock(mutex_);
  return {engaged_.begin(), engaged_.end()};
}

bool Pass::has_engaged(WorkerId worker) const {
  const std::scoped_lock lock(mutex_);
  return engaged_.contains(worker);
}

}  // namespace convoy::autograd::detail
