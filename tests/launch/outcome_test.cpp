#include "launch/outcome.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace convoy::launch {
namespace {

using namespace std::chrono_literals;

JobOutcome four_ranks() {
  JobOutcome outcome;
  outcome.elapsed = 3200ms;
  for (int rank = 0; rank < 4; ++rank) {
    RankOutcome one;
    one.rank = rank;
    one.pid = 100 + rank;
    one.status = ExitStatus{};
    outcome.ranks.push_back(one);
  }
  return outcome;
}

void ask(RankOutcome& rank, ExitStatus status, Ending ending = Ending::kAsked) {
  rank.asked_by = SIGTERM;
  rank.ending = ending;
  rank.status = status;
}

TEST(Outcome, NothingToReport) {
  EXPECT_EQ(make_report(four_ranks()), "");
  EXPECT_EQ(exit_code(four_ranks()), 0);
}

TEST(Outcome, FullReportOfAFailure) {
  auto outcome = four_ranks();
  outcome.cause = Cause::kRankFailed;
  outcome.failed = {2, 1};
  outcome.kill_note = "killed after 5 s of grace";
  outcome.kill_hint = "the OOM killer struck";
  outcome.ranks[2].status = ExitStatus{.code = 0, .signal = SIGKILL};
  outcome.ranks[2].lived = 3200ms;
  outcome.ranks[2].last_lines = {"step 12", "oh no"};
  outcome.ranks[2].error_message = "RuntimeError: x\nmore";
  outcome.ranks[2].last_operations = {"barrier #1", "barrier #2"};
  outcome.ranks[2].waited_for = {"ranks 0, 3 in barrier #3"};
  outcome.ranks[1].status = ExitStatus{.code = 3, .signal = 0};
  outcome.ranks[1].lived = 3220ms;
  ask(outcome.ranks[0], {.code = 0, .signal = SIGTERM});
  ask(outcome.ranks[3], {.code = 0, .signal = SIGKILL}, Ending::kKilled);
  outcome.left_over = {"sleep (pid 7)"};
  EXPECT_EQ(make_report(outcome),
            "convoy: rank 2 failed first: signal 9 (SIGKILL), pid 102, after 3.2 s\n"
            "  the OOM killer struck\n"
            "  error file of rank 2:\n"
            "    | RuntimeError: x\n"
            "    | more\n"
            "  last lines of rank 2:\n"
            "    | step 12\n"
            "    | oh no\n"
            "  last operations of rank 2:\n"
            "    | barrier #1\n"
            "    | barrier #2\n"
            "  waited for it: ranks 0, 3 in barrier #3\n"
            "  also failed: rank 1, exit code 3, 0.02 s later\n"
            "  ended by the launcher: rank 0 (SIGTERM), rank 3 (killed after 5 s of grace)\n"
            "  ended what ranks had left running: sleep (pid 7)\n");
  EXPECT_EQ(exit_code(outcome), 137);
}

TEST(Outcome, Signal) {
  auto outcome = four_ranks();
  outcome.cause = Cause::kSignal;
  outcome.signal = SIGINT;
  for (auto& rank : outcome.ranks) ask(rank, {.code = 1, .signal = 0});
  EXPECT_EQ(make_report(outcome),
            "convoy: stopped by SIGINT after 3.2 s\n"
            "  ended by the launcher: ranks 0-3 (exit code 1 after SIGTERM)\n");
  EXPECT_EQ(exit_code(outcome), 130);
}

TEST(Outcome, ClosedOutput) {
  auto outcome = four_ranks();
  outcome.cause = Cause::kOutputClosed;
  outcome.closed_output = "standard output";
  EXPECT_EQ(make_report(outcome),
            "convoy: nobody reads standard output any more; the job was ended after 3.2 s\n");
  EXPECT_EQ(exit_code(outcome), 141);
}

TEST(Outcome, LauncherGone) {
  auto outcome = four_ranks();
  outcome.cause = Cause::kLauncherGone;
  outcome.launcher = 42;
  EXPECT_EQ(make_report(outcome),
            "convoy: the launcher (pid 42) was killed; its monitor ended the job after 3.2 s\n");
  EXPECT_EQ(exit_code(outcome), 137);
}

TEST(Outcome, TimeoutTellsWhatRanksDid) {
  auto outcome = four_ranks();
  outcome.cause = Cause::kTimeout;
  outcome.ranks[1].state_at_timeout = "sleeping";
  outcome.ranks[1].last_lines = {"a", "b"};
  EXPECT_EQ(make_report(outcome),
            "convoy: the job did not end in time (--timeout), after 3.2 s\n"
            "  rank 1 was sleeping; last line: b\n");
  EXPECT_EQ(exit_code(outcome), 124);
}

TEST(Outcome, NamesWhatCannotBeKilled) {
  auto outcome = four_ranks();
  outcome.cause = Cause::kSignal;
  outcome.signal = SIGTERM;
  outcome.ranks[3].status.reset();
  outcome.unkillable = {"rank 3 (pid 103)"};
  EXPECT_EQ(make_report(outcome),
            "convoy: stopped by SIGTERM after 3.2 s\n"
            "  ended by the launcher: rank 3 (could not be killed)\n"
            "  could not be killed (waiting in the kernel): rank 3 (pid 103)\n");
}

}  // namespace
}  // namespace convoy::launch
