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
    if (told_.fast && state_ == State::kDiscovery) {
      for (const auto& sent : context_->all_sent()) walk_.follow_all(sent);
    }
    Gradient gradient{message, gradients};
    // It is looked at when the part has come that it belongs to.
    const bool too_early = plan_.made && state_ == State::kDiscovery && !plan_.followed;
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
    const auto found = plan_.unsent.find(to);
    if (found != plan_.unsent.end()) {
      part = std::move(found->second);
      plan_.unsent.erase(found);
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
  if (told_.pass.root != registry_.self()) {
    registry_.ask<pass_failed>(
        told_.pass.root, deadline_, [](const rpc::Future<void>&) {}, told_.pass, error);
  } else if (const auto root = registry_.coordinator(told_.pass)) {
    root->failed(error);
  }
}

// At the root.
void Pass::took_answer(const GradientReply& reply, WorkerId from) {
  try {
    for (const MessageGradients& each : reply.back) deliver(each.message, each.gradients);
    if (!reply.done) return;
    if (const auto root = registry_.coordinator(told_.pass)) root->done(from, reply.engaged);
  } catch (const Error& error) {
    if (const auto root = registry_.coordinator(told_.pass)) {
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
  auto answer = [&] {
    if (!from_root) return nothing_for_root();
    const std::scoped_lock lock(mutex_);
    return root_calls_.add(message, /*at_once=*/bytes_of(gradients) > kMostOpen);
  }();
  try {
    deliver(message, gradients);
  } catch (...) {
    const std::scoped_lock lock(mutex_);
    root_calls_.drop(message);
    throw;
  }
  return answer;
}

void Pass::flush(bool done) {
  GradientReply reply{for_root_.take(), done, {}};
  RootCalls::Promises waiting;
  {
    const std::scoped_lock lock(mutex_);
    if (done) reply.engaged.assign(engaged_.begin(), engaged_.end());
    waiting = root_calls_.answer_one(reply);
  }
  if (!waiting.empty()) {
    for (auto& promise : waiting) promise.set_value(reply);
    return;
  }
  // None of its calls is open.
  for (const auto& each : reply.back) send(told_.pass.root, each.message, each.gradients);
  if (!done) return;
  registry_.ask<pass_done>(
      told_.pass.root, deadline_, [](const rpc::Future<void>&) {}, told_.pass, registry_.self(),
      reply.engaged);
}

void Pass::answer_most() {
  RootCalls::Promises waiting;
  {
    const std::scoped_lock lock(mutex_);
    waiting = root_calls_.answer_most();
  }
  for (auto& promise : waiting) promise.set_value();
}

void Pass::answer_all() {
  RootCalls::Promises waiting;
  {
    const std::scoped_lock lock(mutex_);
    waiting = root_calls_.answer_all();
  }
  for (auto& promise : waiting) promise.set_value();
}

}  // namespace convoy::autograd::detail
