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
#include "base/error.h"
#include "base/log.h"

namespace convoy::autograd::detail {
namespace {

namespace ag = torch::autograd;
using Capture = ag::GraphTask::ExecInfo::Capture;

// What a worker has for the root goes when it waits or is done, but not later than this.
constexpr std::size_t kMostHeldBack = 16384;  // bytes
constexpr std::chrono::microseconds kMostHeldTime(50);

// Calls of the root with more than this are answered at once: they do not stay open.
constexpr std::size_t kMostOpen = std::size_t{1} << 20;  // bytes

// How long whoever wants gradients waits at least for the root of a pass that is over here.
constexpr std::chrono::seconds kLeastDecisionTime(10);

// By the clock of this worker's endpoint.
Deadline deadline_after(const Registry& registry, std::uint64_t remaining) {
  if (remaining == kNoLimit) return Deadline::never();
  const auto most = static_cast<std::uint64_t>(INT64_MAX);
  return Deadline::after(std::chrono::nanoseconds(std::min(remaining, most)),
                         registry.session()->agent().now());
}

std::size_t bytes_of(const std::vector<at::Tensor>& gradients) {
  std::size_t bytes = 0;
  for (const at::Tensor& gradient : gradients) bytes += gradient.defined() ? gradient.nbytes() : 0;
  return bytes;
}

// What happens to a gradient that has arrived at a leaf.
class LeafHook final : public Capture::GradCaptureHook {
 public:
  LeafHook(ag::AccumulateGrad& leaf, Pass& pass) : leaf_(leaf), pass_(pass) {}

  at::Tensor operator()(const at::Tensor& gradient) override {
    ag::variable_list gradients{gradient};
    for (const auto& hook : leaf_.pre_hooks()) gradients = (*hook)(gradients);
    if (gradients.at(0).defined()) pass_.arrived_at(leaf_, gradients[0]);
    for (const auto& hook : leaf_.post_hooks()) (*hook)({}, gradients);
    return {};
  }

 private:
  ag::AccumulateGrad& leaf_;
  Pass& pass_;
};

std::string type_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
  return text ? text.get() : type.name();
}

// Tells a pass of each node that it runs, on this thread.
class NodeWatch {
 public:
  explicit NodeWatch(Pass& pass) : before_(std::exchange(watched_pass(), &pass)) {
    at::RecordFunctionCallback callback(&before, &after);
    callback.scopes({at::RecordScope::BACKWARD_FUNCTION});
    handle_ = at::addThreadLocalCallback(callback);
  }
  NodeWatch(const NodeWatch&) = delete;
  NodeWatch& operator=(const NodeWatch&) = delete;
  ~NodeWatch() {
    at::removeCallback(handle_);
    watched_pass() = before_;
  }

 private:
  static std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& function) {
    if (Pass* const watched = watched_pass()) watched->before_node(function.name());
    return nullptr;
  }
  static void after(const at::RecordFunction&, at::ObserverContext*) {
    if (Pass* const watched = watched_pass()) watched->after_node();
  }
  static Pass*& watched_pass() {
    thread_local Pass* pass = nullptr;
    return pass;
  }

  Pass* const before_;
  at::CallbackHandle handle_ = 0;
};

}  // namespace

Pass::Pass(std::shared_ptr<ContextState> context, const PassHead& head)
    : context_(std::move(context)),
      registry_(context_->registry()),
      id_(head.pass),
      floor_(head.floor),
      fast_(head.fast),
      retain_(head.retain),
      deadline_(deadline_after(registry_, head.remaining)) {}

PassHead Pass::head() const {
  PassHead head{id_, floor_, context_->id(), fast_, retain_, kNoLimit};
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

std::vector<Ports> Pass::expand_locked(const std::vector<Ports>& ports) {
  if (state_ != State::kDiscovery || aborted()) {
    fail(ErrorKind::kInvalidArgument, "autograd: discovery of this backward pass is over");
  }
  for (const Ports& each : ports) {
    const auto sent = context_->sent(each.message);
    if (!sent) {
      fail(ErrorKind::kInvalidArgument, "autograd: ", registry_.name_of(registry_.self()),
           " has sent no message ", each.message, " in context ", context_->id());
    }
    walk_.follow(sent, each.tensors);
  }
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
  return answers_.emplace(batch, expand_locked(ports)).first->second;
}

std::vector<Ports> Pass::take_reached() {
  const std::scoped_lock lock(mutex_);
  return walk_.take_reached();
}

// --- execution ---------------------------------------------------------------------------------

void Pass::deliver(std::uint64_t message, const std::vector<at::Tensor>& gradients) {
  bool starts = false;
  {
    const std::scoped_lock lock(mutex_);
    if (aborted() || state_ >= State::kDone || !came_.insert(message).second) return;
    if (fast_ && state_ == State::kDiscovery) {
      for (const auto& sent : context_->all_sent()) walk_.follow_all(sent);
    }
    const auto send = walk_.sends().find(message);
    if (send == walk_.sends().end() || send->second.tensors.size() != gradients.size()) {
      came_.erase(message);
      fail(ErrorKind::kInvalidArgument, "autograd: message ", message, " of context ",
           context_->id(), " expects no such gradients in this backward pass");
    }
    arrived_.emplace_back(message, gradients);
    starts = state_ == State::kDiscovery;
    if (starts) state_ = State::kRunning;
  }
  if (!starts) return registry_.wake();
  try {
    registry_.session()->agent().post([self = shared_from_this()] { self->run_for_root(); });
  } catch (const std::exception& error) {
    // Whoever sent the gradient hears of it, and tells the root.
    abort(concat("it could not be run: ", error.what()));
    answer_all();
    throw;
  }
}

Pass::Arrived Pass::next_gradient() {
  const auto session = registry_.session();
  const auto ready = [&] {
    const std::scoped_lock lock(mutex_);
    return !arrived_.empty() || aborted() || session->agent().is_shut_down();
  };
  if (!ready()) {
    if (!for_root_.empty()) flush(false);
    answer_most();
  }
  const bool in_time = session->agent().wait(deadline_, ready);
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
  auto [message, gradients] = std::move(arrived_.front());
  arrived_.pop_front();
  return {&walk_.sends().at(message), std::move(gradients)};
}

void Pass::send_back(const RecvNode& recv, ag::variable_list&& gradients) {
  const WorkerId to = recv.sender();
  const WorkerId self = registry_.self();
  if (to == self) return deliver(recv.message(), gradients);
  {
    const std::scoped_lock lock(mutex_);
    engaged_.insert(to);
  }
  if (to != id_.root) return send(to, recv.message(), gradients);
  const std::size_t bytes = bytes_of(gradients);
  if (for_root_.empty()) for_root_since_ = std::chrono::steady_clock::now();
  for_root_.push_back({recv.message(), std::move(gradients)});
  if (bytes > kMostHeldBack) flush(false);
}

void Pass::send(WorkerId to, std::uint64_t message, const std::vector<at::Tensor>& gradients) {
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
      head(), message, gradients);
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

rpc::Future<GradientReply> Pass::answer_for_root(std::uint64_t message,
                                                 const std::vector<at::Tensor>& gradients) {
  const bool at_once = bytes_of(gradients) > kMostOpen;
  const std::scoped_lock lock(mutex_);
  RootCall& call = root_calls_[message];
  if ((answered_all_ || at_once) && !call.answer) call.answer.emplace();
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

void Pass::before_node(const char* name) {
  if (is_current_task()) node_ = name;
}

void Pass::after_node() {
  if (!for_root_.empty() && std::chrono::steady_clock::now() - for_root_since_ > kMostHeldTime) {
    flush(false);
  }
  if (!aborted() || !is_current_task()) return;
  // The engine passes over all that is left.
  auto& all = const_cast<std::unordered_map<ag::Node*, ag::GraphTask::ExecInfo>&>(
      *ag::get_current_graph_task_exec_info());
  for (auto& [node, info] : all) {
    info.needed_ = false;
    info.captures_.reset();
  }
}

bool Pass::is_current_task() const { return ag::get_current_graph_task_id() == task_; }

void Pass::begin_task() {
  task_ = ag::get_current_graph_task_id();
  auto& all = const_cast<std::unordered_map<ag::Node*, ag::GraphTask::ExecInfo>&>(
      *ag::get_current_graph_task_exec_info());
  for (const auto& node : walk_.leaves()) {
    ag::GraphTask::ExecInfo& info = all.at(node.get());
    if (auto* const leaf = dynamic_cast<ag::AccumulateGrad*>(node.get())) {
      info.captures_->at(0).DO_NOT_USE_DEPRECATED_register_capture_hook(
          std::make_unique<LeafHook>(*leaf, *this));
    } else {
      info.needed_ = true;  // it leads nowhere, but is run as in any backward pass
    }
  }
}

void Pass::arrived_at(const ag::AccumulateGrad& leaf, const at::Tensor& gradient) {
  gradients_.emplace_back(leaf.variable, gradient);
}

void Pass::run(const std::vector<ag::Edge>& roots, std::vector<at::Tensor> gradients) {
  RECORD_FUNCTION("convoy::autograd::backward", {});
  ag::edge_list edges{ag::Edge(c10::make_intrusive<EntryNode>(), 0)};
  ag::variable_list inputs{nothing()};
  ag::edge_list outputs{ag::Edge(end_node(), 0)};
  {
    const std::scoped_lock lock(mutex_);
    state_ = State::kRunning;
    edges.insert(edges.end(), roots.begin(), roots.end());
    inputs.insert(inputs.end(), std::make_move_iterator(gradients.begin()),
                  std::make_move_iterator(gradients.end()));
    for (const auto& [message, send] : walk_.sends()) {
      ag::edge_list of_send = send.sent->edges;
      for (std::size_t i = 0; i < of_send.size(); ++i) {
        if (!send.tensors[i]) of_send[i] = {};
      }
      edges.emplace_back(c10::make_intrusive<GateNode>(std::move(of_send)), 0);
      inputs.push_back(nothing());
    }
    for (const auto& leaf : walk_.leaves()) outputs.emplace_back(leaf, 0);
  }
  const PassScope scope(*this);
  const rpc::detail::RecorderScope recorded(context_);
  const NodeWatch watch(*this);
  ag::Engine::get_default_engine().execute(edges, inputs, retain_, /*create_graph=*/false,
                                           /*accumulate_grad=*/false, outputs);
  const std::scoped_lock lock(mutex_);
  if (aborted()) fail(ErrorKind::kCancelled, "autograd: the backward pass was aborted: ", why_);
  state_ = State::kDone;
}

// On the pool, of a worker that is not the root.
void Pass::run_for_root() noexcept {
  try {
    try {
      run({}, {});
      flush(true);
    } catch (...) {
      if (!aborted()) {
        tell_root(describe(std::current_exception(), node_));
      }
    }
    answer_all();
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
    set(thrown.kind() == ErrorKind::kTimeout ? ErrorKind::kTimeout : ErrorKind::kRemote,
        type_name(typeid(thrown)), thrown.what());
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
