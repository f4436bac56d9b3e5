#pragma once

#include <atomic>
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

// The implementation of futures. For convoy/future.h; nothing here is for direct use.
namespace convoy::rpc {

template <class T>
class Future;

namespace detail {

class SessionImpl;
class ValueSource;
struct Body;
struct CallStart;

// A function that runs when a future ends.
struct Callback {
  virtual ~Callback() = default;
  virtual void run() noexcept = 0;
  Callback* next = nullptr;
  std::shared_ptr<void> request = nullptr;   // the handler that made it: it runs as part of that
  std::shared_ptr<void> recorder = nullptr;  // its distributed autograd context
};

// The state of a future, without its value. It ends once. Thread-safe.
class FutureCore {
 public:
  FutureCore(const FutureCore&) = delete;
  FutureCore& operator=(const FutureCore&) = delete;

  bool done() const noexcept { return callbacks_.load(std::memory_order_acquire) == closed(); }
  std::exception_ptr error() const noexcept { return done() ? error_ : nullptr; }
  // Blocks until it has ended. Throws its error, or kTimeout at the deadline.
  void wait(const Deadline& deadline);
  // Throws its error, or kInvalidArgument if it has not ended. Does not block.
  void check() const;
  // Takes ownership of the callback. Runs it at once, on this thread, if the future has ended.
  void on_done(std::unique_ptr<Callback> callback) noexcept;
  // Continues a coroutine when the future has ended: on the thread pool of the session whose
  // handler this is, or else of the future's session. Without either, on the thread that ends the
  // future.
  void resume(std::coroutine_handle<> coroutine);
  // Returns false if the future has ended or is about to end.
  bool cancel() noexcept;

  // The caller that claims the future must end it. Returns false if it is claimed already.
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
  // Decodes the value from the result of a call. May throw.
  virtual void decode(ValueSource& source) = 0;

  static Callback* closed() noexcept;

  std::atomic<Callback*> callbacks_{nullptr};  // newest first; closed(): the future has ended
  std::atomic<bool> claimed_{false};
  std::exception_ptr error_;
  std::shared_ptr<SessionImpl> session_;
  // For a call under way: the call engine's part, and the reference that keeps this object alive.
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

  // Call it after claim().
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
  void decode(ValueSource& source) override;  // convoy/detail/rpc_values.h

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

// Whether then() passes the value to its function; otherwise it passes the future.
template <class Function, class T>
inline constexpr bool kTakesValue = std::invocable<Function&, const T&>;
template <class Function>
inline constexpr bool kTakesValue<Function, void> = std::invocable<Function&>;

// Blocks until all futures have ended, or one has ended with an error, which is thrown. Throws
// kTimeout at the deadline.
void wait_all(const std::vector<FutureCore*>& futures, const Deadline& deadline);
[[noreturn]] void fail_empty_future();
[[noreturn]] void fail_ended_twice();
std::exception_ptr broken_promise();

template <class T>
struct CoroutinePromise;

}  // namespace detail

}  // namespace convoy::rpc
