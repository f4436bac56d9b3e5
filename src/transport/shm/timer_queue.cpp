#include "transport/shm/timer_queue.h"

namespace convoy::shm {

TimerQueue::Id TimerQueue::add(Clock::time_point when, std::function<void()> function) {
  auto state = state_.lock();
  const Id id = state->next++;
  state->queue.emplace(std::pair(when, id), std::move(function));
  state->times[id] = when;
  next_.store(state->queue.begin()->first.first.time_since_epoch().count());
  return id;
}

bool TimerQueue::cancel(Id id) {
  auto state = state_.lock();
  const auto found = state->times.find(id);
  if (found == state->times.end()) return false;
  state->queue.erase({found->second, id});
  state->times.erase(found);
  return true;
}

Deadline TimerQueue::next() {
  auto state = state_.lock();
  if (state->queue.empty()) return Deadline::never();
  return Deadline::at(state->queue.begin()->first.first);
}

std::function<void()> TimerQueue::take_due() {
  std::function<void()> function;
  auto state = state_.lock();
  const auto next = state->queue.begin();
  if (next != state->queue.end() && next->first.first <= Clock::now()) {
    function = std::move(next->second);
    state->times.erase(next->first.second);
    state->queue.erase(next);
  }
  next_.store(state->queue.empty() ? INT64_MAX
                                   : state->queue.begin()->first.first.time_since_epoch().count());
  return function;
}

}  // namespace convoy::shm
