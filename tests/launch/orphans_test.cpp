#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>

#include "base/concat.h"
#include "base/id.h"
#include "launch/launched.h"
#include "os/file.h"

namespace convoy::launch {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Four ranks, each with a child, a daemon of its own session and a daemon that ignores SIGTERM.
Launched crowded_job(const std::vector<std::string>& then) {
  std::vector<std::string> script = {"pid",     "child", "daemon", "stubborn-daemon",
                                     "barrier", "up",    "say",    "ready"};
  script.insert(script.end(), then.begin(), then.end());
  return Launched::run({"-n", "4", "--grace", "500ms"}, script);
}

void wait_until_crowded(Launched& job) {
  ASSERT_TRUE(job.wait_for("ready", 4));
  ASSERT_TRUE(job.wait_for("] daemon ", 8));
  ASSERT_GE(processes_of_job(job.job_id()).size(), 16U);
}

TEST(Orphans, NoneAfterTheLauncherWasKilled) {
  auto job = crowded_job({"wait"});
  wait_until_crowded(job);
  const pid_t supervisor = job.supervisor();
  ASSERT_GT(supervisor, 0);
  job.kill(SIGKILL);
  EXPECT_EQ(job.finish().signal, SIGKILL);
  EXPECT_TRUE(wait_gone(supervisor));
  expect_nothing_left(job.job_id());
  EXPECT_THAT(job.err(), AllOf(HasSubstr(concat("convoy: the launcher (pid ", job.pid(),
                                                ") was killed; its monitor ended the job")),
                               HasSubstr("ended by the launcher: ranks 0-3 (killed)")));
}

TEST(Orphans, NoneAfterTheSupervisorWasKilled) {
  auto job = crowded_job({"wait"});
  wait_until_crowded(job);
  const pid_t supervisor = job.supervisor();
  ASSERT_GT(supervisor, 0);
  ASSERT_EQ(::kill(supervisor, SIGKILL), 0);
  EXPECT_EQ(job.finish().shell_code(), 137);
  expect_nothing_left(job.job_id());
  EXPECT_THAT(job.err(), HasSubstr(concat("convoy: the supervisor (pid ", supervisor,
                                          ") was killed: signal 9 (SIGKILL)")));
}

TEST(Orphans, NoneAfterARankWasKilled) {
  auto job = crowded_job({"wait"});
  wait_until_crowded(job);
  ASSERT_EQ(::kill(job.pid_of_rank(3), SIGKILL), 0);
  EXPECT_EQ(job.finish().shell_code(), 137);
  expect_nothing_left(job.job_id());
  EXPECT_THAT(job.err(), HasSubstr("  ended what ranks had left running: rank_probe (pid "));
}

TEST(Orphans, NoneAfterAJobThatWentWell) {
  auto job = crowded_job({});
  EXPECT_EQ(job.finish().shell_code(), 0);
  expect_nothing_left(job.job_id());
  EXPECT_THAT(job.err(), HasSubstr("convoy: ended what ranks had left running: rank_probe (pid "));
}

TEST(Orphans, AChildThatEndsByItselfIsNotMentioned) {
  const auto result = run_convoy({"run", "-n", "2", "/bin/sh", "-c", "(exec true) & exit 0"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "");
}

TEST(Orphans, ZombiesAreReapedWhileTheJobRuns) {
  // The rank leaves 20 orphans that end at once; the supervisor inherits and reaps them.
  auto job = Launched({.arguments = {"run", "-n", "1", "/bin/sh", "-c",
                                     "i=0; while [ $i -lt 20 ]; do (true & ) ; i=$((i+1)); done; "
                                     "echo ready; while :; do sleep 1; done"}});
  ASSERT_TRUE(job.wait_for("ready"));
  const pid_t supervisor = job.supervisor();
  ASSERT_GT(supervisor, 0);
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  while (children_of(supervisor).size() > 1 && !deadline.expired()) {
    wait_gone(children_of(supervisor).back());
  }
  EXPECT_EQ(children_of(supervisor).size(), 1U);
  job.kill(SIGTERM);
  EXPECT_EQ(job.finish().shell_code(), 143);
}

TEST(Orphans, TheTemporaryFolderGoesWithEitherProcess) {
  for (const bool kill_launcher : {true, false}) {
    const TempFolder folder("launch-test");
    Launched job(
        {.arguments = {"run", "-n", "1", rank_probe(), "var", "TORCHELASTIC_ERROR_FILE", "wait"},
         .environment = {{"TMPDIR", folder.path()}}});
    ASSERT_TRUE(job.wait_for("TORCHELASTIC_ERROR_FILE=" + folder.path() + "/"));
    ASSERT_FALSE(std::filesystem::is_empty(folder.path()));
    ASSERT_EQ(::kill(kill_launcher ? job.pid() : job.supervisor(), SIGKILL), 0);
    job.finish();
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "launcher killed: " << kill_launcher;
  }
}

TEST(Orphans, SparesChildrenThatWereThereBefore) {
  // A shell starts something of its own and then becomes convoy.
  Launched job({.arguments = {"run", "-n", "1", rank_probe(), "say", "ready", "wait"},
                .wrapper = {"/bin/sh", "-c",
                            "sleep 50 >/dev/null 2>&1 & echo before $!; exec \"$0\" \"$@\""}});
  ASSERT_TRUE(job.wait_for("ready"));
  const auto before = job.numbers_behind("before");
  ASSERT_EQ(before.size(), 1U);
  pid_t supervisor = 0;
  for (const pid_t child : children_of(job.pid())) {
    if (child != before[0]) supervisor = child;
  }
  ASSERT_EQ(::kill(supervisor, SIGKILL), 0);
  EXPECT_EQ(job.finish().shell_code(), 137);
  EXPECT_EQ(process_state(before[0]).value_or('-'), 'S');
  ::kill(before[0], SIGKILL);
}

TEST(Orphans, ARankMayBeALauncherItself) {
  // The inner launchers are killed together with their supervisors: nobody is left to remove their
  // folders.
  const TempFolder folder("launch-test");
  const std::string id = "outer-" + Id::random().to_string();
  Launched job({.arguments = {"run", "-n", "2", "--job-id", id, convoy_program(), "run", "-n", "2",
                              rank_probe(), "say", "inner", "wait"},
                .environment = {{"TMPDIR", folder.path()}}});
  ASSERT_TRUE(job.wait_for("inner", 4));
  EXPECT_THAT(job.out(), HasSubstr("[1] [0] inner"));
  job.kill(SIGKILL);
  job.finish();
  expect_nothing_left(id);
}

}  // namespace
}  // namespace convoy::launch
