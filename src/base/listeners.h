#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "base/guarded.h"
#include "convoy/event.h"

namespace convoy {

// Those who want to hear of a group's operations. Thread-safe. Made by make_shared.
class Listeners : public std::enable_shared_from_this<Listeners> {
 public:
  EventHandle add(EventCallback callback);
  // Cheap: so that without a listener no Event is made.
  bool any() const { return count_.load(std::memory_order_acquire) != 0; }
  // Calls all of them, on this thread and without a lock. What they throw is logged.
  void tell(const Event& event);

 private:
  friend class EventListener;
  void drop(const EventListener& listener);

  Guarded<std::vector<std::shared_ptr<EventListener>>> all_;
  std::atomic<std::size_t> count_{0};
};

// One of them.
class EventListener {
 public:
  EventListener(std::weak_ptr<Listeners> owner, EventCallback callback)
      : owner_(std::move(owner)), callback_(std::move(callback)) {}

  void call(const Event& event);
  void remove() noexcept;

 private:
  struct State {
    bool removed = false;
    std::vector<std::thread::id> callers;  // who is in the callback
  };

  const pid_t process_ = ::getpid();  // a forked child has none of the callers
  const std::weak_ptr<Listeners> owner_;
  const EventCallback callback_;
  Guarded<State> state_;
};

}  // namespace convoy
