#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/loop.h"
#include "launch/environment.h"
#include "launch/oom.h"
#include "launch/outcome.h"
#include "launch/output.h"
#include "launch/rank_process.h"
#include "launch/stdin_feed.h"
#include "launch/supervisor.h"
#include "launch/sweep.h"
#include "os/signal_fd.h"
#include "store/server.h"

namespace convoy::launch {

// The supervisor's work: a state machine on one loop.
//
//   running --first failure--> settling --100 ms--> ending --grace--> killing
//      |                           |                   |                 |
//      +------- all ranks ended ---+-------------------+-----------------+--> sweeping --> flushing
//
// settling: ranks that fail nearly at once are told apart by the order of their deaths. ending:
// ranks were asked by a signal. sweeping: processes that ranks left behind are ended. flushing: the
// last output and the report are on their way to a reader who may be slow.
class Job {
 public:
  Job(const RunOptions& options, const JobContext& context, const std::string& folder,
      Launcher launcher);

  // Throws if a rank cannot be started; those that were are killed by the destructor.
  void start_ranks();
  // Until nothing of the job is left. Returns the exit status.
  int run();
  // Gives up what is not yet written: nobody may be there to read it.
  void give_up_output();

 private:
  using Clock = std::chrono::steady_clock;
  enum class Phase { kRunning, kSettling, kEnding, kKilling, kSweeping, kFlushing };

  void watch_rank(RankProcess& rank);
  void watch_launcher();
  void watch_signals();

  void on_signal(int signal);
  void on_stop_signal(int signal);
  void on_rank_end(RankProcess& rank);
  void on_launcher_gone();
  void on_output_closed(Channel channel);
  void on_timeout();
  void on_unkillable();

  // The first cause wins; false: there was one.
  bool set_cause(Cause cause);
  void collect_ended();
  void end_ranks(int signal);
  void kill_ranks(const std::string& note);
  void say_what_is_awaited();
  void proceed_if_all_ended();
  void sweep();
  void flush();
  void complete_outcome();
  void note_calls(std::chrono::nanoseconds least);
  void add_flight_records();
  void write_trace();
  void report();
  std::vector<flight::Log> flight_logs() const;
  void call_after(std::chrono::nanoseconds delay, void (Job::*step)());
  std::vector<int> running_ranks() const;
  std::set<pid_t> running_pids() const;

  const RunOptions options_;
  const JobContext context_;
  const std::string folder_;
  Launcher launcher_;
  const Environment inherited_;
  const Clock::time_point start_;
  const OomCounts oom_before_;

  Loop loop_;
  SignalFd signals_;
  StoreServer store_;
  Output output_;
  std::unique_ptr<StdinFeed> stdin_feed_;
  Sweep sweep_;
  std::vector<std::unique_ptr<RankProcess>> ranks_;
  std::set<int> unwatched_;  // ranks whose end was noticed

  Phase phase_ = Phase::kRunning;
  bool launcher_gone_ = false;
  Clock::time_point first_stop_{};  // when the first signal asked us to stop
  JobOutcome outcome_;
};

}  // namespace convoy::launch
