#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "base/guarded.h"

namespace convoy::shm {

// The threads that serve an endpoint. One has the turn; others stand in calls that have handed
// over, or are idle. A turn is a number: whoever finds that his is over stops to serve, and waits
// for another one.
class Servants {
 public:
  // The first of them. serve(turn) is called for each turn that a thread gets, until that is over.
  void start(std::function<void(std::uint64_t turn)> serve);
  // No turn goes on; then whoever has it is woken; then join().
  void stop() noexcept { stopping_.store(true); }
  void join() noexcept;

  bool has_turn(std::uint64_t turn) const noexcept {
    return !stopping_.load() && turn_.load(std::memory_order_relaxed) == turn;
  }
  // Ends the turn, and begins one for another thread. Under the lock under which letters are taken:
  // whoever takes them has looked whose turn it is. False: nothing has changed, since one that was
  // offered is not taken yet, or there is no other thread.
  bool offer_turn() noexcept;
  // After that, without the lock.
  void announce_turn() noexcept { state_.notify(); }

 private:
  struct State {
    std::vector<std::thread> threads;
    std::uint64_t turn = 1;  // of the thread that serves
    bool taken = true;       // somebody has this turn
    int idle = 0;
    bool stop = false;
  };

  void take_turns();

  std::atomic<bool> stopping_{false};
  std::atomic<std::uint64_t> turn_{1};  // State::turn, for looks without the lock
  std::function<void(std::uint64_t)> serve_;
  Guarded<State> state_;
};

}  // namespace convoy::shm
