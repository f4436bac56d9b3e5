#include "support/rank_group.h"

#include <fcntl.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "base/error.h"
#include "base/unique_fd.h"
#include "os/file.h"
#include "os/socket.h"
#include "support/programs.h"

namespace convoy::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Long enough to start a few ranks on a busy machine, under a sanitizer.
constexpr milliseconds kShortLimit(1500);

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class RankGroupTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, RankGroupTest, rank_modes(), rank_mode_name);

TEST_P(RankGroupTest, EveryRankRunsOnceAndKnowsItself) {
  RankGroup group(3, GetParam());
  group.start([](Rank& r) {
    EXPECT_EQ(r.size(), 3);
    EXPECT_EQ(r.mode(), GetParam());
    EXPECT_FALSE(r.deadline().expired());
    r.store()->append("ids", std::to_string(r.id()));
    r.mark("wrote");
    r.wait_for("end");
  });
  group.wait_mark("wrote");
  std::string ids = group.store()->get("ids");
  std::sort(ids.begin(), ids.end());
  EXPECT_EQ(ids, "012");
  group.post("end");
  for (const auto& result : group.join()) {
    EXPECT_TRUE(result.returned);
    EXPECT_TRUE(result.status.success());
    EXPECT_FALSE(result.failed());
  }
}

TEST_P(RankGroupTest, BarriersHoldEverybody) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    for (int round = 1; round <= 5; ++round) {
      r.store()->add("arrived", 1);
      r.barrier();
      EXPECT_EQ(r.store()->get("arrived"), std::to_string(4 * round));
      r.barrier();
    }
  });
}

TEST_P(RankGroupTest, MoreRanksThanCores) {
  RankGroup(16, GetParam()).run([](Rank& r) {
    r.barrier();
    EXPECT_LT(r.id(), 16);
  });
}

TEST_P(RankGroupTest, OneRank) {
  RankGroup(1, GetParam()).run([](Rank& r) {
    r.barrier();
    EXPECT_EQ(r.id(), 0);
  });
}

TEST_P(RankGroupTest, FailedAssertionIsTheRanksResult) {
  RankGroup group(3, GetParam());
  group.start([](Rank& r) {
    if (r.id() == 1) {
      EXPECT_EQ(r.id(), 100) << "on purpose";
    }
  });
  const auto results = group.collect();
  for (std::size_t rank : {0u, 2u}) EXPECT_FALSE(results.at(rank).failed());
  ASSERT_TRUE(results[1].failed());
  EXPECT_TRUE(results[1].returned);
  EXPECT_EQ(results[1].status.code, 1);
  ASSERT_EQ(results[1].failures.size(), 1u);
  EXPECT_EQ(results[1].failures[0].kind, RankFailure::Kind::kNonFatal);
  EXPECT_TRUE(contains(results[1].failures[0].file, "rank_group_test.cpp"));
  EXPECT_TRUE(contains(results[1].failures[0].text, "on purpose"));
}

TEST_P(RankGroupTest, FatalAssertionEndsTheRanksFunction) {
  RankGroup group(2, GetParam());
  group.start([](Rank& r) {
    ASSERT_EQ(r.id(), 0);
    r.store()->set("past", "yes");
  });
  const auto results = group.collect();
  EXPECT_FALSE(results.at(0).failed());
  ASSERT_EQ(results.at(1).failures.size(), 1u);
  EXPECT_EQ(results[1].failures[0].kind, RankFailure::Kind::kFatal);
}

TEST_P(RankGroupTest, ExceptionIsReportedWithItsKind) {
  RankGroup group(3, GetParam());
  group.start([](Rank& r) {
    if (r.id() == 0) fail(ErrorKind::kPeerLost, "rank 9 is gone");
    if (r.id() == 1) throw std::out_of_range("far out");
    throw 7;  // NOLINT(bugprone-std-exception-baseclass): foreign code may
  });
  const auto results = group.collect();
  const auto text = [&](std::size_t rank) { return results[rank].failures.at(0).text; };
  EXPECT_EQ(text(0), "threw convoy::Error (peer lost): rank 9 is gone");
  EXPECT_TRUE(contains(text(1), "far out"));
  EXPECT_TRUE(contains(text(2), "not a std::exception"));
  for (const auto& result : results) {
    EXPECT_FALSE(result.returned);
    EXPECT_TRUE(result.failed());
    EXPECT_EQ(result.status.code, 1);
  }
}

TEST_P(RankGroupTest, JoinFailsTheTestWithEveryRanksFailure) {
  RankGroup group(2, GetParam());
  group.start([](Rank& r) { EXPECT_EQ(r.id(), 100) << "rank " << r.id() << " was here"; });
  testing::TestPartResultArray parts;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &parts);
    group.join();
  }
  ASSERT_EQ(parts.size(), 3);  // one each, and the report
  EXPECT_TRUE(contains(parts.GetTestPartResult(0).message(), "rank 0 of 2: "));
  EXPECT_TRUE(contains(parts.GetTestPartResult(0).message(), "rank 0 was here"));
  EXPECT_TRUE(contains(parts.GetTestPartResult(1).message(), "rank 1 of 2: "));
  EXPECT_TRUE(contains(parts.GetTestPartResult(2).message(), "all 2 ranks"));
}

TEST_P(RankGroupTest, SkipOfARankSkipsTheTest) {
  RankGroup group(2, GetParam());
  group.start([](Rank& r) {
    if (r.id() == 1) GTEST_SKIP() << "nothing to see";
  });
  const auto results = group.collect();
  EXPECT_FALSE(results.at(0).skipped());
  EXPECT_TRUE(results.at(1).skipped());
  EXPECT_FALSE(results.at(1).failed());
  testing::TestPartResultArray parts;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &parts);
    report(results);
  }
  ASSERT_EQ(parts.size(), 1);
  EXPECT_TRUE(parts.GetTestPartResult(0).skipped());
}

TEST_P(RankGroupTest, WaitMarkThrowsWhenTheRankEndsWithout) {
  RankGroup group(2, GetParam());
  group.start([](Rank& r) {
    if (r.id() == 0) r.mark("ready");
  });
  try {
    group.wait_mark("ready");
    ADD_FAILURE() << "rank 1 did not mark";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPeerLost);
    EXPECT_TRUE(contains(error.what(), "rank 1 ended without the mark 'ready'"));
  }
  EXPECT_NO_THROW(group.wait_mark("ready", 0));
  group.join();
}

TEST_P(RankGroupTest, PostGoesToOneRankOrAll) {
  RankGroup group(2, GetParam());
  group.start([](Rank& r) {
    r.wait_for(concat("go ", r.id()));
    r.mark("went");
    r.wait_for("all");
  });
  group.post("go 1", 1);
  group.wait_mark("went", 1);
  group.post("go 0", 0);
  group.wait_mark("went", 0);
  group.post("all");
  group.join();
}

TEST_P(RankGroupTest, WaitForTimesOutBeforeTheGroup) {
  RankGroup group(1, GetParam(), {.limit = kShortLimit});
  group.start([](Rank& r) { r.wait_for("godot"); });
  const auto results = group.collect();
  ASSERT_EQ(results.at(0).failures.size(), 1u);
  EXPECT_TRUE(contains(results[0].failures[0].text, "'godot' was not posted in time"))
      << results[0].failures[0].text;
  EXPECT_FALSE(results[0].timed_out);
}

TEST_P(RankGroupTest, SeveralGroupsInOneTest) {
  for (int round = 0; round < 3; ++round) {
    RankGroup group(2, GetParam());
    group.start([round](Rank& r) {
      r.store()->set(concat("round ", r.id()), std::to_string(round));
      r.mark("set");
      r.wait_for("end");
    });
    group.wait_mark("set");
    for (const int rank : {0, 1}) {
      EXPECT_EQ(group.store()->try_get(concat("round ", rank)), std::to_string(round));
    }
    group.post("end");
    group.join();
  }
}

TEST_P(RankGroupTest, GroupsBesideEachOther) {
  RankGroup first(2, GetParam());
  RankGroup second(1, GetParam());
  first.start([](Rank& r) {
    r.mark("first");
    r.wait_for("end");
  });
  second.start([](Rank& r) { EXPECT_EQ(r.store()->try_get("nothing"), std::nullopt); });
  first.wait_mark("first");
  second.join();
  first.post("end");
  first.join();
}

TEST_P(RankGroupTest, RankMayStartThreads) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const int outer = r.id();
    RankGroup(3, RankMode::kThreads).run([&](Rank& inner) {
      EXPECT_EQ(inner.size(), 3);
      EXPECT_LT(outer, 2);
      inner.barrier();
    });
  });
}

TEST_P(RankGroupTest, RankMayNotStartProcesses) {
  RankGroup(2, GetParam()).run([](Rank&) {
    EXPECT_THROW(RankGroup(1, RankMode::kProcesses).run([](Rank&) {}), Error);
  });
}

TEST_P(RankGroupTest, GroupThatIsNotJoinedFails) {
  EXPECT_NONFATAL_FAILURE(
      {
        RankGroup group(1, GetParam());
        group.start([](Rank& r) { r.mark("ran"); });
        group.wait_mark("ran");
      },
      "started but not joined");
}

TEST_P(RankGroupTest, LeakOfARankIsItsFailure) {
  if (GetParam() == RankMode::kThreads) return;  // the test's own oracle sees threads
  RankGroup group(1, GetParam(), {.environment = {"CONVOY_TEST_SETTLE_MS=50"}});
  group.start([](Rank&) { ::open("/dev/null", O_RDONLY | O_CLOEXEC); });
  const auto results = group.collect();
  ASSERT_EQ(results.at(0).failures.size(), 1u);
  EXPECT_TRUE(contains(results[0].failures[0].text, "left behind: descriptor"));
}

TEST_P(RankGroupTest, TemporaryFileOfARankIsALeak) {
  if (GetParam() == RankMode::kThreads) return;  // the test's own oracle sees it
  RankGroup group(1, GetParam(), {.environment = {"CONVOY_TEST_SETTLE_MS=50"}});
  group.start([](Rank&) { write_file(concat(std::getenv("TMPDIR"), "/forgotten"), "x"); });
  const auto results = group.collect();
  ASSERT_EQ(results.at(0).failures.size(), 1u);
  EXPECT_TRUE(contains(results[0].failures[0].text, "left behind: temporary file"));
}

TEST(RankThreadsTest, ShareOneMemory) {
  std::atomic<int> sum = 0;
  RankGroup(4, RankMode::kThreads).run([&](Rank& r) { sum += r.id(); });
  EXPECT_EQ(sum, 6);
}

TEST(RankThreadsTest, GetNoSignals) {
  RankGroup group(1, RankMode::kThreads);
  group.start([](Rank& r) { r.wait_for("end"); });
  EXPECT_THROW(group.kill(0, SIGTERM), Error);
  group.post("end");
  group.join();
}

TEST(RankThreadsDeathTest, HangingThreadEndsTheProgramAndShowsItsStack) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(RankGroup(2, RankMode::kThreads, {.limit = milliseconds(500)}).run([](Rank& r) {
    if (r.id() == 1) ::pause();
  }),
              testing::KilledBySignal(SIGABRT), "rank 0: ended\nrank 1: still runs(.|\n)*stack of");
}

TEST(RankProcessesTest, AreProcesses) {
  const pid_t test = ::getpid();
  RankGroup group(2, RankMode::kProcesses);
  group.start([](Rank& r) {
    r.store()->set(concat("pid ", r.id()), std::to_string(::getpid()));
    r.mark("set");
    r.wait_for("end");
  });
  group.wait_mark("set");
  for (const int rank : {0, 1}) {
    const pid_t pid = group.pid(rank);
    EXPECT_NE(pid, test);
    EXPECT_EQ(group.store()->get(concat("pid ", rank)), std::to_string(pid));
  }
  group.post("end");
  group.join();
}

TEST(RankProcessesTest, KilledRankShowsItsSignalAndFailsNothing) {
  RankGroup group(3, RankMode::kProcesses);
  group.start([](Rank& r) {
    r.mark("ready");
    r.wait_for("end");
  });
  group.wait_mark("ready");
  group.kill(1, SIGKILL);
  group.post("end");
  const auto results = group.join();
  EXPECT_EQ(results.at(1).status.signal, SIGKILL);
  EXPECT_TRUE(results.at(1).signalled);
  EXPECT_FALSE(results.at(1).returned);
  for (std::size_t rank : {0u, 2u}) EXPECT_TRUE(results.at(rank).status.success());
}

TEST(RankProcessesTest, StoppedRankStandsStillUntilItIsResumed) {
  RankGroup group(1, RankMode::kProcesses);
  group.start([](Rank& r) {
    r.mark("ready");
    r.wait_for("go");
    r.mark("went");
  });
  group.wait_mark("ready");
  group.stop(0);
  const auto state = process_state(group.pid(0));
  EXPECT_EQ(state.value_or('T'), 'T');  // in the rank itself the group has no pid
  group.post("go");
  group.resume(0);
  group.wait_mark("went");
  group.join();
}

TEST(RankProcessesTest, OutputIsKeptAndNamedByRank) {
  RankGroup group(2, RankMode::kProcesses);
  group.start([](Rank& r) {
    std::printf("to stdout\n");
    std::fprintf(stderr, "to stderr of %d\n", r.id());
    if (r.id() == 1) ADD_FAILURE() << "so that it is shown";
  });
  testing::TestPartResultArray parts;
  std::vector<RankResult> results;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &parts);
    results = group.join();
  }
  EXPECT_TRUE(contains(results.at(0).output, "to stdout\n")) << results[0].output;
  EXPECT_TRUE(contains(results.at(1).output, "to stderr of 1\n"));
  ASSERT_EQ(parts.size(), 2);
  const std::string text = parts.GetTestPartResult(1).message();
  EXPECT_TRUE(contains(text, "[0] to stderr of 0\n")) << text;
  EXPECT_TRUE(contains(text, "[1] to stderr of 1\n"));
}

TEST(RankProcessesTest, LongOutputKeepsItsEnd) {
  RankGroup group(1, RankMode::kProcesses);
  group.start([](Rank&) {
    for (int i = 0; i < 40000; ++i) std::printf("line %d of many\n", i);
  });
  const auto results = group.join();
  EXPECT_TRUE(contains(results.at(0).output, "line 39999 of many\n"));
  EXPECT_FALSE(contains(results.at(0).output, "line 0 of many\n"));
}

TEST(RankProcessesTest, AbortAndExitAreTheRanksStatus) {
  RankGroup group(4, RankMode::kProcesses);
  group.start([](Rank& r) {
    if (r.id() == 0) std::abort();
    if (r.id() == 1) ::_exit(3);
    if (r.id() == 2) std::thread([] { throw std::runtime_error("nobody catches this"); }).join();
  });
  const auto results = group.collect();
  EXPECT_EQ(results.at(0).status.signal, SIGABRT);
  EXPECT_EQ(results.at(1).status.code, 3);
  EXPECT_EQ(results.at(2).status.signal, SIGABRT);
  EXPECT_TRUE(contains(results.at(2).output, "nobody catches this")) << results[2].output;
  for (std::size_t rank : {0u, 1u, 2u}) {
    EXPECT_TRUE(results[rank].failed());
    EXPECT_FALSE(results[rank].returned);
  }
  EXPECT_FALSE(results.at(3).failed());
}

TEST(RankProcessesTest, TimeLimitKillsAndShowsWhatTheRankDid) {
  RankGroup group(2, RankMode::kProcesses, {.limit = kShortLimit});
  group.start([](Rank& r) {
    std::fprintf(stderr, "rank %d is about to hang\n", r.id());
    if (r.id() == 1) {
      for (;;) ::pause();
    }
  });
  const auto results = group.collect();
  EXPECT_FALSE(results.at(0).timed_out);
  EXPECT_TRUE(results.at(1).timed_out);
  EXPECT_TRUE(results[1].failed());
  EXPECT_EQ(results[1].status.signal, SIGKILL);
  EXPECT_TRUE(contains(results[1].output, "rank 1 is about to hang"));
  EXPECT_TRUE(contains(results[1].output, "at the time limit:\n  thread")) << results[1].output;
  EXPECT_TRUE(contains(results[1].output, "--- stack of thread")) << results[1].output;
}

TEST(RankProcessesTest, TimeLimitKillsAStoppedRank) {
  RankGroup group(1, RankMode::kProcesses, {.limit = kShortLimit});
  group.start([](Rank& r) {
    r.mark("ready");
    r.wait_for("godot");
  });
  group.wait_mark("ready");
  group.stop(0);
  const auto results = group.collect();
  EXPECT_TRUE(results.at(0).timed_out);
  EXPECT_EQ(results[0].status.signal, SIGKILL);
}

TEST(RankProcessesTest, EnvironmentReachesTheRank) {
  RankGroup(1, RankMode::kProcesses, {.environment = {"CONVOY_SAMPLE=blue"}}).run([](Rank&) {
    const char* value = std::getenv("CONVOY_SAMPLE");
    EXPECT_STREQ(value ? value : "", "blue");
    EXPECT_EQ(std::getenv("CONVOY_TEST_RANK"), nullptr);  // what a rank starts is no rank
  });
}

TEST(RankProcessesTest, BodyThatStopsBeforeTheGroupIsExplained) {
  const pid_t test = ::getpid();
  RankGroup first(1, RankMode::kProcesses);
  first.start([](Rank& r) { r.store()->set("pid", std::to_string(::getpid())); });
  const auto earlier = first.join();
  RankGroup second(1, RankMode::kProcesses, {.environment = {"CONVOY_STOP_EARLY=1"}});
  if (std::getenv("CONVOY_STOP_EARLY")) return;
  second.start([](Rank&) {});
  const auto results = second.collect();
  EXPECT_EQ(results.at(0).status.code, 2);
  EXPECT_TRUE(contains(results[0].output, "did not reach RankGroup number 2")) << results[0].output;
  EXPECT_GT(test, 0);
}

// In a rank, locals and fixtures before the group end as in any test: a rank's own temporary
// folder is removed.
class RankFixtureTest : public testing::Test {
 protected:
  ~RankFixtureTest() override { std::fprintf(stderr, "fixture ended\n"); }
  struct Local {
    ~Local() { std::fprintf(stderr, "local ended\n"); }
  };
};

TEST_F(RankFixtureTest, RankUnwindsTheBody) {
  const Local local;
  RankGroup group(1, RankMode::kProcesses);
  group.start([](Rank&) {});
  const auto results = group.join();
  EXPECT_TRUE(contains(results.at(0).output, "local ended\nfixture ended\n")) << results[0].output;
}

TEST(RankProcessesTest, DieWithTheTestProgram) {
  // Ranks may not start ranks, so this runs the program itself; what it leaves in its TMPDIR goes
  // with the folder.
  const TempFolder folder("orphans");
  std::vector<std::string> environment = {"TMPDIR=" + folder.path()};
  auto program = ChildProcess::spawn(
      {.arguments = {sibling_program("misbehaving_tests"), "--gtest_filter=Waiting.*"},
       .environment = environment,
       .death_signal = SIGKILL});
  const auto deadline = Deadline::after(seconds(30));
  std::vector<pid_t> ranks;
  while (ranks.size() < 2 && !deadline.expired()) ranks = children_of(program.pid());
  ASSERT_EQ(ranks.size(), 2u);
  std::vector<UniqueFd> handles;
  for (const pid_t rank : ranks) handles.push_back(open_pidfd(rank));
  program.kill(SIGKILL);
  for (const auto& handle : handles) {
    EXPECT_TRUE(wait_ready(handle.get(), 1, deadline));
  }
  program.wait(deadline);
}

}  // namespace
}  // namespace convoy::test
