#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "base/concat.h"
#include "launch/launched.h"
#include "os/file.h"
#include "os/machine.h"

namespace convoy::launch {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

TEST(Run, GivesEachRankItsVariables) {
  auto job = Launched::run({"-n", "3"}, {"only", "1",
                                         "var",  "RANK",
                                         "var",  "LOCAL_RANK",
                                         "var",  "WORLD_SIZE",
                                         "var",  "LOCAL_WORLD_SIZE",
                                         "var",  "GROUP_RANK",
                                         "var",  "GROUP_WORLD_SIZE",
                                         "var",  "ROLE_RANK",
                                         "var",  "ROLE_WORLD_SIZE",
                                         "var",  "ROLE_NAME",
                                         "var",  "MASTER_ADDR",
                                         "var",  "CONVOY_JOB_ID",
                                         "var",  "TORCHELASTIC_RUN_ID",
                                         "var",  "TORCHELASTIC_RESTART_COUNT",
                                         "var",  "TORCHELASTIC_MAX_RESTARTS",
                                         "var",  "TORCHELASTIC_USE_AGENT_STORE"});
  ASSERT_EQ(job.finish().shell_code(), 0) << job.err();
  EXPECT_THAT(
      lines_of(job.out()),
      testing::ElementsAre(
          "[1] RANK=1", "[1] LOCAL_RANK=1", "[1] WORLD_SIZE=3", "[1] LOCAL_WORLD_SIZE=3",
          "[1] GROUP_RANK=0", "[1] GROUP_WORLD_SIZE=1", "[1] ROLE_RANK=1", "[1] ROLE_WORLD_SIZE=3",
          "[1] ROLE_NAME=default", "[1] MASTER_ADDR=127.0.0.1", "[1] CONVOY_JOB_ID=" + job.job_id(),
          "[1] TORCHELASTIC_RUN_ID=" + job.job_id(), "[1] TORCHELASTIC_RESTART_COUNT=0",
          "[1] TORCHELASTIC_MAX_RESTARTS=0", "[1] TORCHELASTIC_USE_AGENT_STORE=False"));
  EXPECT_EQ(job.err(), "");
}

TEST(Run, MasterPortIsOneFreePortForAll) {
  auto job = Launched::run({"-n", "2"}, {"var", "MASTER_PORT"});
  ASSERT_EQ(job.finish().shell_code(), 0);
  const auto lines = lines_of(job.out());
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0].substr(4), lines[1].substr(4));
  EXPECT_GT(std::stoi(lines[0].substr(lines[0].find('=') + 1)), 1023);
}

TEST(Run, ServesAStoreToEveryRank) {
  // Rank 0 gets past its line only when rank 2 has spoken to the same store, and so on.
  auto job = Launched::run({"-n", "3"}, {"only", "2", "announce", "a", "all", "await", "a",
                                         "barrier", "b", "say", "met"});
  ASSERT_EQ(job.finish().shell_code(), 0) << job.err();
  EXPECT_THAT(lines_of(job.out()), UnorderedElementsAre("[0] met", "[1] met", "[2] met"));
}

// Whoever waits for a rank that has ended is told so through the launcher's store: nobody else
// knows of a rank that has told nothing of itself.
TEST(Run, ARankThatEndsBeforeItComesIsNamed) {
  auto job = Launched::run({"-n", "3"}, {"only", "1", "exit", "0", "all", "all-reduce", "1"});
  ASSERT_EQ(job.finish().shell_code(), 0) << job.err();
  for (const char* rank : {"[0]", "[2]"}) {
    EXPECT_THAT(job.out(), HasSubstr(concat(rank, " error: making group \"world\"")));
  }
  EXPECT_EQ(count_of(job.out(), "rank 1 exited with exit code 0 while the group was being made"),
            2);
}

TEST(Run, ARankThatIsKilledBeforeItComesIsNamed) {
  auto job = Launched::run({"-n", "3"}, {"ignore", "TERM", "barrier", "b", "only", "1", "raise",
                                         "KILL", "all", "all-reduce", "1", "exit", "0"});
  EXPECT_NE(job.finish().shell_code(), 0);
  EXPECT_EQ(count_of(job.out(), "rank 1 was killed by signal 9 (SIGKILL) while the group"), 2)
      << job.out();
}

TEST(Run, TunesForTheNumberOfRanks) {
  const int cores = usable_cores();
  auto job = Launched::run({"-n", "2"}, {"only", "0", "var", "OMP_NUM_THREADS", "var",
                                         "MKL_NUM_THREADS", "var", "THP_MEM_ALLOC_ENABLE"});
  ASSERT_EQ(job.finish().shell_code(), 0);
  const int threads = std::max(1, cores / 2);
  EXPECT_THAT(lines_of(job.out()), testing::ElementsAre(concat("[0] OMP_NUM_THREADS=", threads),
                                                        concat("[0] MKL_NUM_THREADS=", threads),
                                                        "[0] THP_MEM_ALLOC_ENABLE=1"));
}

TEST(Run, LeavesWhatTheUserTuned) {
  Launched job({.arguments = {"run", "-n", "1", rank_probe(), "var", "OMP_NUM_THREADS", "var",
                              "MKL_NUM_THREADS"},
                .environment = {{"OMP_NUM_THREADS", "7"}}});
  ASSERT_EQ(job.finish().shell_code(), 0);
  EXPECT_THAT(lines_of(job.out()), Contains("[0] OMP_NUM_THREADS=7"));
  EXPECT_THAT(lines_of(job.out()), Contains("[0] MKL_NUM_THREADS="));  // libtorch would prefer it
}

TEST(Run, NoTuneLeavesAllAlone) {
  auto job = Launched::run(
      {"-n", "1", "--no-tune"},
      {"var", "OMP_NUM_THREADS", "var", "MKL_NUM_THREADS", "var", "THP_MEM_ALLOC_ENABLE"});
  ASSERT_EQ(job.finish().shell_code(), 0);
  EXPECT_THAT(lines_of(job.out()),
              testing::ElementsAre(
                  "[0] OMP_NUM_THREADS=", "[0] MKL_NUM_THREADS=", "[0] THP_MEM_ALLOC_ENABLE="));
}

TEST(Run, PinsRanksToDisjointCores) {
  if (usable_cores() < 2) GTEST_SKIP() << "needs two cores";
  auto job = Launched::run({"-n", "2", "--pin"}, {"cores"});
  ASSERT_EQ(job.finish().shell_code(), 0);
  const auto lines = lines_of(job.out());
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_NE(lines[0].substr(4), lines[1].substr(4));
}

TEST(Run, SetsVariablesAndFolder) {
  const TempFolder folder("launch-test");
  auto job = Launched::run(
      {"-n", "1", "-e", "COLOUR=dark blue", "--env=EMPTY=", "--workdir", folder.path()},
      {"var", "COLOUR", "var", "EMPTY", "cwd"});
  ASSERT_EQ(job.finish().shell_code(), 0) << job.err();
  const std::string real = std::filesystem::canonical(folder.path());
  EXPECT_THAT(lines_of(job.out()),
              testing::ElementsAre("[0] COLOUR=dark blue", "[0] EMPTY=", "[0] cwd " + real));
}

TEST(Run, PassesArgumentsOnUntouched) {
  const auto result = run_convoy({"run", "-n", "1", rank_probe(), "say", "--help", "say", "-n"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out, "[0] --help\n[0] -n\n");
}

TEST(Run, KeepsOutputAndErrorApart) {
  auto job = Launched::run({"-n", "1"}, {"say", "to out", "err", "to err"});
  EXPECT_EQ(job.finish().shell_code(), 0);
  EXPECT_EQ(job.out(), "[0] to out\n");
  EXPECT_EQ(job.err(), "[0] to err\n");
}

TEST(Run, ShowsAnUnfinishedLastLine) {
  auto job = Launched::run({"-n", "1"}, {"say", "whole", "part", "half"});
  EXPECT_EQ(job.finish().shell_code(), 0);
  EXPECT_EQ(job.out(), "[0] whole\n[0] half\n");
}

TEST(Run, WithoutPrefix) {
  auto job = Launched::run({"-n", "2", "--no-prefix"}, {"only", "1", "say", "x", "part", "y"});
  EXPECT_EQ(job.finish().shell_code(), 0);
  EXPECT_EQ(job.out(), "x\ny\n");
}

TEST(Run, OneRankWithoutPrefixIsPassedThrough) {
  // An unfinished line (a prompt) appears at once, and no newline is added to it.
  Launched job(
      {.arguments = {"run", "-n", "1", "--no-prefix", rank_probe(), "part", "name? ", "wait"}});
  ASSERT_TRUE(job.wait_for("name? "));
  job.kill(SIGTERM);
  EXPECT_EQ(job.finish().shell_code(), 128 + SIGTERM);
  EXPECT_EQ(job.out(), "name? ");
}

TEST(Run, NeverMixesLines) {
  // Both outputs of eight ranks into one pipe.
  Launched job({.arguments = {"run", "-n", "8", rank_probe(), "barrier", "b", "flood", "5000",
                              "err", "an error line"},
                .same_pipe = true});
  EXPECT_EQ(job.finish().shell_code(), 0);
  std::map<std::string, int> next;
  int errors = 0;
  for (const auto& line : lines_of(job.out())) {
    const std::string rank = line.substr(0, 4);
    if (line.substr(4) == "an error line") {
      ++errors;
    } else {
      ASSERT_EQ(line, concat(rank, "line ", next[rank]++));
    }
  }
  EXPECT_EQ(errors, 8);
  EXPECT_EQ(next.size(), 8U);
  for (const auto& [rank, lines] : next) EXPECT_EQ(lines, 5000) << rank;
}

TEST(Run, LongLinesComeInPieces) {
  auto job = Launched::run({"-n", "1"}, {"long", "150000"});
  EXPECT_EQ(job.finish().shell_code(), 0);
  const auto lines = lines_of(job.out());
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_TRUE(lines[0].starts_with("[0] xxx"));
  EXPECT_TRUE(lines[1].starts_with("[0+] xxx"));
  EXPECT_EQ(count_of(job.out(), "x"), 150000);
}

TEST(Run, ShowsOnlyTheRanksAskedFor) {
  auto job = Launched::run({"-n", "4", "--show", "1-2"}, {"say", "hello"});
  EXPECT_EQ(job.finish().shell_code(), 0);
  EXPECT_THAT(lines_of(job.out()), UnorderedElementsAre("[1] hello", "[2] hello"));
}

TEST(Run, WritesLogFiles) {
  const TempFolder folder("launch-test");
  const std::string logs = folder.path() + "/deep/logs";
  auto job = Launched::run({"-n", "2", "--log-dir", logs, "--show", "none"},
                           {"say", "out", "err", "err", "part", "end", "only", "1", "exit", "5"});
  EXPECT_EQ(job.finish().shell_code(), 5);
  EXPECT_EQ(job.out(), "");
  EXPECT_EQ(read_file(logs + "/rank-0.out"), "out\nend");
  EXPECT_EQ(read_file(logs + "/rank-0.err"), "err\n");
  EXPECT_EQ(read_file(logs + "/rank-1.out"), "out\nend");
  EXPECT_EQ(read_file(logs + "/report.txt"), job.err());
}

TEST(Run, SaysWhenALogCannotBeWritten) {
  if (::access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full";
  const TempFolder folder("launch-test");
  std::filesystem::create_symlink("/dev/full", folder.path() + "/rank-0.out");
  auto job = Launched::run({"-n", "1", "--log-dir", folder.path()}, {"say", "text"});
  EXPECT_EQ(job.finish().shell_code(), 0);
  EXPECT_EQ(job.out(), "[0] text\n");
  EXPECT_THAT(job.err(), AllOf(HasSubstr("rank-0.out"), HasSubstr("No space left")));
}

TEST(Run, SlowReaderLosesNothing) {
  // 4 ranks write more than all buffers hold while nobody reads; a barrier behind the flood would
  // not be reached if ranks were not held back, so reading starts when they are known to run.
  auto job = Launched::run({"-n", "4"}, {"err", "begin", "flood", "200000"});
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(job.wait_for_error(concat("[", rank, "] begin")));
  }
  EXPECT_EQ(job.finish().shell_code(), 0);
  EXPECT_EQ(lines_of(job.out()).size(), 800000U);
  EXPECT_EQ(count_of(job.out(), "line 199999\n"), 4);
}

TEST(Run, EndsWhenNobodyReadsItsOutput) {
  auto job = Launched::run({"-n", "2"},
                           {"flood", "1000", "say", "up", "barrier", "b", "flood", "100000000"});
  ASSERT_TRUE(job.wait_for("line 0\n", 2));
  job.close_output();
  EXPECT_EQ(job.finish().shell_code(), 128 + SIGPIPE);
  EXPECT_THAT(job.err(), HasSubstr("nobody reads standard output any more"));
  expect_nothing_left(job.job_id());
}

TEST(Run, RankThatEndsEarlyIsFine) {
  auto job = Launched::run({"-n", "2"}, {"only", "0", "exit", "0", "all", "say", "later"});
  EXPECT_EQ(job.finish().shell_code(), 0);
  EXPECT_EQ(job.out(), "[1] later\n");
  EXPECT_EQ(job.err(), "");
}

TEST(Run, EndsAJobThatTakesTooLong) {
  auto job = Launched::run({"-n", "2", "--timeout", "300ms"},
                           {"only", "1", "exit", "0", "all", "say", "still here", "wait"});
  EXPECT_EQ(job.finish().shell_code(), 124);
  EXPECT_THAT(job.err(), AllOf(HasSubstr("did not end in time (--timeout)"),
                               HasSubstr("rank 0 was sleeping; last line: still here"),
                               HasSubstr("ended by the launcher: rank 0 (SIGTERM)")));
  expect_nothing_left(job.job_id());
}

TEST(Run, WorksWithClosedStandardDescriptors) {
  Launched job({.arguments = {"run", "-n", "2", rank_probe(), "barrier", "b", "say", "x"},
                .wrapper = {"/bin/sh", "-c", "exec \"$0\" \"$@\" 0<&- 2>&-"}});
  EXPECT_EQ(job.finish().shell_code(), 0);
  EXPECT_THAT(lines_of(job.out()), UnorderedElementsAre("[0] x", "[1] x"));
}

}  // namespace
}  // namespace convoy::launch
