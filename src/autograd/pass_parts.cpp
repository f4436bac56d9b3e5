#include "autograd/pass_parts.h"

#include <c10/util/Exception.h>

#include <exception>
#include <string_view>

#include "base/concat.h"

namespace convoy::autograd::detail {
namespace {

// "Function X returned an invalid gradient", "... returned nan": what the engine itself says of the
// gradients that a node has computed.
bool is_of_gradients(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& thrown) {
    return std::string_view(thrown.what_without_backtrace()).starts_with("Function ");
  } catch (...) {
    return false;
  }
}

template <class Call>
void take_waiting(Call& call, RootCalls::Promises& all) {
  for (auto& promise : call.waiting) all.push_back(std::move(promise));
  call.waiting.clear();
}

}  // namespace

rpc::Future<GradientReply> RootCalls::add(std::uint64_t message, bool at_once) {
  Call& call = calls_[message];
  if ((answered_all_ || at_once) && !call.answer) call.answer.emplace();
  rpc::Promise<GradientReply> promise;
  auto future = promise.future();
  if (call.answer) {
    promise.set_value(*call.answer);
  } else {
    call.waiting.push_back(std::move(promise));
    open_.insert(message);
  }
  return future;
}

void RootCalls::drop(std::uint64_t message) {
  calls_.erase(message);
  open_.erase(message);
}

RootCalls::Promises RootCalls::answer_one(const GradientReply& reply) {
  Promises waiting;
  if (open_.empty()) return waiting;
  Call& call = calls_.at(*open_.begin());
  open_.erase(open_.begin());
  call.answer = reply;
  waiting.swap(call.waiting);
  return waiting;
}

RootCalls::Promises RootCalls::answer_most() {
  Promises waiting;
  while (open_.size() > 1) {
    Call& call = calls_.at(*open_.begin());
    open_.erase(open_.begin());
    call.answer.emplace();
    take_waiting(call, waiting);
  }
  return waiting;
}

RootCalls::Promises RootCalls::answer_all() {
  Promises waiting;
  answered_all_ = true;
  open_.clear();
  for (auto& [message, call] : calls_) {
    take_waiting(call, waiting);
    if (!call.answer) call.answer.emplace();
  }
  return waiting;
}

void EnginePlace::leaves() { inside_ = std::uncaught_exceptions() != 0; }

std::string EnginePlace::where_it_failed() const {
  const bool is_ours = node_.empty() || node_.starts_with("convoy::");
  if (inside_ || is_of_gradients(std::current_exception())) {
    return is_ours ? "" : concat("in ", node_);
  }
  return is_ours ? "in a hook" : concat("in a hook after ", node_);
}

}  // namespace convoy::autograd::detail
