#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "base/concat.h"
#include "launch/launched.h"

namespace convoy::launch {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

struct Death {
  const char* name;
  std::vector<std::string> script;  // of the rank that dies; empty: the test kills it
  int code;
  const char* said;
};

void PrintTo(const Death& death, std::ostream* out) { *out << death.name; }

class RankDeath : public testing::TestWithParam<std::tuple<int, Death>> {};

// The central promise: whichever of four ranks dies, however it dies, the report names it, the exit
// status is its own, and nothing is left.
TEST_P(RankDeath, GivesTheReportAndLeavesNothing) {
  const auto& [rank, death] = GetParam();
  const std::string r = std::to_string(rank);
  std::vector<std::string> script = {"say", "hello from me", "pid",   "child", "barrier",
                                     "up",  "say",           "ready", "only",  r};
  script.insert(script.end(), death.script.begin(), death.script.end());
  script.insert(script.end(), {"all", "wait"});
  auto job = Launched::run({"-n", "4"}, script);
  pid_t pid = 0;
  if (death.script.empty()) {
    ASSERT_TRUE(job.wait_for("ready", 4));
    pid = job.pid_of_rank(rank);
    ASSERT_GT(pid, 0);
    ASSERT_EQ(::kill(pid, SIGKILL), 0);
  }
  EXPECT_EQ(job.finish().shell_code(), death.code);
  pid = job.pid_of_rank(rank);
  EXPECT_THAT(job.err(), HasSubstr(concat("convoy: rank ", rank, " failed first: ", death.said,
                                          ", pid ", pid, ", after ")));
  EXPECT_THAT(job.err(), HasSubstr(concat("  last lines of rank ", rank, ":\n    | hello from me\n",
                                          "    | pid ", pid, "\n")));
  EXPECT_THAT(job.err(), HasSubstr("  ended by the launcher: ranks "));
  EXPECT_THAT(job.err(), Not(HasSubstr("also failed")));
  EXPECT_EQ(count_of(job.err(), "failed first"), 1);
  expect_nothing_left(job.job_id());
}

INSTANTIATE_TEST_SUITE_P(
    Each, RankDeath,
    testing::Combine(
        testing::Range(0, 4),
        testing::Values(Death{"Killed", {}, 137, "signal 9 (SIGKILL)"},
                        Death{"Exit", {"exit", "3"}, 3, "exit code 3"},
                        Death{"Segfault", {"raise", "SEGV"}, 139, "signal 11 (SIGSEGV)"},
                        Death{"Exception", {"throw", "out of luck"}, 134, "signal 6 (SIGABRT)"})),
    [](const auto& instance) {
      return concat(std::get<1>(instance.param).name, "Rank", std::get<0>(instance.param));
    });

TEST(Failure, ShowsTheExceptionOfARank) {
  auto job = Launched::run({"-n", "2"}, {"only", "1", "throw", "out of luck", "all", "wait"});
  EXPECT_EQ(job.finish().shell_code(), 134);
  EXPECT_THAT(job.err(), HasSubstr("    |   what():  out of luck\n"));
}

TEST(Failure, ExplainsAKill) {
  auto job = Launched::run({"-n", "1"}, {"raise", "KILL"});
  EXPECT_EQ(job.finish().shell_code(), 137);
  EXPECT_THAT(job.err(), AllOf(HasSubstr("not sent by the launcher"), HasSubstr("OOM"),
                               HasSubstr("rank 0 wrote nothing")));
}

TEST(Failure, ShowsTheErrorFile) {
  const std::string text =
      R"({"message": {"message": "RuntimeError: loss is NaN\nat step 12", "extraInfo": {}}})";
  auto job = Launched::run(
      {"-n", "2"}, {"barrier", "b", "only", "0", "error-file", text, "exit", "1", "all", "wait"});
  EXPECT_EQ(job.finish().shell_code(), 1);
  EXPECT_THAT(job.err(), HasSubstr("  error file of rank 0:\n    | RuntimeError: loss is NaN\n"
                                   "    | at step 12\n"));
}

// Both die of signals: an exit may take a second (ThreadSanitizer's does), and the launcher has
// ended the others by then.
TEST(Failure, TellsTheOrderOfDeaths) {
  auto job =
      Launched::run({"-n", "3"}, {"only", "1", "announce-pid", "one", "raise", "ABRT", "only", "2",
                                  "outlive", "one", "raise", "SEGV", "all", "wait"});
  EXPECT_EQ(job.finish().shell_code(), 134);
  EXPECT_THAT(job.err(), AllOf(HasSubstr("convoy: rank 1 failed first: signal 6 (SIGABRT)"),
                               HasSubstr("  also failed: rank 2, signal 11 (SIGSEGV), "),
                               HasSubstr("  ended by the launcher: rank 0 (SIGTERM)")));
}

TEST(Failure, KillsAfterTheGrace) {
  auto job = Launched::run({"-n", "3", "--grace", "300ms"},
                           {"only", "2", "ignore", "TERM", "all", "barrier", "up", "only", "0",
                            "exit", "9", "all", "wait"});
  EXPECT_EQ(job.finish().shell_code(), 9);
  EXPECT_THAT(job.err(), HasSubstr("  ended by the launcher: rank 1 (SIGTERM), rank 2 (killed "
                                   "after 0.3 s of grace)"));
  expect_nothing_left(job.job_id());
}

TEST(Failure, SaysWhomItWaitsFor) {
  auto job =
      Launched::run({"-n", "2", "--grace", "30s"}, {"only", "1", "ignore", "TERM", "all", "barrier",
                                                    "up", "only", "0", "exit", "9", "all", "wait"});
  ASSERT_TRUE(job.wait_for_error(
      "convoy: rank 0 failed (exit code 9); waiting up to 30 s for rank 1 to end\n"));
  job.kill(SIGINT);  // somebody who does not want to wait
  EXPECT_EQ(job.finish().shell_code(), 9);
  EXPECT_THAT(job.err(), HasSubstr("rank 1 (killed at the next SIGINT)"));
}

TEST(Failure, NotesHowRanksEndedAfterSigterm) {
  auto job = Launched::run({"-n", "2"}, {"only", "1", "catch", "TERM", "all", "barrier", "up",
                                         "only", "0", "exit", "9", "all", "wait"});
  EXPECT_EQ(job.finish().shell_code(), 9);
  EXPECT_THAT(job.err(), HasSubstr("rank 1 (exit code 40 after SIGTERM)"));
  EXPECT_THAT(job.out(), HasSubstr("[1] caught 15\n"));
}

TEST(Failure, StoppedRanksAreEndedToo) {
  auto job = Launched::run({"-n", "2"}, {"pid", "barrier", "up", "say", "ready", "wait"});
  ASSERT_TRUE(job.wait_for("ready", 2));
  ASSERT_EQ(::kill(job.pid_of_rank(1), SIGSTOP), 0);
  ASSERT_EQ(::kill(job.pid_of_rank(0), SIGKILL), 0);
  EXPECT_EQ(job.finish().shell_code(), 137);
  EXPECT_THAT(job.err(), HasSubstr("ended by the launcher: rank 1 (SIGTERM)"));
}

TEST(Failure, LastWordsArriveBeforeTheReport) {
  // 3000 lines are in flight when the rank dies; a child keeps its pipe open.
  Launched job({.arguments = {"run", "-n", "1", rank_probe(), "child", "flood", "3000", "err",
                              "last words", "raise", "KILL"},
                .same_pipe = true});
  EXPECT_EQ(job.finish().shell_code(), 137);
  const auto at = job.out().find("convoy: rank 0 failed first");
  ASSERT_NE(at, std::string::npos);
  EXPECT_LT(job.out().find("[0] last words\n"), at);
  EXPECT_LT(job.out().find("[0] line 2999\n"), at);
  EXPECT_THAT(job.out().substr(at), HasSubstr("    | last words\n"));
}

TEST(Failure, AllRanksAtOnce) {
  auto job = Launched::run({"-n", "4"}, {"barrier", "b", "exit", "6"});
  EXPECT_EQ(job.finish().shell_code(), 6);
  EXPECT_EQ(count_of(job.err(), "failed first: exit code 6"), 1);
  // On a slow machine the launcher's SIGTERM may overtake some.
  const int others = count_of(job.err(), "also failed: rank ");
  EXPECT_TRUE(others == 3 || count_of(job.err(), "ended by the launcher") == 1) << job.err();
}

}  // namespace
}  // namespace convoy::launch
