#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "base/guarded.h"

namespace convoy::launch {

// Writes to descriptors that may block (a terminal, a pipe somebody else also writes to, a slow
// disk) from a thread of its own, in the order of the calls. The descriptors stay as they are: to
// make a terminal non-blocking would change it for every process that shares it.
//
// write() never blocks; who calls it keeps an eye on queued(). Callable from one thread. The
// destructor waits for the queue; whoever must not wait calls abandon() first.
class Writer {
 public:
  struct Events {                                   // called on the writer's thread
    std::function<void(int fd, int error)> failed;  // once per descriptor; the rest is dropped
    std::function<void()> progress;                 // after each write: queued() has shrunk
  };

  Writer(const std::string& name, Events events);
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  ~Writer();

  void write(int fd, std::string bytes);
  // Bytes not yet written.
  std::size_t queued() const { return state_->queued.load(std::memory_order_relaxed); }
  // Drops the queue and all events. A thread that is stuck in a write is left behind: for a
  // process that is about to _exit.
  void abandon();

 private:
  struct Item {
    int fd;
    std::string bytes;
  };
  struct Queue {
    std::deque<Item> items;
    bool closed = false;
    Events events;
  };
  // Shared with the thread, which may outlive the object after abandon().
  struct State {
    Guarded<Queue> queue;
    std::atomic<std::size_t> queued{0};  // a hint for flow control, orders nothing: relaxed
  };

  static void run(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread thread_;  // not a jthread: abandon() detaches it
};

// Writes all of `bytes`, however long it takes. 0, or the errno that ended it.
int write_fully(int fd, std::string_view bytes);

}  // namespace convoy::launch
