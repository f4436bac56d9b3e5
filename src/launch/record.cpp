#include "launch/record.h"

#include <unistd.h>

#include <chrono>

#include "base/error.h"
#include "launch/writer.h"
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

std::string as_text(const std::vector<flight::Log>& logs, std::size_t last) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  std::string text;
  for (const auto& log : logs) {
    text += concat("rank ", log.rank.value_or(0), ", pid ", log.pid, ": ",
                   flight::describe_activity(log, log.latest(), now), "\n");
    for (const auto& line : flight::last_operations(log, last, now)) {
      text += concat("  | ", line, "\n");
    }
    for (const auto& line : flight::who_waits_for(log, logs)) {
      text += concat("  waited for by ", line, "\n");
    }
  }
  return text;
}

}  // namespace

int run_record(const RecordOptions& options) {
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
  const auto last = static_cast<std::size_t>(options.last);
  return write_fully(STDOUT_FILENO, options.json ? as_json(logs) : as_text(logs, last)) == 0 ? 0
                                                                                             : 1;
}

}  // namespace convoy::launch
