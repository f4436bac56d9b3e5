#include "autograd/pass_record.h"

#include <optional>

#include "os/flight_recorder.h"

namespace convoy::autograd::detail {

void PassRecord::begins(agent::CallRecord& session, const PassId& id, bool is_root) noexcept {
  ticket_ = session.takes_part(is_root ? std::nullopt : std::optional(id.root), id.number,
                               flight::Clock::now());
}

// The session may have ended meanwhile: its records were ended then, and the process's stays.
void PassRecord::runs() noexcept {
  if (const auto ticket = ticket_.load()) {
    flight::Recorder::instance().start_call(ticket, flight::Clock::now());
  }
}

void PassRecord::waits() noexcept {
  if (const auto ticket = ticket_.load()) flight::Recorder::instance().delay_call(ticket);
}

void PassRecord::ends(End how) noexcept {
  const auto ticket = ticket_.exchange(0);
  if (ticket == 0) return;
  flight::Recorder::instance().end_call(
      ticket, how == End::kWell ? flight::State::kCompleted : flight::State::kFailed,
      flight::Clock::now());
}

}  // namespace convoy::autograd::detail
