#pragma once

#include <atomic>
#include <chrono>
#include <optional>
#include <variant>

namespace convoy {

// A point on the steady clock until which a call may block. A duration converts to one, from now:
// queue.get(5s). One deadline is made where the user's time-out enters and passed down unchanged,
// so nested waits share it. A value; thread-safe.
class Deadline {
 public:
  // The steady clock, whose time points these are. Tests may replace it, for the whole process.
  struct Clock : std::chrono::steady_clock {
    static time_point now() {
      const auto replaced = now_for_testing.load(std::memory_order_relaxed);
      return replaced ? replaced() : std::chrono::steady_clock::now();
    }
    static inline std::atomic<time_point (*)()> now_for_testing{nullptr};
  };

  template <class Rep, class Period>
  Deadline(std::chrono::duration<Rep, Period> timeout)  // NOLINT(google-explicit-constructor)
      : Deadline(after(timeout)) {}

  // `timeout` from now, of any unit. One too large for the clock means Deadline::never().
  template <class Rep, class Period>
  static Deadline after(std::chrono::duration<Rep, Period> timeout,
                        Clock::time_point now = Clock::now()) {
    // Compared in floating point: converting hours::max() to nanoseconds would overflow. A century
    // is as good as never.
    using Seconds = std::chrono::duration<double>;
    constexpr Seconds kCentury(3.2e9);
    if (Seconds(timeout) >= kCentury) return never();
    if (Seconds(timeout) <= Seconds::zero()) return Deadline(now);
    return Deadline(now + std::chrono::ceil<Clock::duration>(timeout));
  }
  static Deadline at(Clock::time_point when) { return Deadline(when); }
  // For waits that another event is certain to end (a joined thread, a reaped child).
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  bool is_never() const { return when_ == Clock::time_point::max(); }
  bool expired() const { return !is_never() && Clock::now() >= when_; }
  Clock::time_point when() const { return when_; }

  // Time left, zero once expired; nanoseconds::max() for never().
  std::chrono::nanoseconds remaining() const {
    if (is_never()) return std::chrono::nanoseconds::max();
    const auto now = Clock::now();  // compared first: the difference to a far past overflows
    return when_ > now ? when_ - now : std::chrono::nanoseconds::zero();
  }

  // For poll(2) and epoll: rounded up, so that a wait never returns just before the deadline.
  // -1 for never().
  int poll_timeout_ms() const {
    if (is_never()) return -1;
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(remaining()).count();
    return ms > 1'000'000'000 ? 1'000'000'000 : static_cast<int>(ms);
  }

  friend bool operator==(const Deadline&, const Deadline&) = default;
  friend auto operator<=>(const Deadline&, const Deadline&) = default;

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}

  Clock::time_point when_;
};

// How long a call may take, as options say it: so long from when the call begins, whichever call
// the options are used for ({.timeout = 5s}), or until a deadline. Not set: the time-out of what it
// is called on. A value.
class Timeout {
 public:
  Timeout() = default;
  template <class Rep, class Period>
  Timeout(std::chrono::duration<Rep, Period> timeout) {  // NOLINT(google-explicit-constructor)
    using Seconds = std::chrono::duration<double>;
    if (Seconds(timeout) >= Seconds(3.2e9)) {  // a century: see Deadline::after
      value_ = Deadline::never();
    } else {
      value_ = std::chrono::ceil<std::chrono::nanoseconds>(timeout);
    }
  }
  Timeout(const Deadline& deadline)  // NOLINT(google-explicit-constructor)
      : value_(deadline) {}

  bool is_set() const { return !std::holds_alternative<std::monostate>(value_); }
  bool is_deadline() const { return std::holds_alternative<Deadline>(value_); }
  // From now; nullopt: not set. nanoseconds::max() for never.
  std::optional<std::chrono::nanoseconds> left() const {
    if (const auto* deadline = std::get_if<Deadline>(&value_)) return deadline->remaining();
    if (const auto* duration = std::get_if<std::chrono::nanoseconds>(&value_)) return *duration;
    return std::nullopt;
  }
  // Until when a call that begins now may take; `own` if it is not set.
  Deadline deadline(const Deadline& own) const {
    if (const auto* deadline = std::get_if<Deadline>(&value_)) return *deadline;
    if (const auto* duration = std::get_if<std::chrono::nanoseconds>(&value_)) return *duration;
    return own;
  }

 private:
  std::variant<std::monostate, std::chrono::nanoseconds, Deadline> value_;
};

}  // namespace convoy
