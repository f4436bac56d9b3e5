#pragma once

#include <atomic>
#include <chrono>
#include <optional>
#include <variant>

namespace convoy {

// A point in time until which a call may block, on the steady clock. A duration converts to a
// deadline, counted from now: queue.get(5s). Make one deadline from the user's timeout and pass it
// down unchanged, so that nested waits share it. A value type; thread-safe.
class Deadline {
 public:
  // The steady clock. Tests may replace now(), for the whole process.
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

  // `timeout` from now, in any unit. 0 or less: expired at once. A century or more:
  // Deadline::never().
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
  // No deadline. For waits that another event is certain to end (a joined thread, a reaped child).
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  bool is_never() const { return when_ == Clock::time_point::max(); }
  bool expired() const { return !is_never() && Clock::now() >= when_; }
  Clock::time_point when() const { return when_; }

  // Time left. Zero if expired, nanoseconds::max() for never().
  std::chrono::nanoseconds remaining() const {
    if (is_never()) return std::chrono::nanoseconds::max();
    const auto now = Clock::now();  // compared first: the difference to a far past overflows
    return when_ > now ? when_ - now : std::chrono::nanoseconds::zero();
  }

  // Time left for poll(2) and epoll, rounded up so that a wait never returns just before the
  // deadline. -1 for never().
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

// Time limit in an options struct: not set, a duration, or a Deadline. A duration counts from the
// start of each call that uses the options ({.timeout = 5s}). Not set: the call uses the default of
// its group or session. A value type.
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
  // Time left from now. nullopt: not set. nanoseconds::max(): no limit.
  std::optional<std::chrono::nanoseconds> left() const {
    if (const auto* deadline = std::get_if<Deadline>(&value_)) return deadline->remaining();
    if (const auto* duration = std::get_if<std::chrono::nanoseconds>(&value_)) return *duration;
    return std::nullopt;
  }
  // Deadline of a call that starts now. Returns `own` if no limit is set.
  Deadline deadline(const Deadline& own) const {
    if (const auto* deadline = std::get_if<Deadline>(&value_)) return *deadline;
    if (const auto* duration = std::get_if<std::chrono::nanoseconds>(&value_)) return *duration;
    return own;
  }

 private:
  std::variant<std::monostate, std::chrono::nanoseconds, Deadline> value_;
};

}  // namespace convoy
