#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "base/guarded.h"
#include "transport/endpoint.h"

namespace convoy::shm {

// Functions to be called at some time. From any thread.
class TimerQueue {
 public:
  using Clock = transport::Endpoint::Clock;
  using Id = transport::Endpoint::TimerId;

  Id add(Clock::time_point when, std::function<void()> function);
  // False: it was taken.
  bool cancel(Id id);
  // Of the first one; never: there is none.
  Deadline next();
  // Without the lock. The time of one that was cancelled counts until somebody takes what is due.
  bool is_due() const noexcept {
    const std::int64_t next = next_.load(std::memory_order_relaxed);
    return next != INT64_MAX && Clock::now().time_since_epoch().count() >= next;
  }
  // The first one, if its time has come; else nullptr.
  std::function<void()> take_due();

 private:
  struct State {
    std::map<std::pair<Clock::time_point, Id>, std::function<void()>> queue;
    std::map<Id, Clock::time_point> times;
    Id next = 1;
  };

  Guarded<State> state_;
  std::atomic<std::int64_t> next_{INT64_MAX};  // of steady_clock; never later than the first one
};

}  // namespace convoy::shm
