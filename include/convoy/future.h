#pragma once

#include <coroutine>
#include <exception>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/detail/future_core.h"

// Futures: results of asynchronous calls.
//
//   auto sum = session.rpc_async<my_add>("worker1", a, b);          // Future<at::Tensor>
//   auto twice = sum.then([](const at::Tensor& t) { return t * 2; });  // Future<at::Tensor>
//   at::Tensor t = twice.wait();
//
// A coroutine that returns a Future may co_await other futures; it occupies no thread while it is
// suspended.
namespace convoy::rpc {

// The result of an asynchronous call: a value or an error, available later. Copies share the state.
// Thread-safe. Members of an empty Future throw kInvalidArgument, except operator bool.
template <class T>
class [[nodiscard]] Future {
 public:
  // NOLINTNEXTLINE(readability-identifier-naming): the language's name
  using promise_type = detail::CoroutinePromise<T>;

  Future() = default;  // empty
  explicit Future(std::shared_ptr<detail::FutureState<T>> state) : state_(std::move(state)) {}
  explicit operator bool() const { return state_ != nullptr; }

  // Blocks until the future is done; an RPC call is done at its own deadline at the latest. Returns
  // the value or throws the error. May be called repeatedly. In a handler, the session runs other
  // handlers meanwhile.
  decltype(auto) wait() const& { return value_at(Deadline::never()); }
  T wait() && { return T(value_at(Deadline::never())); }
  // The same with a time limit. Throws kTimeout if it passes first; the call continues.
  decltype(auto) wait(const Deadline& deadline) const& { return value_at(deadline); }
  T wait(const Deadline& deadline) && { return T(value_at(deadline)); }
  // True if it is done, with a value or an error. Does not block.
  bool done() const { return core().done(); }
  // The error. nullptr while it is not done, and after success.
  std::exception_ptr error() const { return core().error(); }
  // The value, without blocking. Throws its error if it failed, kInvalidArgument if it is not done.
  decltype(auto) result() const {
    core().check();
    return value();
  }

  // Returns a future of the result of `function`, which is called with the value. If `function`
  // returns a future, the result is that future's value. After an error `function` is not called,
  // and the error is passed on; to see errors, give `function` a parameter of type Future<T>.
  //
  // `function` runs at once if this future is done. Otherwise it runs on the thread that completes
  // it, which may be a thread that waits for something else: keep it short, and do not block in it.
  // Gradients are enabled in it, whatever guards that thread has.
  template <class Function>
  auto then(Function function) const;

  // Cancels the future: it completes with kCancelled, and the callee is notified. Returns false if
  // it is already done. If then() made this future, only this one is cancelled: the one that it was
  // called on continues.
  bool cancel() const { return core().cancel(); }

  auto operator co_await() const;

 private:
  template <class Any>
  friend class Future;
  template <class Any>
  friend std::vector<detail::Stored<Any>> wait_all(const std::vector<Future<Any>>& futures,
                                                   const Deadline& deadline);

  detail::FutureCore& core() const {
    if (!state_) detail::fail_empty_future();
    return *state_;
  }
  decltype(auto) value() const {
    if constexpr (!std::is_void_v<T>) return std::as_const(state_->value());
  }
  decltype(auto) value_at(const Deadline& deadline) const {
    core().wait(deadline);
    return value();
  }

  std::shared_ptr<detail::FutureState<T>> state_;
};

// The producing side of a future. Movable. If it is destroyed without a result, the future
// completes with kCancelled. Thread-safe, except for moves.
template <class T>
class Promise {
 public:
  Promise() : state_(std::make_shared<detail::FutureState<T>>()) {}
  Promise(Promise&&) noexcept = default;
  Promise& operator=(Promise&& other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~Promise() {
    if (state_ && state_->claim()) state_->end(detail::broken_promise());
  }

  Future<T> future() const { return Future<T>(state_); }
  // Throws kInvalidArgument if there is a value or an error already.
  template <class... Value>
  void set_value(Value&&... value) {
    if (!state().claim()) detail::fail_ended_twice();
    state_->end_with(std::forward<Value>(value)...);
  }
  void set_error(std::exception_ptr error) {
    if (!state().claim()) detail::fail_ended_twice();
    state_->end(std::move(error));
  }

 private:
  detail::FutureState<T>& state() const {
    if (!state_) detail::fail_empty_future();
    return *state_;
  }

  std::shared_ptr<detail::FutureState<T>> state_;
};

// Blocks until all futures are done, and returns their values in order. If one of them fails,
// throws its error without waiting for the rest. Throws kTimeout at the deadline.
template <class T>
std::vector<detail::Stored<T>> wait_all(const std::vector<Future<T>>& futures,
                                        const Deadline& deadline) {
  std::vector<detail::FutureCore*> cores;
  for (const auto& future : futures) cores.push_back(&future.core());
  detail::wait_all(cores, deadline);
  std::vector<detail::Stored<T>> values;
  for (const auto& future : futures) values.push_back(future.state_->value());
  return values;
}
template <class T>
std::vector<detail::Stored<T>> wait_all(const std::vector<Future<T>>& futures) {
  return wait_all(futures, Deadline::never());
}

}  // namespace convoy::rpc

#include "convoy/detail/future_then.h"  // IWYU pragma: export
