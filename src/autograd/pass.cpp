#include "autograd/pass.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <cxxabi.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cstdlib>

#include "autograd/coordinator.h"
#include "autograd/functions.h"
#include "autograd/nodes.h"
#include "autograd/registry.h"
#include "autograd/step_hook.h"
#include "base/error.h"
#include "base/log.h"

namespace convoy::autograd::detail {
namespace {

namespace ag = torch::autograd;

// What a worker has for the root goes with its end, if that is near: it is small, few nodes are
// left, and all before took little time. Otherwise at once.
constexpr std::size_t kMostHeldBack = 16384;  // bytes
constexpr std::size_t kMostNodesLeft = 5;     // with the one that sends
constexpr std::chrono::microseconds kMostHeldTime(50);

// Questions of one pass to one worker.
constexpr std::uint32_t kMostBatches = std::uint32_t{1} << 20;

// Calls of the root with more than this are answered at once: they do not stay open.
constexpr std::size_t kMostOpen = std::size_t{1} << 20;  // bytes

// Parameters of more than this are stepped after the gradients have gone.
constexpr std::size_t kMostSteppedFirst = std::size_t{1} << 18;  // bytes

// How long the end of a step is waited for that is under way when its pass is aborted.
constexpr std::chrono::seconds kMostStepTime(2);

// How long whoever wants gradients waits at least for the root of a pass that is over here.
constexpr std::chrono::seconds kLeastDecisionTime(10);

// By the clock of this worker's endpoint.
Deadline deadline_after(const Registry& registry, std::uint64_t remaining) {
  if (remaining == kNoLimit) return Deadline::never();
  const auto most = static_cast<std::uint64_t>(INT64_MAX);
  return Deadline::after(std::chrono::nanoseconds(std::min(remaining, most)),
                         registry.session()->agent().now());
}

// Of a sparse one: about.
std::size_t bytes_of(const at::Tensor& gradient) {
  if (!gradient.defined()) return 0;
  if (gradient.layout() == c10::kStrided) return gradient.nbytes();
  return gradient.is_sparse() ? gradient._values().nbytes() + gradient._indices().nbytes() : 0;
}
std::size_t bytes_of(const std::vector<at::Tensor>& gradients) {
  std::size_t bytes = 0;
  for (const at::Tensor& gradient : gradients) bytes += bytes_of(gradient);
  return bytes;
}

// Of models whose gradients are reduced.
bool has_sinks(const Walk& walk) {
  return has_reducers() &&
         std::any_of(walk.nodes().begin(), walk.nodes().end(), [](const ag::Node* node) {
           return dynamic_cast<const Sink*>(node) != nullptr;
         });
}

std::string type_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
  return text ? text.get() : type.name();
}

}  // namespace

Pass::Pass(std::shared_ptr<ContextState> context, const PassHead& head)
    : context_(std::move(context)),
      registry_(context_->registry()),
      id_(head.pass),
      floor_(head.floor),
      fast_(head.fast),
      retain_(head.retain),
      deterministic_(head.deterministic),
      optimizers_(head.optimizers),
      deadline_(deadline_after(registry_, head.remaining)),
      planned_(head.planned) {}

PassHead Pass::head() const {
  PassHead head{id_,   floor_,   context_->id(), fast_, retain_, deterministic_,
                false, kNoLimit, optimizers_};
  {
    const std::scoped_lock lock(mutex_);
    head.planned = planned_;
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
  if (state_ != State::kDiscovery || planned_ || aborted()) {
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
  parts_ = std::move(*plan);
  planned_ = true;
  return others;
}

void Pass::follow_plan(const PlanPart& part) {
  bool starts = false;
  {
    const std::scoped_lock lock(mutex_);
    if (followed_plan_ || aborted() || state_ != State::kDiscovery) return;
    for (const PlannedSend& each : part.sends) walk_.follow(sent(each.message), each.tensors);
    if (!planned_ || walk_.ports() != part.ports) {
      fail(ErrorKind::kInvalidArgument,
           "autograd: what messages said of those before them does not fit this backward pass: ",
           part.ports, " tensors of messages that came, but ", walk_.ports(), " are used");
    }
    for (const Gradient& each : arrived_) require_expected(each);
    followed_plan_ = true;
    starts = !arrived_.empty();
    if (starts) state_ = State::kRunning;
  }
  if (starts) start();
}

void Pass::send_plans(bool all) {
  std::vector<std::pair<WorkerId, PlanPart>> parts;
  {
    const std::scoped_lock lock(mutex_);
    for (auto each = parts_.begin(); each != parts_.end();) {
      const bool goes = all || !each->second.from_root;
      if (goes) parts.emplace_back(each->first, std::move(each->second));
      each = goes ? parts_.erase(each) : std::next(each);
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

// --- execution ---------------------------------------------------------------------------------

void Pass::require_expected(const Gradient& gradient) const {
  const auto send = walk_.sends().find(gradient.message);
  if (send != walk_.sends().end() && send->second.tensors.size() == gradient.tensors.size()) return;
  fail(ErrorKind::kInvalidArgument, "autograd: message ", gradient.message, " of context ",
       context_->id(), " expects no such gradients in this backward pass");
}

void Pass::deliver(std::uint64_t message, const std::vector<at::Tensor>& gradients) {
  bool starts = false;
  {
    const std::scoped_lock lock(mutex_);
    if (aborted() || state_ >= State::kDone || came_.contains(message)) return;
    if (fast_ && state_ == State::kDiscovery) {
      for (const auto& sent : context_->all_sent()) walk_.follow_all(sent);
    }
    Gradient gradient{message, gradients};
    // It is looked at when the part has come that it belongs to.
    const bool too_early = planned_ && state_ == State::kDiscovery && !followed_plan_;
    if (!too_early) require_expected(gradient);
    came_.insert(message);
    arrived_.push_back(std::move(gradient));
    starts = state_ == State::kDiscovery && !too_early;
    if (starts) state_ = State::kRunning;
  }
  if (starts) return start();
  registry_.wake();
}

// What is short runs on the thread that has taken the gradient, after its handler.
void Pass::start() {
  try {
    auto run = [self = shared_from_this()] { self->run_for_root(); };
    agent::Agent& agent = registry_.session()->agent();
    if (registry_.runs_are_short()) {
      agent.run_after_handler(std::move(run));
    } else {
      agent.post(std::move(run));
    }
  } catch (const std::exception& error) {
    // Whoever sent the gradient hears of it, and tells the root.
    abort(concat("it could not be run: ", error.what()));
    answer_all();
    throw;
  }
}

Pass::Arrived Pass::next_gradient(std::uint64_t message) {
  const auto session = registry_.session();
  const auto find = [&] {
    return message == 0 ? arrived_.begin()
                        : std::find_if(arrived_.begin(), arrived_.end(), [&](const Gradient& each) {
                            return each.message == message;
                          });
  };
  const auto ready = [&] {
    const std::scoped_lock lock(mutex_);
    return find() != arrived_.end() || aborted() || session->agent().is_shut_down();
  };
  bool in_time = ready();
  if (!in_time) {
    send_plans(true);
    if (!for_root_.empty()) flush(false);
    answer_most();
    in_time = session->agent().wait(deadline_, ready);
  }
  const std::scoped_lock lock(mutex_);
  if (aborted()) fail(ErrorKind::kCancelled, "autograd: the backward pass was aborted: ", why_);
  if (session->agent().is_shut_down()) {
    fail(ErrorKind::kCancelled, "autograd: the session was shut down");
  }
  if (!in_time) {
    fail(ErrorKind::kTimeout,
         "the backward pass has not ended by its deadline: ", registry_.name_of(registry_.self()),
         " waits for ", waits_for_locked());
  }
  const auto found = find();
  Gradient gradient = std::move(*found);
  arrived_.erase(found);
  return {&walk_.sends().at(gradient.message), std::move(gradient.tensors)};
}

void Pass::send_back(const Received& received, std::vector<at::Tensor>&& gradients) {
  if (discovering_) {
    early_.emplace_back(received, std::move(gradients));
    return;
  }
  const WorkerId to = received.sender;
  if (to == registry_.self()) return deliver(received.message, gradients);
  {
    const std::scoped_lock lock(mutex_);
    engaged_.insert(to);
  }
  if (to != id_.root || bytes_of(gradients) > kMostHeldBack) {
    return send(to, received.message, gradients);
  }
  for_root_.push_back({received.message, std::move(gradients)});
  if (nodes_left_ > kMostNodesLeft || std::chrono::steady_clock::now() - began_ > kMostHeldTime) {
    flush(false);
  }
}

void Pass::send(WorkerId to, std::uint64_t message, const std::vector<at::Tensor>& gradients) {
  PlanPart part;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = parts_.find(to);
    if (found != parts_.end()) {
      part = std::move(found->second);
      parts_.erase(found);
    }
  }
  registry_.ask<take_gradient>(
      to, deadline_,
      [self = shared_from_this(), to](const rpc::Future<GradientReply>& answer) {
        if (!answer.error()) return self->took_answer(answer.result(), to);
        if (self->aborted()) return;
        // The root hears of it, from whoever sees it.
        PassError error = self->describe(answer.error());
        error.worker = to;
        error.text =
            concat("no gradient could be sent to ", self->registry_.name_of(to), ": ", error.text);
        self->tell_root(error);
      },
      head(), message, gradients, std::move(part));
}

void Pass::tell_root(const PassError& error) {
  if (id_.root != registry_.self()) {
    registry_.ask<pass_failed>(id_.root, deadline_, [](const rpc::Future<void>&) {}, id_, error);
  } else if (const auto root = registry_.coordinator(id_)) {
    root->failed(error);
  }
}

// At the root.
void Pass::took_answer(const GradientReply& reply, WorkerId from) {
  try {
    for (const MessageGradients& each : reply.back) deliver(each.message, each.gradients);
    if (!reply.done) return;
    if (const auto root = registry_.coordinator(id_)) root->done(from, reply.engaged);
  } catch (const Error& error) {
    if (const auto root = registry_.coordinator(id_)) {
      root->failed({static_cast<std::int32_t>(error.kind()), from, "", error.what()});
    }
  }
}

rpc::Future<GradientReply> Pass::nothing_for_root() {
  rpc::Promise<GradientReply> nothing;
  nothing.set_value();
  return nothing.future();
}

rpc::Future<GradientReply> Pass::take(std::uint64_t message,
                                      const std::vector<at::Tensor>& gradients, bool from_root) {
  auto answer = from_root ? answer_for_root(message, bytes_of(gradients)) : nothing_for_root();
  try {
    deliver(message, gradients);
  } catch (...) {
    const std::scoped_lock lock(mutex_);
    root_calls_.erase(message);
    open_calls_.erase(message);
    throw;
  }
  return answer;
}

rpc::Future<GradientReply> Pass::answer_for_root(std::uint64_t message, std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  RootCall& call = root_calls_[message];
  if ((answered_all_ || bytes > kMostOpen) && !call.answer) call.answer.emplace();
  rpc::Promise<GradientReply> promise;
  auto future = promise.future();
  if (call.answer) {
    promise.set_value(*call.answer);
  } else {
    call.waiting.push_back(std::move(promise));
    open_calls_.insert(message);
  }
  return future;
}

void Pass::flush(bool done) {
  GradientReply reply{std::exchange(for_root_, {}), done, {}};
  std::vector<rpc::Promise<GradientReply>> waiting;
  {
    const std::scoped_lock lock(mutex_);
    if (done) reply.engaged.assign(engaged_.begin(), engaged_.end());
    if (!open_calls_.empty()) {
      RootCall& call = root_calls_.at(*open_calls_.begin());
      open_calls_.erase(open_calls_.begin());
      call.answer = reply;
      waiting.swap(call.waiting);
    }
  }
  if (!waiting.empty()) {
    for (auto& promise : waiting) promise.set_value(reply);
    return;
  }
  // None of its calls is open.
  for (const auto& each : reply.back) send(id_.root, each.message, each.gradients);
  if (!done) return;
  registry_.ask<pass_done>(
      id_.root, deadline_, [](const rpc::Future<void>&) {}, id_, registry_.self(), reply.engaged);
}

void Pass::answer_most() {
  std::vector<rpc::Promise<GradientReply>> waiting;
  {
    const std::scoped_lock lock(mutex_);
    while (open_calls_.size() > 1) {
      RootCall& call = root_calls_.at(*open_calls_.begin());
      open_calls_.erase(open_calls_.begin());
      call.answer.emplace();
      for (auto& promise : call.waiting) waiting.push_back(std::move(promise));
      call.waiting.clear();
    }
  }
  for (auto& promise : waiting) promise.set_value();
}

void Pass::answer_all() {
  std::vector<rpc::Promise<GradientReply>> waiting;
  {
    const std::scoped_lock lock(mutex_);
    answered_all_ = true;
    open_calls_.clear();
    for (auto& [message, call] : root_calls_) {
      for (auto& promise : call.waiting) waiting.push_back(std::move(promise));
      call.waiting.clear();
      if (!call.answer) call.answer.emplace();
    }
  }
  for (auto& promise : waiting) promise.set_value();
}

void Pass::before_node(const char* name) { node_ = name; }

bool Pass::after_node() {
  if (nodes_left_ != 0) --nodes_left_;
  if (!for_root_.empty() && std::chrono::steady_clock::now() - began_ > kMostHeldTime) {
    flush(false);
  }
  return !aborted();
}

// A reducer's hook wants the gradient in `.grad`.
bool Pass::engine_accumulates(ag::AccumulateGrad& leaf) {
  bool accumulates = false;
  for (const auto& hook : leaf.post_hooks()) {
    const auto* const of_reducer = dynamic_cast<const ReducerHook*>(hook.get());
    if (const auto reducer = of_reducer ? of_reducer->reducer() : nullptr) {
      lend(reducer);
      accumulates = true;
    }
  }
  return accumulates;
}

void Pass::lend(const std::shared_ptr<Reducer::Impl>& reducer) {
  if (loans_.contains(reducer)) return;
  loans_.emplace(reducer, std::make_unique<GradientLoan>(reducer, context_->of_reducer(reducer)));
}

std::string Pass::given_up() const {
  if (!aborted()) return "";
  const std::scoped_lock lock(mutex_);
  return concat("its distributed backward pass was given up: ", why_);
}

void Pass::end_loans() {
  if (!aborted()) {
    for (const auto& [reducer, loan] : loans_) reduced_.emplace_back(reducer, loan->take());
  }
  loans_.clear();
}

void Pass::arrived_at(ag::AccumulateGrad& leaf, const at::Tensor& gradient) {
  gradients_.emplace_back(leaf.variable, gradient);
}

bool Pass::prepare_early() {
  const auto all = context_->all_sent();
  const std::scoped_lock lock(mutex_);
  // A reducer waits for all of its gradients in one run.
  if (!walk_.is_apart_from(all) || has_sinks(walk_)) return false;
  if (deterministic_) static_cast<void>(context_->put_in_order(walk_));
  // Now: the walk grows when others are asked.
  early_engine_.emplace(*this, walk_);
  first_leaf_ = walk_.leaves().size();
  discovering_ = true;
  return true;
}

void Pass::run_early(const std::vector<ag::Edge>& roots, std::vector<at::Tensor>&& gradients) {
  run_engine(*early_engine_, roots, std::move(gradients));
  early_engine_.reset();
}

void Pass::discovery_ended() {
  {
    const std::scoped_lock lock(mutex_);
    state_ = State::kRunning;
  }
  discovering_ = false;
  for (auto& [received, gradients] : std::exchange(early_, {})) {
    send_back(received, std::move(gradients));
  }
}

void Pass::run(const std::vector<ag::Edge>& roots, std::vector<at::Tensor>&& gradients) {
  send_plans(false);
  std::optional<GatedRun> engine;
  bool needed = !roots.empty();
  {
    const std::scoped_lock lock(mutex_);
    state_ = State::kRunning;
    needed = needed || !walk_.sends().empty();
    nodes_left_ = 1 + walk_.nodes().size() - walk_.leaves().size() + walk_.reached().size() +
                  walk_.sends().size();
    engine.emplace(*this, walk_, first_leaf_);
    if (deterministic_) {
      const auto numbers = context_->put_in_order(walk_);
      engine->add_gates(walk_, [&](const SentMessage& sent) { return numbers.at(sent.message); });
    } else {
      engine->add_gates(walk_);
    }
  }
  if (needed) run_engine(*engine, roots, std::move(gradients));
  send_plans(true);
  const std::scoped_lock lock(mutex_);
  if (aborted()) fail(ErrorKind::kCancelled, "autograd: the backward pass was aborted: ", why_);
  state_ = State::kDone;
}

void Pass::run_engine(GatedRun& engine, const std::vector<ag::Edge>& roots,
                      std::vector<at::Tensor>&& gradients) {
  RECORD_FUNCTION("convoy::autograd::backward", {});
  const rpc::detail::RecorderScope recorded(FrameRecorder::of(context_));
  began_ = std::chrono::steady_clock::now();
  const GradientHome::Scope home(*this);
  engine_ = &engine;
  try {
    engine.run(roots, std::move(gradients), retain_);
  } catch (...) {
    engine_ = nullptr;
    loans_.clear();
    throw;
  }
  engine_ = nullptr;
  end_loans();
}

// The answer of this worker comes with the end of its part; but nobody waits for gradients
// meanwhile, if the step takes its time.
void Pass::step() {
  if (optimizers_.empty()) return;
  std::vector<Gradients::Item> items;
  {
    std::size_t bytes = 0;
    for (const auto& [leaf, gradient] : gradients_) bytes += bytes_of(gradient);
    if (bytes > kMostSteppedFirst && !for_root_.empty()) flush(false);
    items = context_->gradients_with(gradients_);
  }
  for (const auto& [reducer, now] : reduced_) {
    const auto& parameters = parameters_of(*reducer);
    std::erase_if(items, [&](const Gradients::Item& item) {
      return std::any_of(parameters.begin(), parameters.end(),
                         [&](const at::Tensor& each) { return each.is_same(item.first); });
    });
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (now.gradients[i].defined()) items.emplace_back(parameters[i], now.gradients[i]);
    }
  }
  {
    // Once it is aborted nothing is stepped any more.
    const std::scoped_lock lock(mutex_);
    if (aborted()) fail(ErrorKind::kCancelled, "autograd: the backward pass was aborted: ", why_);
    stepped_ = Stepped::kIsBeing;
  }
  std::size_t count = 0;
  try {
    const rpc::detail::RecorderScope not_recorded(nullptr);
    count = step_hook()(*registry_.session(), optimizers_, Gradients(std::move(items)));
  } catch (...) {
    {
      const std::scoped_lock lock(mutex_);
      stepped_ = Stepped::kNothing;
    }
    registry_.wake();
    throw;
  }
  {
    const std::scoped_lock lock(mutex_);
    stepped_ = count == 0 ? Stepped::kNothing : Stepped::kStepped;
  }
  registry_.wake();
}

Stepped Pass::stepped() const {
  const auto session = registry_.session();
  Stepped now = Stepped::kNothing;
  session->agent().wait(Deadline::after(kMostStepTime, session->agent().now()), [&] {
    const std::scoped_lock lock(mutex_);
    now = stepped_;
    return now != Stepped::kIsBeing;
  });
  return now;
}

// Of a worker that is not the root.
void Pass::run_for_root() noexcept {
  try {
    const auto began = std::chrono::steady_clock::now();
    try {
      run({}, {});
      step();
      flush(true);
    } catch (...) {
      if (!aborted()) {
        tell_root(describe(std::current_exception(), node_));
      }
    }
    answer_all();
    registry_.ran(std::chrono::steady_clock::now() - began);
  } catch (const std::exception& error) {
    log_warn("autograd: a backward pass ended, and its root cannot be told: ", error.what());
  }
}

// --- the end -----------------------------------------------------------------------------------

void Pass::commit() {
  {
    const std::scoped_lock lock(mutex_);
    if (state_ == State::kCommitted || aborted()) return;
    if (state_ != State::kDone) {
      fail(ErrorKind::kInternal, "autograd: a backward pass that has not run is to be committed");
    }
    context_->add(std::exchange(gradients_, {}));
    for (auto& [reducer, now] : std::exchange(reduced_, {})) {
      context_->replace(reducer, std::move(now));
    }
    state_ = State::kCommitted;
  }
  registry_.wake();
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
  fail(ErrorKind::kTimeout, "autograd: ", registry_.name_of(id_.root),
       " has not said whether backward pass ", id_.number, " went well");
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

std::string Pass::waits_for() const {
  const std::scoped_lock lock(mutex_);
  return waits_for_locked();
}

std::string Pass::waits_for_locked() const {
  std::string text;
  std::size_t count = 0;
  for (const auto& [message, send] : walk_.sends()) {
    if (came_.contains(message)) continue;
    if (++count > 5) continue;
    text += concat(text.empty() ? "" : ", ", "the gradient of its ",
                   send.sent->reply ? "reply of " : "call of ", send.sent->function, " to ",
                   registry_.name_of(send.sent->to), " (message ", message, ")");
  }
  if (count > 5) text += concat(" and ", count - 5, " more");
  if (fast_ && count != 0) {
    text +=
        "; in FAST mode every tensor that was sent must be used: nobody sends a gradient for one "
        "that is not";
  }
  return text;
}

PassReport Pass::report() const {
  PassReport report;
  report.pass = id_;
  const std::scoped_lock lock(mutex_);
  report.state = state_ == State::kDiscovery ? "discovery"
                 : state_ == State::kRunning ? "running"
                                             : "done";
  for (const auto& [message, send] : walk_.sends()) {
    report.active.push_back(message);
    if (!came_.contains(message)) report.missing.push_back(message);
  }
  return report;
}

PassError Pass::describe(const std::exception_ptr& error, const std::string& node) const {
  PassError result;
  result.worker = registry_.self();
  const auto set = [&](ErrorKind kind, const std::string& type, const std::string& text) {
    result.kind = static_cast<std::int32_t>(kind);
    result.type = type;
    result.text = text;
  };
  const auto in_node = [&](const std::string& text) {
    return node.empty() ? text : concat(text, " (in ", node, ")");
  };
  try {
    std::rethrow_exception(error);
  } catch (const rpc::RemoteError& thrown) {
    set(thrown.kind(), thrown.remote_type(), thrown.what());
  } catch (const Error& thrown) {
    const bool kept =
        thrown.kind() == ErrorKind::kTimeout || thrown.kind() == ErrorKind::kUnsupported;
    set(kept ? thrown.kind() : ErrorKind::kRemote, type_name(typeid(thrown)), thrown.what());
  } catch (const c10::Error& thrown) {
    set(ErrorKind::kRemote, type_name(typeid(thrown)), in_node(thrown.what_without_backtrace()));
  } catch (const std::exception& thrown) {
    set(ErrorKind::kRemote, type_name(typeid(thrown)), in_node(thrown.what()));
  } catch (...) {
    set(ErrorKind::kRemote, "", in_node("something that is no std::exception"));
  }
  return result;
}

}  // namespace convoy::autograd::detail
