#include "os/process.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <thread>

#include "base/error.h"
#include "os/file.h"
#include "os/socket.h"
#include "support/deadlines.h"
#include "support/eventually.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy {
namespace {

using test::eventually;

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;
using test::expect_error;
using test::soon;

ChildProcess shell(const std::string& script) {
  return ChildProcess::spawn({.arguments = {"sh", "-c", script}});
}
ChildProcess sleeper() { return ChildProcess::spawn({.arguments = {"sleep", "1000"}}); }

TEST(ExitStatusTest, Texts) {
  EXPECT_EQ((ExitStatus{.code = 3}).to_string(), "exit code 3");
  EXPECT_EQ((ExitStatus{.signal = SIGKILL}).to_string(), "signal 9 (SIGKILL)");
  EXPECT_EQ((ExitStatus{.code = 3}).shell_code(), 3);
  EXPECT_EQ((ExitStatus{.signal = SIGSEGV}).shell_code(), 139);
  EXPECT_TRUE(ExitStatus{}.success());
  EXPECT_FALSE((ExitStatus{.code = 1}).success());
  EXPECT_FALSE((ExitStatus{.signal = SIGTERM}).success());
}

TEST(SignalTest, Names) {
  EXPECT_EQ(signal_name(SIGTERM), "SIGTERM");
  EXPECT_EQ(signal_name(77), "signal 77");
  EXPECT_EQ(signal_name(0), "signal 0");
}

TEST(SignalTest, Parse) {
  EXPECT_EQ(parse_signal("SIGTERM"), SIGTERM);
  EXPECT_EQ(parse_signal("TERM"), SIGTERM);
  EXPECT_EQ(parse_signal("15"), 15);
  EXPECT_EQ(parse_signal("64"), 64);
  for (const char* bad : {"", "0", "-1", "65", "15 ", " 15", "sigterm", "SIG", "SIGSIGTERM", "9x",
                          "99999999999999999999"}) {
    EXPECT_EQ(parse_signal(bad), std::nullopt) << bad;
  }
}

TEST(ChildProcessTest, ExitCodes) {
  for (const int code : {0, 1, 3, 127, 255}) {
    auto child = shell(concat("exit ", code));
    const auto status = child.wait(soon());
    ASSERT_TRUE(status);
    EXPECT_EQ(status->code, code);
    EXPECT_EQ(status->signal, 0);
  }
}

TEST(ChildProcessTest, Signals) {
  for (const int signal : {SIGTERM, SIGKILL, SIGSEGV}) {
    auto child = sleeper();
    EXPECT_TRUE(child.running());
    child.kill(signal);
    const auto status = child.wait(soon());
    ASSERT_TRUE(status);
    EXPECT_EQ(status->signal, signal);
    EXPECT_FALSE(child.running());
  }
}

TEST(ChildProcessTest, WaitEndsAtTheDeadlineAndCanBeRepeated) {
  auto child = sleeper();
  EXPECT_EQ(child.wait(Deadline::after(seconds(0))), std::nullopt);
  EXPECT_EQ(child.wait(Deadline::after(milliseconds(10))), std::nullopt);
  EXPECT_TRUE(child.running());
  child.kill(SIGKILL);
  ASSERT_TRUE(child.wait(soon()));
  EXPECT_EQ(child.wait(Deadline::after(seconds(0)))->signal, SIGKILL);  // remembered
  child.kill(SIGKILL);                                                  // no effect, no harm
}

TEST(ChildProcessTest, PidfdTellsTheEnd) {
  auto child = sleeper();
  EXPECT_FALSE(wait_ready(child.pidfd(), POLLIN, Deadline::after(seconds(0))));
  child.kill(SIGKILL);
  EXPECT_TRUE(wait_ready(child.pidfd(), POLLIN, soon()));
}

TEST(ChildProcessTest, DestructorKillsAndReaps) {
  pid_t pid = 0;
  {
    const auto child = sleeper();
    pid = child.pid();
    EXPECT_TRUE(process_state(pid));
  }
  EXPECT_EQ(process_state(pid), std::nullopt);
}

TEST(ChildProcessTest, DestructorEndsAStoppedChild) {
  auto child = sleeper();
  child.kill(SIGSTOP);
  EXPECT_TRUE(eventually([&] { return process_state(child.pid()) == 'T'; }));
}

TEST(ChildProcessTest, MovePassesTheChild) {
  auto a = sleeper();
  const pid_t first = a.pid();
  ChildProcess b(std::move(a));
  EXPECT_FALSE(a.running());  // NOLINT(bugprone-use-after-move): what a move leaves is the point
  EXPECT_EQ(b.pid(), first);
  auto c = sleeper();
  const pid_t second = c.pid();
  c = std::move(b);  // ends what c was
  EXPECT_EQ(process_state(second), std::nullopt);
  EXPECT_EQ(c.pid(), first);
  auto& same = c;
  c = std::move(same);
  EXPECT_TRUE(c.running());
}

TEST(ChildProcessTest, EmptyOne) {
  ChildProcess none;
  EXPECT_FALSE(none.running());
  none.kill(SIGKILL);
  none.kill_group(SIGKILL);
  expect_error(ErrorKind::kInternal, "no process", [&] { none.wait(soon()); });
}

TEST(ChildProcessTest, IgnoredSigchldIsExplained) {
  test::run_in_process([] {
    ::signal(SIGCHLD, SIG_IGN);  // the kernel then reaps by itself
    // Told by spawn() if the child ends at once, else by wait().
    expect_error(ErrorKind::kInternal, "is SIGCHLD ignored", [] { shell("exit 3").wait(soon()); });
    ::signal(SIGCHLD, SIG_DFL);
  });
}

class ProcessGroupTest : public testing::Test {
 protected:
  // A shell with two children, in a group of its own; the children's pidfds.
  void start(const std::string& end) {
    leader_ = ChildProcess::spawn(
        {.arguments = {"sh", "-c", "sleep 1000 & sleep 1000 & " + end}, .own_process_group = true});
    ASSERT_TRUE(eventually([&] { return members().size() >= 2; }));
    for (const pid_t pid : members()) handles_.push_back(open_pidfd(pid));
  }
  std::vector<pid_t> members() const {
    std::vector<pid_t> found;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const pid_t pid = static_cast<pid_t>(std::atoi(entry.path().filename().c_str()));
      if (pid > 0 && pid != leader_.pid() && ::getpgid(pid) == leader_.pid()) found.push_back(pid);
    }
    return found;
  }
  void expect_all_end() const {
    for (const auto& handle : handles_) EXPECT_TRUE(wait_ready(handle.get(), POLLIN, soon()));
  }

  ChildProcess leader_;
  std::vector<UniqueFd> handles_;
};

TEST_F(ProcessGroupTest, SignalReachesTheWholeGroup) {
  start("wait");
  EXPECT_EQ(::getpgid(leader_.pid()), leader_.pid());
  leader_.kill_group(SIGTERM);
  expect_all_end();
  ASSERT_TRUE(leader_.wait(soon()));
}

TEST_F(ProcessGroupTest, SignalReachesMembersOfAReapedLeader) {
  start("kill -KILL $$");
  ASSERT_TRUE(leader_.wait(soon()));
  leader_.kill_group(SIGKILL);
  expect_all_end();
}

TEST_F(ProcessGroupTest, WithoutAGroupOfItsOwnNothingIsSent) {
  auto child = sleeper();
  child.kill_group(SIGKILL);  // would be our own group
  EXPECT_EQ(child.wait(Deadline::after(milliseconds(10))), std::nullopt);
}

TEST(PidfdTest, OfNobodyIsEmpty) {
  auto child = sleeper();
  const pid_t pid = child.pid();
  {
    const UniqueFd handle = open_pidfd(pid);
    ASSERT_TRUE(handle);
    send_signal(handle.get(), SIGKILL);
    EXPECT_EQ(child.wait(soon())->signal, SIGKILL);
    send_signal(handle.get(), SIGKILL);  // to nobody: harmless
  }
  EXPECT_FALSE(open_pidfd(pid));
}

TEST(ProcessStateTest, States) {
  auto child = sleeper();
  EXPECT_TRUE(eventually([&] { return process_state(child.pid()) == 'S'; }));
  child.kill(SIGSTOP);
  EXPECT_TRUE(eventually([&] { return process_state(child.pid()) == 'T'; }));
  child.kill(SIGKILL);
  ASSERT_TRUE(wait_ready(child.pidfd(), POLLIN, soon()));
  EXPECT_EQ(process_state(child.pid()), 'Z');
  const pid_t pid = child.pid();
  child.wait(soon());
  EXPECT_EQ(process_state(pid), std::nullopt);
  EXPECT_EQ(process_state(::getpid()), 'R');
}

TEST(ProcessStateTest, NameWithParenthesesDoesNotConfuse) {
  const TempFolder folder("process");
  const std::string program = folder.path() + "/x) Z (1";
  const auto found = fs::exists("/bin/sleep") ? "/bin/sleep" : "/usr/bin/sleep";
  fs::copy_file(found, program);
  auto child = ChildProcess::spawn({.arguments = {program, "1000"}});
  EXPECT_TRUE(eventually([&] { return process_state(child.pid()) == 'S'; }));
}

TEST(ChildrenTest, DirectAndAllDescendants) {
  auto top = shell("sh -c 'sleep 1000 & wait' & sleep 1000 & wait");
  ASSERT_TRUE(eventually([&] { return descendants_of(top.pid()).size() == 3; }));
  const auto children = children_of(top.pid());
  const auto all = descendants_of(top.pid());
  EXPECT_EQ(children.size(), 2u);
  for (const pid_t child : children) {
    EXPECT_NE(std::find(all.begin(), all.end(), child), all.end());
  }
  const auto mine = children_of(::getpid());
  EXPECT_NE(std::find(mine.begin(), mine.end(), top.pid()), mine.end());
  std::vector<UniqueFd> handles;
  for (const pid_t pid : all) handles.push_back(open_pidfd(pid));
  for (const auto& handle : handles) send_signal(handle.get(), SIGKILL);
  for (const auto& handle : handles) wait_ready(handle.get(), POLLIN, soon());
}

TEST(ChildrenTest, OfNobody) {
  auto child = sleeper();
  const pid_t pid = child.pid();
  EXPECT_TRUE(children_of(pid).empty());
  child = ChildProcess();
  EXPECT_TRUE(children_of(pid).empty());
  EXPECT_TRUE(descendants_of(pid).empty());
}

TEST(ChildrenTest, ProcessesThatComeAndGoDoNoHarm) {
  auto busy = shell("while :; do /bin/true & /bin/true; done");
  for (int i = 0; i < 300; ++i) EXPECT_NO_THROW(descendants_of(busy.pid()));
  busy.kill(SIGKILL);
  busy.wait(soon());
}

TEST(SubreaperTest, OrphansComeToUs) {
  test::run_in_process([] {
    become_subreaper();
    const TempFolder folder("orphan");
    auto parent = shell(concat("sleep 1000 & echo $! > ", folder.path(), "/pid"));
    ASSERT_TRUE(parent.wait(soon()));
    const auto orphan =
        static_cast<pid_t>(std::atoi(read_file(folder.path() + "/pid").value_or("0").c_str()));
    ASSERT_GT(orphan, 0);
    EXPECT_TRUE(eventually([&] {
      const auto mine = children_of(::getpid());
      return std::find(mine.begin(), mine.end(), orphan) != mine.end();
    }));
    ::kill(orphan, SIGKILL);
    EXPECT_EQ(::waitpid(orphan, nullptr, 0), orphan);
  });
}

TEST(LivenessTest, OfAChild) {
  auto child = sleeper();
  const std::uint64_t start = process_start_time(child.pid());
  EXPECT_EQ(liveness_of(child.pid(), start), Liveness::kAlive);
  EXPECT_EQ(liveness_of_any(child.pid()), Liveness::kAlive);
  EXPECT_EQ(liveness_by(child.pidfd()), Liveness::kAlive);
  // The pid of another process than the one that is meant.
  EXPECT_EQ(liveness_of(child.pid(), start + 1), Liveness::kDead);
  child.kill(SIGKILL);
  ASSERT_TRUE(eventually([&] { return liveness_by(child.pidfd()) == Liveness::kDead; }));
  // Not reaped: a zombie does nothing any more.
  EXPECT_EQ(liveness_of(child.pid(), start), Liveness::kDead);
  EXPECT_EQ(process_state(child.pid()), 'Z');
  ASSERT_TRUE(child.wait(soon()));
  EXPECT_EQ(liveness_of(child.pid(), start), Liveness::kDead);
  EXPECT_EQ(liveness_of_any(child.pid()), Liveness::kDead);
  EXPECT_EQ(liveness_by(child.pidfd()), Liveness::kDead);
}

TEST(LivenessTest, OfNobody) {
  EXPECT_EQ(liveness_of(0, 0), Liveness::kDead);
  EXPECT_EQ(liveness_of(-1, 0), Liveness::kDead);
  EXPECT_EQ(liveness_by(-1), Liveness::kUnknown);
  const UniqueFd closed(::dup(0));
  const int number = closed.get();
  ::close(number);
  EXPECT_EQ(liveness_by(number), Liveness::kUnknown);
  ::dup2(0, number);  // for the destructor
}

TEST(LivenessTest, WithoutDescriptorsNothingIsGuessed) {
  auto child = sleeper();
  const std::uint64_t start = process_start_time(child.pid());
  auto ended = shell("exit 0");
  const std::uint64_t ended_start = process_start_time(ended.pid());
  ASSERT_TRUE(ended.wait(soon()));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next = ::dup(STDERR_FILENO);  // not 0: poll() takes no more than a process may have
  ::close(next);
  const rlimit none{static_cast<rlim_t>(next), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto alive = liveness_of(child.pid(), start);
  const auto by_pidfd = liveness_by(child.pidfd());
  const auto gone = liveness_of(ended.pid(), ended_start);
  const std::uint64_t domain = process_domain();
  const auto own = test::error_of([] { (void)own_start_time(); });
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(alive, Liveness::kUnknown);
  EXPECT_EQ(by_pidfd, Liveness::kAlive);
  EXPECT_EQ(gone, Liveness::kDead);  // the kernel says so without a descriptor
  EXPECT_EQ(domain, process_domain());
  EXPECT_NE(domain, 0U);
  ASSERT_TRUE(own);
  EXPECT_EQ(own->kind(), ErrorKind::kResource) << own->what();
  EXPECT_EQ(own_start_time(), process_start_time(::getpid()));
}

// pthread_exit in main(): /proc says Z, and the process runs.
TEST(LivenessTest, MainThreadHasEnded) {
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    std::thread([&] {
      char got = 0;
      ::close(pipe[1]);
      [[maybe_unused]] const auto ignored = ::read(pipe[0], &got, 1);
      ::_exit(7);
    }).detach();
    ::syscall(SYS_exit, 0);  // of this thread alone
  }
  const UniqueFd pidfd = open_pidfd(pid);
  const std::uint64_t start = process_start_time(pid);
  ASSERT_TRUE(eventually([&] {
    return read_file(concat("/proc/", pid, "/stat")).value_or("").find(") Z ") != std::string::npos;
  }));
  EXPECT_EQ(liveness_of(pid, start), Liveness::kAlive);
  EXPECT_EQ(liveness_by(pidfd.get()), Liveness::kAlive);
  EXPECT_TRUE(eventually([&] { return process_state(pid) == 'S'; }));
  EXPECT_EQ(exit_status_of(pid, pidfd.get()), std::nullopt);
  ::close(pipe[1]);
  ASSERT_TRUE(eventually([&] { return liveness_of(pid, start) == Liveness::kDead; }));
  EXPECT_EQ(exit_status_of(pid, pidfd.get())->code, 7);
  ASSERT_EQ(::waitpid(pid, nullptr, 0), pid);
  ::close(pipe[0]);
}

}  // namespace
}  // namespace convoy
