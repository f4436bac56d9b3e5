#pragma once

#include <concepts>
#include <coroutine>
#include <exception>
#include <memory>
#include <type_traits>
#include <utility>

#include "convoy/future.h"

// Continuations and coroutines of futures. For convoy/future.h; nothing here is for direct use.
namespace convoy::rpc {
namespace detail {

// Ends `state` with the result of make(): a value, void, a future, or the exception that it throws.
template <class R, class Make>
void end_by(const std::shared_ptr<FutureState<R>>& state, Make make) noexcept {
  try {
    using Made = decltype(make());
    if constexpr (Unwrapped<Made>::kIsFuture) {
      static_cast<void>(make().then([state](const Future<R>& inner) {
        end_by(state, [&inner]() -> R { return inner.result(); });
      }));
    } else if constexpr (std::is_void_v<Made>) {
      make();
      if (state->claim()) state->end_with();
    } else {
      auto made = make();
      if (state->claim()) state->end_with(std::move(made));
    }
  } catch (...) {
    if (state->claim()) state->end(std::current_exception());
  }
}

template <class T>
struct Awaiter {
  std::shared_ptr<FutureState<T>> state;

  bool await_ready() const noexcept { return state->done(); }
  void await_suspend(std::coroutine_handle<> coroutine) const { state->resume(coroutine); }
  T await_resume() const {
    state->check();
    if constexpr (!std::is_void_v<T>) return state->value();
  }
};

template <class T>
struct CoroutineResult {
  std::shared_ptr<FutureState<T>> state = std::make_shared<FutureState<T>>();
  template <class Value>
  void return_value(Value&& value) {
    if (state->claim()) state->end_with(std::forward<Value>(value));
  }
};
template <>
struct CoroutineResult<void> {
  std::shared_ptr<FutureState<void>> state = std::make_shared<FutureState<void>>();
  void return_void() {
    if (state->claim()) state->end_with();
  }
};
template <class T>
struct CoroutinePromise : CoroutineResult<T> {
  ~CoroutinePromise() {
    if (this->state->claim()) this->state->end(broken_promise());
  }
  Future<T> get_return_object() { return Future<T>(this->state); }
  std::suspend_never initial_suspend() noexcept { return {}; }
  std::suspend_never final_suspend() noexcept { return {}; }
  void unhandled_exception() noexcept {
    if (this->state->claim()) this->state->end(std::current_exception());
  }
};

}  // namespace detail

template <class T>
template <class Function>
auto Future<T>::then(Function function) const {
  constexpr bool kByValue = detail::kTakesValue<Function, T>;
  static_assert(kByValue || std::invocable<Function&, const Future<T>&>,
                "then: a function of the value, or of the future");
  auto call = [function = std::move(function)](const Future<T>& self) mutable {
    if constexpr (!kByValue) {
      return function(self);
    } else if constexpr (std::is_void_v<T>) {
      self.result();
      return function();
    } else {
      return function(self.result());
    }
  };
  using Result = typename detail::Unwrapped<std::decay_t<decltype(call(*this))>>::Type;
  auto next = std::make_shared<detail::FutureState<Result>>(core().session());
  detail::when_done(core(), [self = *this, next, call = std::move(call)]() mutable {
    detail::end_by(next, [&] { return call(self); });
  });
  return Future<Result>(std::move(next));
}

template <class T>
auto Future<T>::operator co_await() const {
  core();
  return detail::Awaiter<T>{state_};
}

}  // namespace convoy::rpc
