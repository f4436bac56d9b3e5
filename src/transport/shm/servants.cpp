#include "transport/shm/servants.h"

#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"

namespace convoy::shm {

void Servants::start(std::function<void(std::uint64_t)> serve) {
  serve_ = std::move(serve);
  auto state = state_.lock();
  state->threads.push_back(start_thread([this] {
    serve_(1);
    take_turns();
  }));
}

void Servants::join() noexcept {
  std::vector<std::thread> threads;
  {
    auto state = state_.lock();
    state->stop = true;
    threads.swap(state->threads);
  }
  state_.notify();
  for (std::thread& thread : threads) thread.join();
}

// Those that are offered, again and again.
void Servants::take_turns() {
  for (;;) {
    std::uint64_t turn = 0;
    {
      auto state = state_.lock();
      ++state->idle;
      state.wait(Deadline::never(), [&] { return state->stop || !state->taken; });
      --state->idle;
      if (state->stop) return;
      state->taken = true;
      turn = state->turn;
    }
    serve_(turn);
  }
}

bool Servants::offer_turn() noexcept {
  auto state = state_.lock();
  if (state->stop || !state->taken) return false;
  if (state->idle == 0) {
    try {
      state->threads.push_back(start_thread([this] { take_turns(); }));
    } catch (const std::exception& error) {
      // This thread goes on serving when its call returns.
      log_warn("an endpoint could not hand over to another thread: ", error.what());
      return false;
    }
  }
  state->taken = false;
  turn_.store(++state->turn);
  return true;
}

}  // namespace convoy::shm
