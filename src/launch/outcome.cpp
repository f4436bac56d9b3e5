#include "launch/outcome.h"

#include <signal.h>

#include <algorithm>
#include <map>

#include "base/concat.h"
#include "launch/text.h"

namespace convoy::launch {
namespace {

constexpr int kTimeoutCode = 124;  // as timeout(1)

const RankOutcome& rank_of(const JobOutcome& outcome, int rank) {
  return outcome.ranks[static_cast<std::size_t>(rank)];
}

std::string join(const std::vector<std::string>& items) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ", ") + item;
  return text;
}

// "SIGTERM", "exit code 1 after SIGTERM", "killed after 5 s of grace".
std::string describe_ending(const JobOutcome& outcome, const RankOutcome& rank) {
  if (!rank.status) return "could not be killed";
  if (rank.ending == Ending::kKilled) return outcome.kill_note;
  std::string asked = signal_name(rank.asked_by);
  if (rank.status->signal == rank.asked_by) return asked;
  return concat(rank.status->to_string(), " after ", asked);
}

std::string headline(const JobOutcome& outcome) {
  const std::string after = concat("after ", format_duration(outcome.elapsed));
  switch (outcome.cause) {
    case Cause::kNone: return "";
    case Cause::kRankFailed: {
      const auto& first = rank_of(outcome, outcome.failed.front());
      return concat("convoy: rank ", first.rank, " failed first: ", first.status->to_string(),
                    ", pid ", first.pid, ", after ", format_duration(first.lived), "\n");
    }
    case Cause::kSignal:
      return concat("convoy: stopped by ", signal_name(outcome.signal), " ", after, "\n");
    case Cause::kTimeout:
      return concat("convoy: the job did not end in time (--timeout), ", after, "\n");
    case Cause::kOutputClosed:
      return concat("convoy: nobody reads ", outcome.closed_output, " any more; the job was ended ",
                    after, "\n");
    case Cause::kLauncherGone:
      return concat("convoy: the launcher (pid ", outcome.launcher,
                    ") was killed; its monitor ended the job ", after, "\n");
  }
  return "";
}

std::string first_failure(const JobOutcome& outcome) {
  const auto& first = rank_of(outcome, outcome.failed.front());
  std::string text;
  if (!outcome.kill_hint.empty()) text += concat("  ", outcome.kill_hint, "\n");
  if (!first.error_message.empty()) {
    text += concat("  error file of rank ", first.rank, ":\n");
    for (const auto& line : split(first.error_message, '\n')) text += concat("    | ", line, "\n");
  }
  if (first.last_lines.empty()) {
    text += concat("  rank ", first.rank, " wrote nothing\n");
  } else {
    text += concat("  last lines of rank ", first.rank, ":\n");
    for (const auto& line : first.last_lines) text += concat("    | ", line, "\n");
  }
  if (!first.last_operations.empty()) {
    text += concat("  last operations of rank ", first.rank, ":\n");
    for (const auto& line : first.last_operations) text += concat("    | ", line, "\n");
  }
  if (!first.calls.empty()) {
    text += concat("  calls under way of rank ", first.rank, ":\n");
    for (const auto& line : first.calls) text += concat("    | ", line, "\n");
  }
  for (const auto& line : first.waited_for) text += concat("  waited for it: ", line, "\n");
  for (std::size_t i = 1; i < outcome.failed.size(); ++i) {
    const auto& other = rank_of(outcome, outcome.failed[i]);
    text += concat("  also failed: rank ", other.rank, ", ", other.status->to_string(), ", ",
                   format_duration(other.lived - first.lived), " later\n");
    if (!other.error_message.empty()) {
      text += concat("    | ", split(other.error_message, '\n').front(), "\n");
    }
  }
  return text;
}

std::string at_timeout(const JobOutcome& outcome) {
  std::string text;
  for (const auto& rank : outcome.ranks) {
    if (rank.state_at_timeout.empty()) continue;
    text += concat("  rank ", rank.rank, " was ", rank.state_at_timeout);
    text += rank.last_lines.empty() ? "; it wrote nothing\n"
                                    : concat("; last line: ", rank.last_lines.back(), "\n");
    for (const auto& line : rank.last_operations) text += concat("    | ", line, "\n");
  }
  return text;
}

std::string calls_at_end(const JobOutcome& outcome) {
  std::string text = outcome.calls.empty() ? "" : "  calls under way:\n";
  for (const auto& line : outcome.calls) text += concat("    | ", line, "\n");
  return text;
}

std::string ended_by_us(const JobOutcome& outcome) {
  std::map<std::string, std::vector<int>> groups;
  for (const auto& rank : outcome.ranks) {
    if (rank.ending == Ending::kItself && rank.status) continue;
    groups[describe_ending(outcome, rank)].push_back(rank.rank);
  }
  std::vector<std::string> items;
  for (const auto& [ending, ranks] : groups) {
    items.push_back(concat(format_ranks(ranks), " (", ending, ")"));
  }
  return items.empty() ? "" : concat("  ended by the launcher: ", join(items), "\n");
}

}  // namespace

int exit_code(const JobOutcome& outcome) {
  switch (outcome.cause) {
    case Cause::kNone: return 0;
    case Cause::kRankFailed: return rank_of(outcome, outcome.failed.front()).status->shell_code();
    case Cause::kSignal: return 128 + outcome.signal;
    case Cause::kTimeout: return kTimeoutCode;
    case Cause::kOutputClosed: return 128 + SIGPIPE;
    case Cause::kLauncherGone: return 128 + SIGKILL;
  }
  return 1;
}

std::string make_report(const JobOutcome& outcome) {
  std::string text = headline(outcome);
  if (outcome.cause == Cause::kRankFailed) text += first_failure(outcome);
  if (outcome.cause == Cause::kTimeout) text += at_timeout(outcome);
  text += calls_at_end(outcome);
  if (outcome.cause != Cause::kNone) text += ended_by_us(outcome);
  if (!outcome.left_over.empty()) {
    text += concat(text.empty() ? "convoy: " : "  ",
                   "ended what ranks had left running: ", join(outcome.left_over), "\n");
  }
  if (!outcome.unkillable.empty()) {
    text += concat(text.empty() ? "convoy: " : "  ",
                   "could not be killed (waiting in the kernel): ", join(outcome.unkillable), "\n");
  }
  return text;
}

}  // namespace convoy::launch
