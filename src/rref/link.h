#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "convoy/deadline.h"
#include "rref/records.h"

namespace convoy::rref {

using Time = Deadline::Clock::time_point;

struct LinkTimes {
  std::chrono::nanoseconds lazy =
      std::chrono::microseconds(500);  // what is not urgent waits for more
  std::chrono::nanoseconds acknowledge = std::chrono::milliseconds(5);
  std::chrono::nanoseconds first_retry = std::chrono::milliseconds(50);
  std::chrono::nanoseconds last_retry = std::chrono::seconds(1);
};

// Records to and from one incarnation of a worker: each is taken once, in order, whatever happens
// to letters, as long as some arrive. They are numbered; the receiver says how far it is; what it
// does not say it has is sent again. Neither has threads nor reads clocks.
class Link {
 public:
  Link(Incarnation from, Incarnation to, const LinkTimes& times)
      : from_(from), to_(to), times_(times) {}

  enum class When { kNow, kLazy };
  void put(const Record& record, When when, Time now);

  // What is due by now.
  using Send = FunctionRef<void(std::string&& letter)>;
  void collect(Time now, Send send);
  // When collect() has something to do; max(): never.
  Time next() const;
  // The connection is a new one: what was not taken goes again, at once.
  void reconnected(Time now);

  // The records of a letter that are new, in order.
  std::vector<Record> hear(ReferenceLetter&& letter, Time now);

  // Everything was taken.
  bool idle() const { return out_.empty(); }
  std::size_t unacknowledged() const { return out_.size(); }
  std::uint64_t acknowledged() const { return first_ - 1; }
  std::uint64_t records_sent() const { return next_number_ - 1; }
  std::uint64_t records_taken() const { return taken_; }

 private:
  void send_letters(std::size_t from, Send send);

  const Incarnation from_;
  const Incarnation to_;
  const LinkTimes times_;
  std::deque<std::string> out_;  // that were not acknowledged; the first is number first_
  std::uint64_t first_ = 1;
  std::uint64_t next_number_ = 1;
  std::size_t sent_ = 0;      // of these
  Time due_ = Time::max();    // of those that were not sent
  Time retry_ = Time::max();  // of those that were
  std::chrono::nanoseconds pause_{};
  std::uint64_t taken_ = 0;  // of the other's
  Time acknowledge_ = Time::max();
};

}  // namespace convoy::rref
