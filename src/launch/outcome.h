#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "os/process.h"

namespace convoy::launch {

// Why a job ended before all ranks were through.
enum class Cause {
  kNone,  // they were through
  kRankFailed,
  kSignal,        // somebody told the launcher to stop
  kTimeout,       // --timeout
  kOutputClosed,  // nobody reads our standard output or error any more
  kLauncherGone,  // the process the user started was killed
};

enum class Ending {
  kItself,  // of its own accord
  kAsked,   // after the launcher's signal
  kKilled,  // by the launcher's SIGKILL
};

struct RankOutcome {
  int rank = 0;
  pid_t pid = 0;
  std::optional<ExitStatus> status;  // nullopt: it could not be killed
  Ending ending = Ending::kItself;
  int asked_by = 0;                     // signal that asked it to end
  std::chrono::nanoseconds lived{};     // from the job's start to the rank's end
  std::vector<std::string> last_lines;  // of what it wrote
  std::string error_message;            // of its error file; empty: none
  std::string state_at_timeout;         // "sleeping"; only with Cause::kTimeout
  // Of its flight record: what it did last, and who waited for it.
  std::vector<std::string> last_operations;
  std::vector<std::string> calls;  // of RPC, that were under way
  std::vector<std::string> waited_for;
};

struct JobOutcome {
  Cause cause = Cause::kNone;
  int signal = 0;  // Cause::kSignal
  pid_t launcher = 0;
  std::string closed_output;           // Cause::kOutputClosed: "standard output"
  std::chrono::nanoseconds elapsed{};  // when the cause came up
  std::string kill_note = "killed";    // how ranks with Ending::kKilled came to it
  std::vector<RankOutcome> ranks;      // by rank
  std::vector<int> failed;             // those that failed of their own accord, first one first
  std::string kill_hint;               // about a SIGKILL that was not ours
  std::vector<std::string> calls;      // of RPC, that were under way when the job was ended
  std::vector<std::string> left_over;  // "sleep (pid 4711)": background processes that were ended
  std::vector<std::string> unkillable;
};

// What `convoy run` exits with.
int exit_code(const JobOutcome& outcome);
// The report: whole lines. Empty for a job that simply went well.
std::string make_report(const JobOutcome& outcome);

}  // namespace convoy::launch
