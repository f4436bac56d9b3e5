#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "base/listeners.h"
#include "coll/call.h"
#include "convoy/call_site.h"
#include "os/flight_recorder.h"
#include "os/quick_clock.h"

namespace convoy::coll {

class Medium;
struct Transfer;

// What one rank of a group tells of its operations: always to the process's flight record, and to
// listeners if there are any. Thread-safe.
class Observer {
 public:
  using Clock = flight::Clock;

  explicit Observer(Medium& medium);
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;
  ~Observer();

  // An operation between its call and its end; a value for its owner to keep.
  struct Seen {
    flight::Recorder::Ticket ticket = 0;
    std::string_view operation = {};
    std::uint64_t number = 0;
    std::size_t bytes = 0;
    Clock::time_point called = {};
    CallSite where = {};
  };
  enum class Turn { kNow, kLater };
  Seen begin(const Call& call, std::uint64_t number, Clock::time_point now, Turn turn) noexcept;
  Seen begin(const Transfer& transfer, Clock::time_point now = QuickClock::now()) noexcept;
  // Its turn has come.
  void start(const Seen& seen) noexcept;
  // On the thread that ended it, before anybody else is told.
  void end(const Seen& seen, const std::exception_ptr& error = nullptr) noexcept;
  // A message that was done at once.
  void note(const Transfer& transfer) noexcept;

  // See EventCallback. Must neither throw nor wait for this group.
  EventHandle on_event(EventCallback callback) { return listeners_->add(std::move(callback)); }

 private:
  void end(const Seen& seen, const std::exception_ptr& error, Clock::time_point now) noexcept;
  void tell(const Seen& seen, const std::exception_ptr& error, Clock::time_point now) noexcept;

  const std::string name_;
  const std::uint64_t size_;
  flight::Recorder& recorder_;
  const std::uint64_t group_;  // in the flight record
  std::atomic<std::uint64_t> messages_{0};
  const std::shared_ptr<Listeners> listeners_ = std::make_shared<Listeners>();
};

}  // namespace convoy::coll
