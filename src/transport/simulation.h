#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/function_ref.h"
#include "transport/endpoint.h"

namespace convoy::transport {

struct WorldOptions {
  std::uint64_t seed = 0;
  // A letter is on its way for a time in between, drawn for each.
  std::chrono::nanoseconds least_delay = std::chrono::microseconds(1);
  std::chrono::nanoseconds most_delay = std::chrono::microseconds(100);
  // How long after a crash others hear of it, at most.
  std::chrono::nanoseconds most_detection = std::chrono::milliseconds(1);
  // Letters that may be on their way from one endpoint to another.
  std::size_t credit = 64;
  // What a crashed endpoint had on its way may be lost, from some letter on, as on a network. Not:
  // all of it arrives, as in shared memory.
  bool lose_tails = true;
};

// A world of endpoints in one process, with a time of its own: letters, timers, crashes and threads
// happen one at a time, in an order that follows from the seed. Time passes from event to event
// and costs nothing. The same program with the same seed runs the same way, so that protocols can
// be tried in millions of orders, and a failure can be looked at again.
//
// Not thread-safe: everything happens on the thread that calls step(), and on threads made by
// start(), of which one at a time has the baton. It must outlive its endpoints.
class World {
 public:
  using Clock = Deadline::Clock;

  explicit World(const WorldOptions& options = {});
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  // Threads that still wait are ended: their wait() throws kPeerLost.
  ~World();

  // A new endpoint. `name` is for messages.
  std::unique_ptr<Endpoint> join(Inbox& inbox, const std::string& name);
  // The endpoint stops as it is: it sends and hears nothing more, its timers do not run, the others
  // hear lost(). What comes back is another endpoint.
  void crash(Endpoint& endpoint);

  // A thread, for code that cannot be a state machine. It runs when the world lets it and gives the
  // baton back in wait() and at its end; what it throws comes out of step().
  void start(std::function<void()> function);

  // The next event. False: there is none; threads that wait will wait for ever.
  bool step();
  // Until ready(), at most so many events. False: it is not.
  bool run(FunctionRef<bool()> ready, std::uint64_t most_steps = UINT64_MAX);
  // Until nothing is left to happen.
  void run_out();
  // Threads that have not ended.
  std::size_t running() const;

  Clock::time_point now() const;
  // Runs as an event of its own, whatever happens to endpoints.
  void call_after(std::chrono::nanoseconds delay, std::function<void()> function);
  // Numbers that follow from the seed, for the program that runs in this world.
  std::uint64_t random(std::uint64_t below);

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace convoy::transport
