#pragma once

#include <atomic>
#include <chrono>
#include <concepts>
#include <coroutine>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "convoy/deadline.h"

// Results that are not there yet.
//
//   auto sum = session.rpc_async<my_add>("worker1", a, b);          // Future<at::Tensor>
//   auto twice = sum.then([](const at::Tensor& t) { return t * 2; });  // Future<at::Tensor>
//   at::Tensor t = twice.wait();
//
// A coroutine that returns a Future may co_await others; it holds no thread meanwhile.
namespace convoy::rpc {

template <class T>
class Future;
template <class T>
class Promise;

namespace detail {

class SessionImpl;
class ValueSource;
struct Body;
struct CallStart;

// What runs when a future ends.
struct Callback {
  virtual ~Callback() = default;
  virtual void run() noexcept = 0;
  Callback* next = nullptr;
  std::shared_ptr<void> request = nullptr;   // in whose handler it was made: it goes on with that
  std::shared_ptr<void> recorder = nullptr;  // and with that distributed autograd context
};

// The state of a future but for its value. Ends once. Thread-safe.
class FutureCore {
 public:
  FutureCore(const FutureCore&) = delete;
  FutureCore& operator=(const FutureCore&) = delete;

  bool done() const noexcept { return callbacks_.load(std::memory_order_acquire) == closed(); }
  std::exception_ptr error() const noexcept { return done() ? error_ : nullptr; }
  // Returns when it has ended; throws its error, or kTimeout at the deadline.
  void wait(const Deadline& deadline);
  // Throws its error; kInvalidArgument if it has not ended.
  void check() const;
  // Takes over the callback; runs it here if it has ended.
  void on_done(std::unique_ptr<Callback> callback) noexcept;
  // Continues a coroutine when it has ended: on the pool of the session whose handler this is, or
  // of the future's own; without either, on the thread that ends it.
  void resume(std::coroutine_handle<> coroutine);
  // False: it has ended, or is about to.
  bool cancel() noexcept;

  // Whoever claims it must end it. False: somebody has.
  bool claim() noexcept { return !claimed_.exchange(true, std::memory_order_acq_rel); }
  void end(std::exception_ptr error = nullptr) noexcept;

  const std::shared_ptr<SessionImpl>& session() const { return session_; }

 protected:
  FutureCore() = default;
  explicit FutureCore(std::shared_ptr<SessionImpl> session) : session_(std::move(session)) {}
  virtual ~FutureCore();

 private:
  friend struct CallSlot;
  friend void start_call(const CallStart& start, const Body& body);
  friend void wait_for_call(SessionImpl& session, FutureCore& core);
  // Makes the value of a call's result. May throw.
  virtual void decode(ValueSource& source) = 0;

  static Callback* closed() noexcept;

  std::atomic<Callback*> callbacks_{nullptr};  // newest first; closed(): it has ended
  std::atomic<bool> claimed_{false};
  std::exception_ptr error_;
  std::shared_ptr<SessionImpl> session_;
  // Of a call that is under way: the engine's part, and what keeps this object meanwhile.
  std::shared_ptr<FutureCore> self_;
  static constexpr std::size_t kCallBytes = 384;
  alignas(std::max_align_t) std::byte call_[kCallBytes];
  bool has_call_ = false;
};

template <class T>
using Stored = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

template <class T>
class FutureState final : public FutureCore {
 public:
  FutureState() = default;
  explicit FutureState(std::shared_ptr<SessionImpl> session) : FutureCore(std::move(session)) {}

  // After claim().
  template <class... Value>
  void end_with(Value&&... value) noexcept {
    try {
      value_.emplace(std::forward<Value>(value)...);
    } catch (...) {
      return end(std::current_exception());
    }
    end();
  }
  Stored<T>& value() { return *value_; }

 private:
  void decode(ValueSource& source) override;  // convoy/rpc_values.h

  std::optional<Stored<T>> value_;
};

template <class Function>
struct CallbackOf final : Callback {
  explicit CallbackOf(Function f) : function(std::move(f)) {}
  void run() noexcept override { function(); }
  Function function;
};
template <class Function>
void when_done(FutureCore& core, Function function) {
  core.on_done(std::make_unique<CallbackOf<Function>>(std::move(function)));
}

template <class T>
struct Unwrapped {
  using Type = T;
  static constexpr bool kIsFuture = false;
};
template <class T>
struct Unwrapped<Future<T>> {
  using Type = T;
  static constexpr bool kIsFuture = true;
};

// What then() calls a function with: the value, or the future itself.
template <class Function, class T>
inline constexpr bool kTakesValue = std::invocable<Function&, const T&>;
template <class Function>
inline constexpr bool kTakesValue<Function, void> = std::invocable<Function&>;

// Of a list: all have ended, or one has ended with an error, which is thrown.
void wait_all(const std::vector<FutureCore*>& futures, const Deadline& deadline);
[[noreturn]] void fail_empty_future();
[[noreturn]] void fail_ended_twice();
std::exception_ptr broken_promise();

template <class T>
struct CoroutinePromise;

}  // namespace detail

// A value that will be there, or an error. Copies are the same. Thread-safe.
template <class T>
class [[nodiscard]] Future {
 public:
  // NOLINTNEXTLINE(readability-identifier-naming): the language's name
  using promise_type = detail::CoroutinePromise<T>;

  Future() = default;  // none
  explicit Future(std::shared_ptr<detail::FutureState<T>> state) : state_(std::move(state)) {}
  explicit operator bool() const { return state_ != nullptr; }

  // Blocks until it has ended (a call does so at its own deadline) and gives the value or throws
  // the error; again and again, if you like. In a handler, the session runs another meanwhile.
  decltype(auto) wait() const& { return value_at(Deadline::never()); }
  T wait() && { return T(value_at(Deadline::never())); }
  // The same with a limit of the caller's: kTimeout if it passes first; the call goes on.
  decltype(auto) wait(std::chrono::milliseconds limit) const& {
    return value_at(Deadline::after(limit));
  }
  T wait(std::chrono::milliseconds limit) && { return T(value_at(Deadline::after(limit))); }
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

  // Gives up: it ends with kCancelled, and the callee is told. False: it has ended.
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

// The other end of a future that is not a call's. Movable; the future of a promise that goes
// without having set anything ends with kCancelled. Thread-safe but for moves.
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
    if (!state_->claim()) detail::fail_ended_twice();
    state_->end_with(std::forward<Value>(value)...);
  }
  void set_error(std::exception_ptr error) {
    if (!state_->claim()) detail::fail_ended_twice();
    state_->end(std::move(error));
  }

 private:
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

// ----------------------------------------------------------------------------------------------

namespace detail {

// Ends `state` with what `make()` gives: a value, nothing, a future, or what it throws.
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
