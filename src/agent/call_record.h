#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "agent/call.h"
#include "agent/functions.h"
#include "base/id.h"
#include "os/flight_recorder.h"

namespace convoy::agent {

// What an agent tells the process's flight record of the calls that it makes and serves. Takes
// times that the agent has anyway: a call costs some 20 ns. Thread-safe once it has joined.
class CallRecord {
 public:
  using Ticket = std::uint64_t;  // 0: it is not recorded
  using Time = flight::Clock::time_point;

  CallRecord() = default;
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;
  ~CallRecord();

  // Before, nothing is recorded. `workers` by rank.
  void join(const Id& session, WorkerId self, const std::vector<std::string>& workers) noexcept;
  // One more.
  void add_worker(WorkerId id, const std::string& name) noexcept;

  // --- calls of ours ---

  // It goes at once.
  Ticket sends(WorkerId to, FunctionId function, std::uint64_t number, Time now) noexcept {
    if (group_ == 0) return 0;
    return recorder_->begin_call({.group = group_,
                                  .number = number,
                                  .function = text_of(function),
                                  .peer = static_cast<int>(to)},
                                 now, /*started=*/true);
  }
  // It does not: there is no room, or no connection yet.
  void queues(Ticket ticket) noexcept {
    if (ticket != 0) recorder_->delay_call(ticket);
  }
  // It has gone.
  void sent(Ticket ticket, Time now) noexcept { began(ticket, now); }

  // While one lives, this thread waits for other workers: `what` is "barrier" of all of them, or
  // "barrier of 2 workers". One within another is part of it.
  class Together {
   public:
    Together(CallRecord& record, std::string_view what) noexcept;
    Together(const Together&) = delete;
    Together& operator=(const Together&) = delete;
    ~Together();

   private:
    CallRecord& record_;
    const int errors_ = std::uncaught_exceptions();
    const bool outer_;
    Ticket ticket_ = 0;
  };

  // --- others' ---

  // It waits for a thread.
  Ticket arrives(WorkerId from, FunctionId function, std::uint64_t number, Time now) noexcept {
    if (group_ == 0) return 0;
    return recorder_->begin_call({.group = group_,
                                  .number = number,
                                  .function = text_of(function),
                                  .peer = static_cast<int>(from),
                                  .served = true},
                                 now, /*started=*/false);
  }
  void began(Ticket ticket, Time now) noexcept {
    if (ticket != 0) recorder_->start_call(ticket, now);
  }

  // --- backward passes ---

  // One of ours, or (root) our part in another's. It waits, until it began(); queues(): it waits
  // for gradients again.
  Ticket takes_part(std::optional<WorkerId> root, std::uint64_t number, Time now) noexcept;

  // Of all of them.
  enum class End { kWell, kFailed };
  void ended(Ticket ticket, End how, Time now) noexcept {
    if (ticket == 0) return;
    recorder_->end_call(
        ticket, how == End::kWell ? flight::State::kCompleted : flight::State::kFailed, now);
  }

 private:
  static std::uint64_t text_of(FunctionId function) noexcept;

  flight::Recorder* recorder_ = nullptr;
  std::uint64_t group_ = 0;
};

}  // namespace convoy::agent
