#pragma once

// The waiting of Engine: included by the files that implement it.

#include "coll/engine.h"

namespace convoy::coll {

template <class Ready, class Blocker, class Lagging>
void Engine::wait(const Running& running, Ready ready, Blocker blocker, Lagging lagging) {
  // A failed wait looks at the flags once more after the reason to fail is known: what a dead rank
  // had set before it died counts, so all survivors see the same operations complete.
  const auto give_up_if_hopeless = [&]() -> bool {
    if (!troubled()) return false;
    const int culprit = blocker();
    if (ready()) return true;
    check_failed(running);
    if (culprit >= 0) fail_peer(running, culprit);
    // Whoever is waited for may come late: nobody waits for it to hear of a death.
    const int dead = casualty(running.number);
    if (dead >= 0 && give_up_together(running.number, ready)) fail_peer(running, dead);
    return false;
  };
  // The first looks follow at once: pauses between them would be most of what a small operation
  // takes.
  constexpr int kEager = 32;
  for (int i = 0; i < policy_.spins; ++i) {
    if (ready()) return;
    if (i >= kEager) cpu_relax();
    if ((i & 63) == 63 && give_up_if_hopeless()) return;
  }
  for (int i = 0; i < policy_.yields; ++i) {
    if (ready()) return;
    if (give_up_if_hopeless()) return;
    yield_cpu();
  }
  WaitWord& bell = group().bell;
  for (;;) {
    {
      const Announcement here(bell);
      if (ready() || give_up_if_hopeless()) return;
      here.sleep(nap(running));
    }
    if (ready() || give_up_if_hopeless()) return;
    if (call_deadline(running).expired()) fail_late(running, lagging());
  }
}

// Whoever completes an operation has set its flag before it looks at `doubted`. This one writes
// `doubted` before it looks at the flags. Both have a fence in between (the other one's is in
// ring_sleepers). So either this one sees the flag, or the other one sees the doubt and asks what
// was decided: tests/model/wait.pml.
template <class Ready>
bool Engine::give_up_together(std::uint64_t number, Ready ready) {
  std::uint64_t seen = group().doubted.load(std::memory_order_acquire);
  while (seen < number && !group().doubted.compare_exchange_weak(seen, number)) {
  }
  full_fence();
  return !ready() && !decide(number, false);
}

template <class Flag>
void Engine::wait_all(const Running& running, Flag flag) {
  const auto ready = [&] {
    for (int r = 0; r < size_; ++r) {
      if (!flag(r)) return false;
    }
    return true;
  };
  const auto blocker = [&] {
    for (int r = 0; r < size_; ++r) {
      if (!flag(r) && gone(r, running.number) && !flag(r)) return r;
    }
    return -1;
  };
  const auto lagging = [&] {
    std::vector<int> ranks;
    for (int r = 0; r < size_; ++r) {
      if (!flag(r)) ranks.push_back(r);
    }
    return ranks;
  };
  wait(running, ready, blocker, lagging);
}

// Runs operation(way) of a large operation; rank 0 notes how long it took.
template <class Operation>
void Engine::tuned(const Running& running, Route route, Operation operation) {
  const Way way = chosen(running, route);
  if (!tuner_) return operation(way);
  const auto start = Deadline::Clock::now();
  operation(way);
  tuner_->record(tuned_kind(*running.call), route, running.call->bytes(), way,
                 Deadline::Clock::now() - start);
}

}  // namespace convoy::coll
