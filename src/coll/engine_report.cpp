// What Engine says of ranks that do not come.
#include "base/concat.h"
#include "coll/engine.h"
#include "os/flight_log.h"
#include "os/flight_recorder.h"
#include "os/process.h"

namespace convoy::coll {
namespace {

// Of one that can do nothing; empty for one that runs or waits.
std::string describe_state(char state) {
  switch (state) {
    case 'T': return "is stopped (SIGSTOP, or Ctrl-Z; continue it with SIGCONT)";
    case 't': return "is stopped by a debugger";
    case 'D': return "is blocked in the kernel (a disk or network file system?)";
    case 'Z':
    case 'X': return "has ended";
    default: return "";
  }
}

}  // namespace

// From its flight record, which needs nothing of the rank itself: it may be stopped. Empty if it
// cannot be read.
std::string Engine::describe_activity(int rank) const {
  const bool self = mesh_->is_self(rank);
  std::optional<flight::Log> log;
  if (self) {
    const flight::Ring* ring = flight::Recorder::instance().ring();
    if (ring) log = flight::read(*ring);  // without its calls
  } else if (const auto fd = head(rank).flight.load(std::memory_order_relaxed); fd != 0) {
    log = flight::read_process(mesh_->process(rank).pid, static_cast<int>(fd - 1),
                               head(rank).flight_inode.load(std::memory_order_relaxed));
  }
  if (!log) return "";
  const auto now = Deadline::Clock::now().time_since_epoch();
  // Ranks that are threads of one process share the record.
  const auto* latest = self ? log->latest(std::pair(name_, rank)) : log->latest();
  return flight::describe_activity(*log, latest, now);
}

std::string Engine::describe_late(int rank, const std::string& missing) const {
  const auto& process = mesh_->process(rank);
  std::string text = concat("rank ", rank, " (pid ", process.pid, ") ");
  const auto state = mesh_->is_self(rank) ? 'S' : process_state(process.pid).value_or('X');
  const std::string stuck = describe_state(state);
  text += stuck.empty() ? missing : stuck;
  if (state == 'Z' || state == 'X') return text;
  const std::string activity = describe_activity(rank);
  return activity.empty() ? text : concat(text, ": ", activity);
}

void Engine::fail_late(const Running& running, const std::vector<int>& late) {
  *late_ranks_.lock() = late;
  std::string text = "Timed out waiting";
  for (const int r : late) {
    const bool arrived =
        slot(r, running.number).arrived.load(std::memory_order_acquire) >= running.number;
    text += concat("; ",
                   describe_late(r, arrived ? "arrived, but did not finish" : "has not called it"));
  }
  text += concat("; last completed #", running.number - 1);
  fail_run(running, ErrorKind::kTimeout, text);
}

}  // namespace convoy::coll
