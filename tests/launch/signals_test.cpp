#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include "base/concat.h"
#include "launch/launched.h"

namespace convoy::launch {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;

struct Signal {
  int number;
};
void PrintTo(Signal signal, std::ostream* out) { *out << signal_name(signal.number); }

class StopSignal : public testing::TestWithParam<Signal> {};

TEST_P(StopSignal, ReachesTheRanksAndTheExitStatus) {
  const int signal = GetParam().number;
  const std::string name = signal_name(signal);
  auto job = Launched::run(
      {"-n", "2"}, {"only", "0", "catch", name, "all", "barrier", "up", "say", "ready", "wait"});
  ASSERT_TRUE(job.wait_for("ready", 2));
  job.kill(signal);
  const auto status = job.finish();
  EXPECT_EQ(status.code, 128 + signal);
  EXPECT_THAT(job.out(), HasSubstr(concat("[0] caught ", signal)));
  EXPECT_THAT(job.err(), AllOf(HasSubstr(concat("convoy: stopped by ", name, " after ")),
                               HasSubstr(concat("rank 1 (", name, ")")),
                               HasSubstr(concat("rank 0 (exit code 40 after ", name, ")")),
                               Not(HasSubstr("failed first"))));
  expect_nothing_left(job.job_id());
}

INSTANTIATE_TEST_SUITE_P(Each, StopSignal,
                         testing::Values(Signal{SIGINT}, Signal{SIGTERM}, Signal{SIGHUP},
                                         Signal{SIGQUIT}),
                         [](const auto& instance) { return signal_name(instance.param.number); });

TEST(Signals, KillAfterTheGrace) {
  auto job = Launched::run({"-n", "2", "--grace", "200ms"},
                           {"ignore", "TERM", "barrier", "up", "say", "ready", "wait"});
  ASSERT_TRUE(job.wait_for("ready", 2));
  job.kill(SIGTERM);
  EXPECT_EQ(job.finish().code, 143);
  EXPECT_THAT(job.err(), HasSubstr("ranks 0, 1 (killed after 0.2 s of grace)"));
}

TEST(Signals, ASecondInterruptKillsAtOnce) {
  auto job = Launched::run({"-n", "2", "--grace", "600s"},
                           {"note", "INT", "barrier", "up", "say", "ready", "wait"});
  ASSERT_TRUE(job.wait_for("ready", 2));
  job.kill(SIGINT);
  ASSERT_TRUE(job.wait_for("got 2\n", 2));
  // What the launcher says after a second of waiting: the first one is long past.
  ASSERT_TRUE(job.wait_for_error("waiting up to 10 min 0 s for ranks 0, 1 to end"));
  job.kill(SIGINT);
  EXPECT_EQ(job.finish().code, 130);
  EXPECT_THAT(job.err(), HasSubstr("ranks 0, 1 (killed at the next SIGINT)"));
}

TEST(Signals, UserSignalsGoToTheRanksAlone) {
  // The child has no handler: it would die of the signal.
  auto job = Launched::run({"-n", "2"}, {"child", "note", "USR1", "note", "USR2", "barrier", "up",
                                         "say", "ready", "wait"});
  ASSERT_TRUE(job.wait_for("ready", 2));
  job.kill(SIGUSR1);
  ASSERT_TRUE(job.wait_for(concat("got ", SIGUSR1, "\n"), 2));
  job.kill(SIGUSR2);
  ASSERT_TRUE(job.wait_for(concat("got ", SIGUSR2, "\n"), 2));
  // Asleep, or on the way there: it may have begun a moment ago.
  for (const pid_t child : job.numbers_behind("child")) {
    EXPECT_THAT(process_state(child).value_or('-'), AnyOf('S', 'R', 'D'));
  }
  job.kill(SIGTERM);
  EXPECT_EQ(job.finish().code, 143);
}

bool wait_state(pid_t pid, char state) {
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  while (process_state(pid) != state) {
    if (deadline.expired()) return false;
    ::poll(nullptr, 0, 5);
  }
  return true;
}

TEST(Signals, StopAndContinue) {
  auto job = Launched::run({"-n", "2"}, {"pid", "barrier", "up", "say", "ready", "wait"});
  ASSERT_TRUE(job.wait_for("ready", 2));
  job.kill(SIGTSTP);  // Ctrl-Z
  EXPECT_TRUE(wait_state(job.pid(), 'T'));
  EXPECT_TRUE(wait_state(job.pid_of_rank(0), 'T'));
  EXPECT_TRUE(wait_state(job.pid_of_rank(1), 'T'));
  job.kill(SIGCONT);  // fg
  EXPECT_TRUE(wait_state(job.pid_of_rank(0), 'S'));
  EXPECT_TRUE(wait_state(job.pid_of_rank(1), 'S'));
  EXPECT_TRUE(wait_state(job.pid(), 'S'));
  job.kill(SIGTERM);
  EXPECT_EQ(job.finish().code, 143);
}

TEST(Signals, NohupIsRespected) {
  Launched job(
      {.arguments = {"run", "-n", "1", rank_probe(), "note", "USR1", "say", "ready", "wait"},
       .wrapper = {"/bin/sh", "-c", "trap '' HUP; exec \"$0\" \"$@\""}});
  ASSERT_TRUE(job.wait_for("ready"));
  job.kill(SIGHUP);
  job.kill(SIGUSR1);  // delivered after SIGHUP would have been
  ASSERT_TRUE(job.wait_for(concat("got ", SIGUSR1, "\n")));
  job.kill(SIGTERM);
  EXPECT_EQ(job.finish().code, 143);
}

TEST(Signals, RankEndsGracefullyAndStatusStaysTheSignals) {
  auto job = Launched::run({"-n", "1"}, {"note", "TERM", "say", "ready", "wait-once"});
  ASSERT_TRUE(job.wait_for("ready"));
  job.kill(SIGTERM);
  EXPECT_EQ(job.finish().code, 143);
  EXPECT_THAT(job.err(), HasSubstr("rank 0 (exit code 0 after SIGTERM)"));
}

}  // namespace
}  // namespace convoy::launch
