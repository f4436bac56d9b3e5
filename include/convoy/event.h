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

// An operation of a group that has ended, as a listener is told of it.
struct Event {
  using Clock = std::chrono::steady_clock;

  std::string operation;       // "all_reduce"
  std::string group;           // its name
  std::uint64_t sequence = 0;  // of the collective in its group, from 1; messages count apart
  std::size_t bytes = 0;       // that this rank gives or gets, whichever is more
  Clock::time_point start;     // when it was called
  Clock::time_point end;
  std::exception_ptr error;  // nullptr: it went well
  CallSite where;            // of the call; without a file where it came through c10d
};

using EventCallback = std::function<void(const Event&)>;

class EventListener;

// Keeps a listener registered while it exists. Movable; may be empty. Thread-safe except for moves.
class [[nodiscard]] EventHandle {
 public:
  EventHandle() = default;
  explicit EventHandle(std::shared_ptr<EventListener> listener) : listener_(std::move(listener)) {}
  EventHandle(EventHandle&&) noexcept = default;
  EventHandle& operator=(EventHandle&& other) noexcept;
  ~EventHandle() { remove(); }

  explicit operator bool() const { return listener_ != nullptr; }
  // No call begins after this, and those under way on other threads have ended. Idempotent; the
  // callback itself may do it, too.
  void remove() noexcept;

 private:
  std::shared_ptr<EventListener> listener_;
};

}  // namespace convoy
