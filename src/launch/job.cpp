#include "launch/job.h"

#include <signal.h>
#include <sys/epoll.h>

#include <algorithm>

#include "base/error.h"
#include "launch/error_file.h"
#include "launch/text.h"
#include "launch/tuning.h"
#include "os/descendants.h"
#include "os/file.h"
#include "os/flight_calls.h"
#include "os/flight_dump.h"
#include "store/ended.h"

namespace convoy::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSettling{100};
// Wrappers pass Ctrl-C on to a launcher that the terminal has told already: not a second one.
constexpr milliseconds kSameStop{250};
constexpr milliseconds kPatience{1000};      // before we say whom we wait for
constexpr milliseconds kGiveUp{10'000};      // a process that SIGKILL does not end
constexpr std::size_t kOperationsShown = 5;  // of the flight record of a rank that failed
constexpr std::size_t kCallsShown = 20;      // of a job that hangs
constexpr milliseconds kLongCall{1000};      // one that may be why somebody stopped the job
constexpr milliseconds kOldFailure{10'000};  // one before the end of a rank is not its cause
constexpr milliseconds kLastWords{2000};     // for the report when nobody may be there to read it

std::vector<int> with_child_signal(std::vector<int> signals) {
  signals.push_back(SIGCHLD);
  return signals;
}

OutputSettings output_settings(const RunOptions& options) {
  return {.ranks = options.ranks,
          .prefix = options.prefix,
          .shown = options.shown,
          .log_folder = options.log_folder};
}

std::string describe_state(pid_t pid) {
  switch (process_state(pid).value_or('Z')) {
    case 'R': return "running";
    case 'S':
    case 'I': return "sleeping";
    case 'D': return "waiting in the kernel";
    case 'T':
    case 't': return "stopped";
    default: return "ending";
  }
}

}  // namespace

Job::Job(const RunOptions& options, const JobContext& context, const std::string& folder,
         Launcher launcher)
    : options_(options),
      context_(context),
      folder_(folder),
      launcher_(std::move(launcher)),
      inherited_(current_environment()),
      start_(Clock::now()),
      oom_before_(oom_counts()),
      signals_(with_child_signal(launcher_.forwarded)),
      output_(loop_, output_settings(options), [this](Channel c) { on_output_closed(c); }),
      sweep_(loop_) {
  outcome_.launcher = launcher_.pid;
  if (launcher_.input) {
    stdin_feed_ = std::make_unique<StdinFeed>(loop_, std::move(launcher_.input), folder);
  }
  if (!options_.trace.empty()) write_file(options_.trace, "", 0644);  // better now than at the end
  watch_signals();
  watch_launcher();
  if (options_.timeout) call_after(*options_.timeout, &Job::on_timeout);
}

void Job::call_after(std::chrono::nanoseconds delay, void (Job::*step)()) {
  loop_.call_at(Clock::now() + delay, [this, step] { (this->*step)(); });
}

void Job::watch_signals() {
  loop_.watch(signals_.fd(), EPOLLIN, [this](std::uint32_t) {
    while (const auto signal = signals_.next()) on_signal(*signal);
  });
}

void Job::watch_launcher() {
  const auto id = std::make_shared<Loop::WatchId>();
  *id = loop_.watch(launcher_.pidfd.get(), EPOLLIN, [this, id](std::uint32_t) {
    loop_.unwatch(*id);
    on_launcher_gone();
  });
}

void Job::watch_rank(RankProcess& rank) {
  // epoll hands out pidfds in the order in which the processes ended.
  const auto id = std::make_shared<Loop::WatchId>();
  *id = loop_.watch(rank.pidfd(), EPOLLIN, [this, id, &rank](std::uint32_t) {
    loop_.unwatch(*id);
    on_rank_end(rank);
  });
}

void Job::start_ranks() {
  std::vector<std::vector<int>> pinning;
  if (options_.pin) pinning = pin_plan(usable_core_sites(), options_.ranks);
  const RankSetting setting{options_, context_,          inherited_, store_,
                            output_,  stdin_feed_.get(), pinning};
  for (int rank = 0; rank < options_.ranks; ++rank) {
    ranks_.push_back(std::make_unique<RankProcess>(rank, setting));
    watch_rank(*ranks_.back());
  }
}

int Job::run() {
  loop_.run();
  // The destructor of a process waits for its end, for which there is no hope here.
  for (auto& rank : ranks_) {
    if (rank->running()) static_cast<void>(rank.release());
  }
  return exit_code(outcome_);
}

std::vector<int> Job::running_ranks() const {
  std::vector<int> running;
  for (const auto& rank : ranks_) {
    if (rank->running()) running.push_back(rank->rank());
  }
  return running;
}

std::set<pid_t> Job::running_pids() const {
  std::set<pid_t> pids;
  for (const int rank : running_ranks()) pids.insert(ranks_[static_cast<std::size_t>(rank)]->pid());
  return pids;
}

void Job::on_signal(int signal) {
  switch (signal) {
    case SIGCHLD:
      reap_orphans(running_pids());
      sweep_.child_ended();
      return;
    case SIGUSR1:
    case SIGUSR2:
      // The process alone: its children would die of a signal they do not know.
      for (auto& rank : ranks_) rank->signal(signal);
      return;
    case SIGTSTP:
    case SIGCONT:
      for (auto& rank : ranks_) rank->signal_group(signal);
      return;
    default: on_stop_signal(signal);
  }
}

void Job::on_stop_signal(int signal) {
  const auto now = Clock::now();
  const bool again = first_stop_ != Clock::time_point{} && now - first_stop_ > kSameStop;
  if (first_stop_ == Clock::time_point{}) first_stop_ = now;
  if (phase_ == Phase::kRunning || phase_ == Phase::kSettling) {
    if (set_cause(Cause::kSignal)) {
      outcome_.signal = signal;
      note_calls(kLongCall);
    }
    return end_ranks(signal);
  }
  if (phase_ == Phase::kFlushing) return give_up_output();  // whoever should read does not
  // A SIGTERM may be repeated by a machine; a second Ctrl-C is a person who has waited enough.
  const bool impatient = signal == SIGINT || signal == SIGQUIT;
  if (!impatient || (!again && outcome_.cause == Cause::kSignal)) return;
  if (phase_ == Phase::kEnding) kill_ranks(concat("killed at the next ", signal_name(signal)));
  sweep_.kill_now();
}

bool Job::set_cause(Cause cause) {
  if (outcome_.cause != Cause::kNone) return false;
  outcome_.cause = cause;
  outcome_.elapsed = Clock::now() - start_;
  return true;
}

void Job::on_rank_end(RankProcess& rank) {
  if (!unwatched_.insert(rank.rank()).second) return;
  const auto status = rank.try_wait();
  if (!status) return;  // cannot be: its pidfd was readable
  // Ranks that make a group do not wait for it any longer.
  try {
    store_.append(kEndedKey, ended_line(rank.rank(), *status));
  } catch (const std::exception&) {  // no memory: then they find out later
  }
  output_.drain(rank.rank());
  if (stdin_feed_) stdin_feed_->drop(rank.rank());
  const bool of_itself = phase_ == Phase::kRunning || phase_ == Phase::kSettling;
  if (of_itself && !status->success()) {
    outcome_.failed.push_back(rank.rank());
    if (set_cause(Cause::kRankFailed)) {
      phase_ = Phase::kSettling;
      loop_.call_at(Clock::now() + kSettling, [this] {
        if (phase_ == Phase::kSettling) end_ranks(SIGTERM);
      });
    }
  }
  proceed_if_all_ended();
}

// Ranks that have ended by now ended of themselves, whatever is sent next.
void Job::collect_ended() {
  for (auto& rank : ranks_) {
    if (rank->running() && rank->try_wait()) on_rank_end(*rank);
  }
}

void Job::end_ranks(int signal) {
  collect_ended();
  if (phase_ == Phase::kSweeping || phase_ == Phase::kFlushing) return;
  phase_ = Phase::kEnding;
  for (auto& rank : ranks_) rank->ask_to_end(signal);
  if (options_.grace > kPatience) call_after(kPatience, &Job::say_what_is_awaited);
  loop_.call_at(Clock::now() + options_.grace, [this] {
    if (phase_ != Phase::kEnding) return;
    kill_ranks(concat("killed after ", format_duration(options_.grace), " of grace"));
  });
}

void Job::say_what_is_awaited() {
  if (phase_ != Phase::kEnding) return;
  const std::string why = outcome_.cause == Cause::kRankFailed
                              ? concat("rank ", outcome_.failed.front(), " failed (",
                                       ranks_[static_cast<std::size_t>(outcome_.failed.front())]
                                           ->outcome(start_)
                                           .status->to_string(),
                                       ")")
                              : std::string("the job is being ended");
  output_.note(concat("convoy: ", why, "; waiting up to ", format_duration(options_.grace), " for ",
                      format_ranks(running_ranks()), " to end\n"));
}

void Job::kill_ranks(const std::string& note) {
  if (phase_ == Phase::kKilling) return;
  phase_ = Phase::kKilling;
  outcome_.kill_note = note;
  for (auto& rank : ranks_) rank->kill();
  call_after(kGiveUp, &Job::on_unkillable);
}

void Job::on_unkillable() {
  if (phase_ != Phase::kKilling) return;
  for (const int rank : running_ranks()) {
    const pid_t pid = ranks_[static_cast<std::size_t>(rank)]->pid();
    outcome_.unkillable.push_back(concat("rank ", rank, " (pid ", pid, ")"));
  }
  sweep();
}

void Job::on_launcher_gone() {
  launcher_gone_ = true;
  set_cause(Cause::kLauncherGone);
  if (phase_ < Phase::kKilling) {
    collect_ended();
    if (phase_ < Phase::kKilling) kill_ranks("killed");
  }
  signal_descendants(SIGKILL);
  sweep_.kill_now();
  if (phase_ == Phase::kFlushing) call_after(kLastWords, &Job::give_up_output);
}

void Job::on_output_closed(Channel channel) {
  if (!set_cause(Cause::kOutputClosed)) return;
  outcome_.closed_output = channel == Channel::kOut ? "standard output" : "standard error";
  if (phase_ == Phase::kRunning) end_ranks(SIGTERM);
}

void Job::on_timeout() {
  if (phase_ != Phase::kRunning || !set_cause(Cause::kTimeout)) return;
  outcome_.ranks.resize(ranks_.size());
  for (const int rank : running_ranks()) {
    const auto i = static_cast<std::size_t>(rank);
    outcome_.ranks[i].state_at_timeout = describe_state(ranks_[i]->pid());
    outcome_.ranks[i].last_lines = output_.last_lines(rank);
    const auto log = ranks_[i]->flight_log();
    if (log && (log->calls.empty() || !log->entries.empty())) {
      const auto now = Clock::now().time_since_epoch();
      outcome_.ranks[i].last_operations = {flight::describe_activity(*log, log->latest(), now)};
    }
  }
  note_calls({});
  end_ranks(SIGTERM);
}

// Those that the end of the job is about to end.
void Job::note_calls(std::chrono::nanoseconds least) {
  const auto logs = flight_logs();
  outcome_.calls = flight::calls_under_way(flight::Calls(logs), kCallsShown,
                                           Clock::now().time_since_epoch(), least);
}

void Job::proceed_if_all_ended() {
  if (phase_ < Phase::kSweeping && ranks_.size() == unwatched_.size()) sweep();
}

void Job::sweep() {
  phase_ = Phase::kSweeping;
  sweep_.start(options_.grace, running_pids(), [this] { flush(); });
}

void Job::flush() {
  phase_ = Phase::kFlushing;
  for (int rank = 0; rank < options_.ranks; ++rank) output_.drain(rank);
  complete_outcome();
  if (launcher_gone_) call_after(kLastWords, &Job::give_up_output);
  // Behind everything the ranks wrote, on whatever reads our two outputs.
  output_.when_idle([this] { report(); });
}

void Job::complete_outcome() {
  outcome_.ranks.resize(ranks_.size());
  for (const auto& rank : ranks_) {
    RankOutcome& one = outcome_.ranks[static_cast<std::size_t>(rank->rank())];
    RankOutcome now = rank->outcome(start_);
    now.state_at_timeout = std::move(one.state_at_timeout);
    now.last_lines =
        now.state_at_timeout.empty() ? output_.last_lines(rank->rank()) : std::move(one.last_lines);
    now.last_operations = std::move(one.last_operations);
    now.error_message = read_error_file(error_file_path(context_, rank->rank())).value_or("");
    one = std::move(now);
  }
  if (!outcome_.failed.empty()) {
    const auto& first = outcome_.ranks[static_cast<std::size_t>(outcome_.failed.front())];
    if (first.status->signal == SIGKILL) {
      outcome_.kill_hint = explain_kill(oom_before_, oom_counts());
    }
  }
  add_flight_records();
  write_trace();
  outcome_.left_over = sweep_.ended();
  const auto& left = sweep_.unkillable();
  outcome_.unkillable.insert(outcome_.unkillable.end(), left.begin(), left.end());
}

std::vector<flight::Log> Job::flight_logs() const {
  std::vector<flight::Log> logs;
  for (const auto& rank : ranks_) {
    auto log = rank->flight_log();
    if (!log) continue;
    log->rank = rank->rank();  // whatever the program thinks it is
    logs.push_back(std::move(*log));
  }
  return logs;
}

// What the rank that failed did last, and who waited for it; all of it goes to the log folder.
void Job::add_flight_records() {
  if (outcome_.failed.empty()) return;
  const auto logs = flight_logs();
  auto& first = outcome_.ranks[static_cast<std::size_t>(outcome_.failed.front())];
  const auto end = (start_ + first.lived).time_since_epoch();
  const flight::Calls calls(logs);
  for (const auto& log : logs) {
    if (log.rank != first.rank) continue;
    first.last_operations = flight::last_operations(log, kOperationsShown, end, end - kOldFailure);
    first.waited_for = flight::who_waited_for(log, logs, end - kOldFailure);
    first.calls = flight::calls_under_way(log, calls, kOperationsShown, end);
    for (auto& line : flight::who_called(log, calls, kOperationsShown, end)) {
      first.waited_for.push_back(std::move(line));
    }
  }
  if (options_.log_folder.empty() || logs.empty()) return;
  try {
    flight::write_dumps(options_.log_folder + "/flight", logs);
    write_file(options_.log_folder + "/flight/trace.json", flight::to_trace(logs, end), 0644);
  } catch (const std::exception& error) {
    output_.note(concat("convoy: writing flight records: ", error.what(), "\n"));
  }
}

void Job::write_trace() {
  if (options_.trace.empty()) return;
  try {
    const auto logs = flight_logs();
    if (logs.empty()) fail(ErrorKind::kUnsupported, "no rank has written a flight record");
    write_file(options_.trace, flight::to_trace(logs, Clock::now().time_since_epoch()), 0644);
  } catch (const std::exception& error) {
    output_.note(concat("convoy: writing the trace: ", error.what(), "\n"));
  }
}

void Job::report() {
  if (stdin_feed_ && !stdin_feed_->error().empty()) {
    output_.note(concat("convoy: ", stdin_feed_->error(), "\n"));
  }
  const std::string text = make_report(outcome_);
  output_.note(text);
  if (!text.empty()) output_.save("report.txt", text);
  output_.when_idle([this] { loop_.stop(); });
}

void Job::give_up_output() {
  output_.abandon();
  loop_.stop();
}

}  // namespace convoy::launch
