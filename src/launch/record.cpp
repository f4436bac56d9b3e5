#include "launch/record.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>

#include "base/error.h"
#include "launch/writer.h"
#include "os/file.h"
#include "os/flight_calls.h"
#include "os/flight_dump.h"

namespace convoy::launch {
namespace {

std::string as_json(const std::vector<flight::Log>& logs) {
  std::string text = "[";
  for (const auto& log : logs) {
    if (&log != &logs.front()) text += ",\n";
    text += flight::to_json(log, logs);
  }
  return text + "]\n";
}

// Of a rank without collectives: "2 calls, 1 backward pass and 1 handler under way".
std::string describe_calls(const flight::Log& log) {
  std::size_t made = 0;
  std::size_t passes = 0;
  std::size_t served = 0;
  for (const auto& call : log.calls) {
    if (!call.over()) ++(call.pass ? passes : call.served ? served : made);
  }
  const std::string in_passes =
      passes == 0 ? "" : concat(", ", passes, passes == 1 ? " backward pass" : " backward passes");
  return concat(made, made == 1 ? " call" : " calls", in_passes, " and ", served,
                served == 1 ? " handler" : " handlers", " under way");
}

std::string as_text(const std::vector<flight::Log>& logs, std::size_t last) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const flight::Calls calls(logs);
  std::string text;
  for (const auto& log : logs) {
    text += concat("rank ", log.rank.value_or(0), ", pid ", log.pid, ": ",
                   log.entries.empty() && !log.calls.empty()
                       ? describe_calls(log)
                       : flight::describe_activity(log, log.latest(), now),
                   "\n");
    for (const auto& line : flight::last_operations(log, last, now)) {
      text += concat("  | ", line, "\n");
    }
    for (const auto& line : flight::last_calls(log, last, now)) text += concat("  | ", line, "\n");
    for (const auto& line : flight::calls_under_way(log, calls, last, now)) {
      text += concat("  ", line, "\n");
    }
    for (const auto& line : flight::who_waits_for(log, logs)) {
      text += concat("  waited for by ", line, "\n");
    }
  }
  return text;
}

// "4 ranks, pids 4711, 4712, 4713, 4714: python3 train.py".
std::string describe_job(const std::vector<flight::Log>& logs) {
  if (logs.empty()) return "no rank has made a group yet";
  constexpr std::size_t kMost = 8;
  constexpr std::size_t kLongest = 60;
  std::string pids;
  for (std::size_t i = 0; i < std::min(logs.size(), kMost); ++i) {
    pids += concat(i == 0 ? "" : ", ", logs[i].pid);
  }
  if (logs.size() > kMost) pids += ", ...";
  const bool one = logs.size() == 1;
  std::string program =
      read_file(concat("/proc/", logs.front().pid, "/cmdline")).value_or("");  // words end in 0
  while (program.ends_with('\0')) program.pop_back();
  std::replace_if(
      program.begin(), program.end(), [](unsigned char c) { return std::iscntrl(c) != 0; }, ' ');
  if (program.size() > kLongest) program = program.substr(0, kLongest) + " ...";
  return concat(logs.size(), one ? " rank, pid " : " ranks, pids ", pids,
                program.empty() ? "" : ": ", program);
}

std::string list_jobs() {
  const auto jobs = flight::read_all_jobs();
  if (jobs.empty()) return "no job of this user is running here\n";
  std::string text;
  for (const auto& [name, logs] : jobs) text += concat(name, ": ", describe_job(logs), "\n");
  return text + "\n'convoy record JOB' shows what its ranks do\n";
}

}  // namespace

int run_record(const RecordOptions& options) {
  if (options.job.empty()) return write_fully(STDOUT_FILENO, list_jobs()) == 0 ? 0 : 1;
  const auto logs = flight::read_job(options.job);
  if (logs.empty()) {
    fail(ErrorKind::kInvalidArgument, "convoy record: no rank of a job '", options.job,
         "' is running here under this user, or none has made a group yet; give the job's name "
         "(--job-id, CONVOY_JOB_ID) or the process number of its launcher or of a rank");
  }
  if (!options.folder.empty()) {
    flight::write_dumps(options.folder, logs);
    return write_fully(STDOUT_FILENO,
                       concat("wrote ", options.folder, "/rank_<r> and <r>.json of ", logs.size(),
                              " ranks; torchfrtrace ", options.folder, " compares them\n")) == 0
               ? 0
               : 1;
  }
  if (!options.trace.empty()) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    write_file(options.trace, flight::to_trace(logs, now), 0644);
    return write_fully(STDOUT_FILENO,
                       concat("wrote ", options.trace, " of ", logs.size(),
                              " ranks; open it in Perfetto or chrome://tracing\n")) == 0
               ? 0
               : 1;
  }
  const auto last = static_cast<std::size_t>(options.last);
  return write_fully(STDOUT_FILENO, options.json ? as_json(logs) : as_text(logs, last)) == 0 ? 0
                                                                                             : 1;
}

}  // namespace convoy::launch
