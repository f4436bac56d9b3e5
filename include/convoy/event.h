#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "convoy/call_site.h"

namespace convoy {

// Describes an operation of a group that has ended, for listeners.
struct Event {
  using Clock = std::chrono::steady_clock;

  std::string operation;       // for example "all_reduce"
  std::string group;           // name of the group
  std::uint64_t sequence = 0;  // number of the collective in its group, from 1; not of messages
  std::size_t bytes = 0;       // bytes that this rank sends or receives, whichever is more
  Clock::time_point start;     // time of the call
  Clock::time_point end;
  std::exception_ptr error;  // nullptr: success
  CallSite where;            // location of the call; no file if it came through c10d
};

using EventCallback = std::function<void(const Event&)>;

class EventListener;

// Keeps a listener registered; the destructor removes it. Movable; may be empty. Thread-safe,
// except for moves.
class [[nodiscard]] EventHandle {
 public:
  EventHandle() = default;
  explicit EventHandle(std::shared_ptr<EventListener> listener) : listener_(std::move(listener)) {}
  EventHandle(EventHandle&&) noexcept = default;
  EventHandle& operator=(EventHandle&& other) noexcept;
  ~EventHandle() { remove(); }

  explicit operator bool() const { return listener_ != nullptr; }
  // Removes the listener. Afterwards no call of it begins. Blocks until calls on other threads have
  // returned. Idempotent. The callback itself may call it.
  void remove() noexcept;

 private:
  std::shared_ptr<EventListener> listener_;
};

}  // namespace convoy
