#pragma once

#include <coroutine>
#include <exception>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/detail/future_core.h"

// Futures: results of calls that are under way.
//
//   auto sum = session.rpc_async<my_add>("worker1", a, b);          // Future<at::Tensor>
//   auto twice = sum.then([](const at::Tensor& t) { return t * 2; });  // Future<at::Tensor>
//   at::Tensor t = twice.wait();
//
// A coroutine that returns a Future may co_await others; it holds no thread meanwhile.
namespace convoy::rpc {

// The result of a call, available later: a value or an error. Copies share it. Thread-safe.
template <class T>
class [[nodiscard]] Future {
 public:
  // NOLINTNEXTLINE(readability-identifier-naming): the language's name
  using promise_type = detail::CoroutinePromise<T>;

  Future() = default;  // none
  explicit Future(std::shared_ptr<detail::FutureState<T>> state) : state_(std::move(state)) {}
  explicit operator bool() const { return state_ != nullptr; }

  // Blocks until it has ended (a call does so at its own deadline) and returns the value or throws
  // the error. May be called repeatedly. In a handler, the session runs another handler meanwhile.
  decltype(auto) wait() const& { return value_at(Deadline::never()); }
  T wait() && { return T(value_at(Deadline::never())); }
  // The same with a limit of the caller's: kTimeout if it passes first; the call goes on.
  decltype(auto) wait(const Deadline& deadline) const& { return value_at(deadline); }
  T wait(const Deadline& deadline) && { return T(value_at(deadline)); }
  // True when it has ended, well or not.
  bool done() const { return core().done(); }
  // Its error; nullptr while it is under way, and after success.
  std::exception_ptr error() const { return core().error(); }
  // The value of one that has ended; kInvalidArgument before.
  decltype(auto) result() const {
    core().check();
    return value();
  }

  // A future of what `function` makes of the value; if it returns a future, of that one's value. An
  // error passes by: `function` is not called. Give it a parameter Future<T> to see errors, too. It
  // runs at once if this has ended, otherwise on the thread that ends it, perhaps one that waits
  // for something else: it should be short, and must not wait.
  template <class Function>
  auto then(Function function) const;

  // Cancels it: it ends with kCancelled, and the callee is told. False if it has ended already. One
  // that then() made ends alone: what it follows goes on.
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

// The producing side of a future. Movable. If it is destroyed without a result, the future ends
// with kCancelled. Thread-safe except for moves.
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
  // kInvalidArgument if it has a value or an error already.
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

// The values of all, in order. Throws the first error that comes, without waiting for the rest;
// kTimeout.
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
