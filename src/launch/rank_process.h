#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "launch/environment.h"
#include "launch/outcome.h"
#include "os/flight_log.h"
#include "os/process.h"
#include "os/segment.h"
#include "store/server.h"

namespace convoy::launch {

class Output;
class StdinFeed;

// What starting a rank needs of its surroundings.
struct RankSetting {
  const RunOptions& options;
  const JobContext& job;
  const Environment& inherited;
  StoreServer& store;
  Output& output;
  StdinFeed* stdin_feed;                         // nullptr: nobody reads
  const std::vector<std::vector<int>>& pinning;  // cores by rank; empty: not pinned
};

// One rank: its process, and how it ended. Used by the supervisor's main thread only, which lives
// as long as the process: the rank is killed by the kernel when that thread ends.
class RankProcess {
 public:
  using Clock = std::chrono::steady_clock;

  // Throws as ChildProcess::spawn.
  RankProcess(int rank, const RankSetting& setting);

  int rank() const { return rank_; }
  pid_t pid() const { return child_.pid(); }
  int pidfd() const { return child_.pidfd(); }
  bool running() const { return child_.running(); }

  // Reaps it once it has ended; nullopt as long as it runs.
  std::optional<ExitStatus> try_wait();

  // To the process and what it started in its process group.
  void signal_group(int signal);
  // To the process alone.
  void signal(int signal) { child_.kill(signal); }
  // Asks it to end; a stopped one is continued, or it could not.
  void ask_to_end(int signal);
  void kill();

  RankOutcome outcome(Clock::time_point job_start) const;
  // What it did last, as far as it is one of ours; also once it has ended.
  std::optional<flight::Log> flight_log() const;

 private:
  int rank_;
  Segment flight_;  // the rank's flight record, which outlives it; none: no memory
  ChildProcess child_;
  std::optional<ExitStatus> status_;
  Clock::time_point ended_{};
  int asked_by_ = 0;
  bool killed_ = false;
};

}  // namespace convoy::launch
