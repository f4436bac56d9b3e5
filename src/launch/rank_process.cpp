#include "launch/rank_process.h"

#include <signal.h>

#include "convoy/error.h"
#include "launch/output.h"
#include "launch/stdin_feed.h"
#include "os/flight_recorder.h"

namespace convoy::launch {
namespace {

// Above so many ranks their memory would be missed: each then has its own.
constexpr int kMostRecorded = 256;
// With --trace: 16 MB a rank.
constexpr std::size_t kTracedCalls = std::size_t{1} << 18;

Segment make_flight_memory(int rank, const RankSetting& setting) {
  if (setting.options.ranks > kMostRecorded) return {};
  try {
    const bool traced = !setting.options.trace.empty();
    return flight::make_memory(setting.job.id, rank, traced ? kTracedCalls : flight::kCalls);
  } catch (const Error&) {  // the job can do without
    return {};
  }
}

ChildProcess spawn(int rank, const RankSetting& setting, const Segment& flight) {
  const UniqueFd store = setting.store.connect();
  const UniqueFd out = setting.output.open(rank, Channel::kOut);
  const UniqueFd err = setting.output.open(rank, Channel::kErr);
  UniqueFd in;
  const RunOptions& options = setting.options;
  if (setting.stdin_feed && (options.stdin_mode == StdinMode::kAll || options.stdin_rank == rank)) {
    in = setting.stdin_feed->add(rank);
  }
  SpawnOptions spawn;
  spawn.arguments = options.program;
  spawn.environment = to_list(rank_environment(setting.inherited, options, setting.job, rank));
  spawn.environment->push_back(store_environment(store.get()));
  spawn.working_folder = options.working_folder;
  spawn.inherited = {store.get()};
  if (flight) {
    spawn.environment->push_back(flight::flight_environment(flight.fd()));
    spawn.inherited.push_back(flight.fd());
  }
  spawn.standard_input = in.get();
  spawn.standard_output = out.get();
  spawn.standard_error = err.get();
  spawn.death_signal = SIGKILL;
  spawn.own_process_group = true;
  if (!setting.pinning.empty()) spawn.cores = setting.pinning[static_cast<std::size_t>(rank)];
  return ChildProcess::spawn(spawn);
}

}  // namespace

RankProcess::RankProcess(int rank, const RankSetting& setting)
    : rank_(rank),
      flight_(make_flight_memory(rank, setting)),
      child_(spawn(rank, setting, flight_)) {}

std::optional<flight::Log> RankProcess::flight_log() const {
  if (!flight_) return std::nullopt;
  return flight::read(flight_.data(), flight_.size());
}

std::optional<ExitStatus> RankProcess::try_wait() {
  if (status_) return status_;
  status_ = child_.wait(Deadline::after(std::chrono::seconds(0)));
  if (status_) ended_ = Clock::now();
  return status_;
}

void RankProcess::signal_group(int signal) {
  // Not once it was reaped: its group may be empty and the number in use by a stranger.
  if (running()) child_.kill_group(signal);
}

void RankProcess::ask_to_end(int signal) {
  if (!running()) return;
  asked_by_ = signal;
  signal_group(signal);
  signal_group(SIGCONT);
}

void RankProcess::kill() {
  if (!running()) return;
  killed_ = true;
  signal_group(SIGKILL);
}

RankOutcome RankProcess::outcome(Clock::time_point job_start) const {
  RankOutcome result;
  result.rank = rank_;
  result.pid = child_.pid();
  result.status = status_;
  result.asked_by = asked_by_;
  if (killed_ && (!status_ || status_->signal == SIGKILL)) {
    result.ending = Ending::kKilled;
  } else if (asked_by_ != 0) {
    result.ending = Ending::kAsked;
  }
  if (status_) result.lived = ended_ - job_start;
  return result;
}

}  // namespace convoy::launch
