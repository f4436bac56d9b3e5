#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/guarded.h"
#include "convoy/deadline.h"
#include "transport/endpoint.h"

namespace convoy::agent {

// When calls are looked at for their time being over: one timer of the endpoint, at the earliest of
// the times that were asked for since it fired. Any thread sets it; it fires on the thread that
// serves. `soonest_` is a copy of Timer::when for those who need not set it: mostly all do not.
class CallTimer {
 public:
  using Time = Deadline::Clock::time_point;

  // It fires by then.
  bool is_set_by(Time when) const noexcept {
    return when.time_since_epoch().count() >= soonest_.load(std::memory_order_relaxed);
  }
  // `function` is called at `when` or before, and calls has_fired().
  void set(transport::Endpoint& endpoint, Time when, std::function<void()> function) {
    auto timer = timer_.lock();
    if (when >= timer->when) return;
    if (timer->id != 0) endpoint.cancel(timer->id);
    timer->when = when;
    soonest_.store(when.time_since_epoch().count(), std::memory_order_relaxed);
    timer->id = endpoint.call_at(when, std::move(function));
  }
  void has_fired() {
    auto timer = timer_.lock();
    timer->when = Time::max();
    timer->id = 0;
    soonest_.store(INT64_MAX, std::memory_order_relaxed);
  }

 private:
  struct Timer {
    Time when = Time::max();
    transport::Endpoint::TimerId id = 0;
  };
  std::atomic<Deadline::Clock::rep> soonest_{INT64_MAX};
  Guarded<Timer> timer_;
};

}  // namespace convoy::agent
