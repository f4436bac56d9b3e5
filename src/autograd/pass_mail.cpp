// What workers send each other in a backward pass.
#include "autograd/coordinator.h"
#include "autograd/functions.h"
#include "autograd/pass.h"
#include "autograd/registry.h"
#include "base/error.h"

namespace convoy::autograd::detail {
namespace {

// Calls of the root with more than this are answered at once: they do not stay open.
constexpr std::size_t kMostOpen = std::size_t{1} << 20;  // bytes

}  // namespace

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

}  // namespace convoy::autograd::detail
