#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "os/file.h"
#include "os/machine.h"
#include "os/process.h"
#include "os/socket.h"
#include "support/deadlines.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using test::expect_error;
using test::soon;

struct Output {
  ExitStatus status;
  std::string out;
  std::string err;
};

// Runs a program to its end and keeps what it says.
Output run(SpawnOptions options) {
  const TempFolder folder("spawn");
  const auto file = [&](const char* name) {
    return UniqueFd(
        ::open((folder.path() + name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_APPEND, 0600));
  };
  const UniqueFd out = file("/out");
  const UniqueFd err = file("/err");
  options.standard_output = out.get();
  options.standard_error = err.get();
  auto child = ChildProcess::spawn(options);
  const auto status = child.wait(soon());
  EXPECT_TRUE(status);
  return {status.value_or(ExitStatus{.code = -1}), read_file(folder.path() + "/out").value_or(""),
          read_file(folder.path() + "/err").value_or("")};
}
Output run_shell(const std::string& script) { return run({.arguments = {"sh", "-c", script}}); }

TEST(SpawnTest, ArgumentsArriveAsTheyAre) {
  const auto result = run({.arguments = {"printf", "%s|", "a b", "", "c'\"$x", "\xff"}});
  EXPECT_TRUE(result.status.success());
  EXPECT_EQ(result.out, "a b||c'\"$x|\xff|");
}

TEST(SpawnTest, StandardStreams) {
  const auto result = run_shell("echo out; echo err >&2; cat; readlink /proc/self/fd/0");
  EXPECT_EQ(result.out, "out\n/dev/null\n");
  EXPECT_EQ(result.err, "err\n");
}

TEST(SpawnTest, StandardInputIsPassed) {
  const TempFolder folder("spawn");
  write_file(folder.path() + "/in", "some text");
  const UniqueFd in(::open((folder.path() + "/in").c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(run({.arguments = {"cat"}, .standard_input = in.get()}).out, "some text");
}

TEST(SpawnTest, StandardStreamsMayBeSwapped) {
  test::run_in_process([] {
    const TempFolder folder("spawn");
    const UniqueFd file(
        ::open((folder.path() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    const UniqueFd saved = duplicate(1);
    ASSERT_EQ(::dup2(file.get(), 1), 1);
    auto child = ChildProcess::spawn({.arguments = {"sh", "-c", "echo to err >&2; echo to out"},
                                      .standard_output = 2,
                                      .standard_error = 1});
    ASSERT_TRUE(child.wait(soon()));
    ASSERT_EQ(::dup2(saved.get(), 1), 1);
    EXPECT_EQ(read_file(folder.path() + "/file"), "to err\n");
  });
}

TEST(SpawnTest, ClosedStandardStreamsOfOursDoNotSwallowTheError) {
  test::run_in_process([] {
    // With 0, 1 and 2 free, our pipe would get such a number, and the child would fill it.
    std::vector<UniqueFd> saved;
    for (int fd = 0; fd < 3; ++fd) saved.push_back(duplicate(fd));
    for (int fd = 0; fd < 3; ++fd) ::close(fd);
    std::optional<Error> error;
    std::optional<ExitStatus> status;
    try {
      status = ChildProcess::spawn({.arguments = {"true"}}).wait(soon());
      ChildProcess::spawn({.arguments = {"/nowhere/program"}});
    } catch (const Error& caught) {
      error = caught;
    }
    for (int fd = 0; fd < 3; ++fd) ::dup2(saved[static_cast<std::size_t>(fd)].get(), fd);
    EXPECT_TRUE(status && status->success());
    ASSERT_TRUE(error);
    EXPECT_NE(std::string(error->what()).find("/nowhere/program"), std::string::npos);
  });
}

TEST(SpawnTest, EnvironmentIsOursOrExactlyTheGiven) {
  ::setenv("CONVOY_SPAWN_SAMPLE", "ours", 1);
  EXPECT_EQ(run_shell("echo $CONVOY_SPAWN_SAMPLE").out, "ours\n");
  const auto given =
      run({.arguments = {"env"}, .environment = std::vector<std::string>{"A=1", "B=two words"}});
  EXPECT_EQ(given.out, "A=1\nB=two words\n");
  ::unsetenv("CONVOY_SPAWN_SAMPLE");
}

TEST(SpawnTest, WorkingFolder) {
  const TempFolder folder("spawn");
  EXPECT_EQ(run({.arguments = {"pwd"}, .working_folder = folder.path()}).out, folder.path() + "\n");
}

TEST(SpawnTest, InheritedDescriptorsKeepTheirNumbers) {
  auto [ours, theirs] = Socket::pair();
  const UniqueFd fd = theirs.release();
  const auto result =
      run({.arguments = {"sh", "-c", concat("echo hello >&", fd.get())}, .inherited = {fd.get()}});
  EXPECT_TRUE(result.status.success()) << result.err;
  std::string text(6, '\0');
  ours.receive(std::as_writable_bytes(std::span(text)), soon());
  EXPECT_EQ(text, "hello\n");
  EXPECT_TRUE(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC);  // ours is as before
}

TEST(SpawnTest, OthersAreNotInherited) {
  const UniqueFd fd(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(run_shell(concat("test -e /proc/self/fd/", fd.get(), " || echo none")).out, "none\n");
}

TEST(SpawnTest, CoresArePinned) {
  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(0, sizeof mask, &mask), 0);
  int first = 0;
  while (!CPU_ISSET(first, &mask)) ++first;
  const auto result =
      run({.arguments = {"grep", "Cpus_allowed_list", "/proc/self/status"}, .cores = {first}});
  EXPECT_EQ(result.out, concat("Cpus_allowed_list:\t", first, "\n"));
}

TEST(SpawnTest, SignalsAreAsInAFreshProgram) {
  test::run_in_process([] {
    ::signal(SIGPIPE, SIG_IGN);
    ::signal(SIGTERM, SIG_IGN);
    ::signal(SIGHUP, SIG_IGN);  // as nohup does: stays
    ::signal(SIGUSR2, [](int) {});
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
    const auto result = run({.arguments = {"grep", "^Sig[BI]", "/proc/self/status"}});
    EXPECT_TRUE(result.out.starts_with("SigBlk:\t0000000000000000\nSigIgn:\t")) << result.out;
    // Signals 32 and 33 are the C library's own; whoever started this test may have ignored them,
    // and no program can change that.
    constexpr std::uint64_t kReserved = std::uint64_t{3} << 31;
    const auto ignored = std::stoull(result.out.substr(result.out.rfind('\t') + 1), nullptr, 16);
    EXPECT_EQ(ignored & ~kReserved, 1u) << result.out;
    sigset_t now;
    pthread_sigmask(SIG_BLOCK, nullptr, &now);
    EXPECT_TRUE(sigismember(&now, SIGUSR1));  // ours are as before
    EXPECT_FALSE(sigismember(&now, SIGUSR2));
    ::signal(SIGHUP, SIG_DFL);
  });
}

TEST(SpawnTest, ProgramsAreLookedUpInPath) {
  const TempFolder folder("spawn");
  const std::string program = folder.path() + "/convoy-sample";
  write_file(program, "#!/bin/sh\necho found\n", 0755);
  const std::string before = std::getenv("PATH");
  ::setenv("PATH", concat("/nowhere:", folder.path(), ":", before).c_str(), 1);
  EXPECT_EQ(run({.arguments = {"convoy-sample"}}).out, "found\n");
  fs::permissions(program, fs::perms::owner_read);
  expect_error(ErrorKind::kInvalidArgument, "'convoy-sample' was not found in PATH",
               [] { ChildProcess::spawn({.arguments = {"convoy-sample"}}); });
  ::unsetenv("PATH");
  EXPECT_TRUE(run({.arguments = {"true"}}).status.success());
  ::setenv("PATH", before.c_str(), 1);
}

TEST(SpawnTest, RelativeEntryOfPathWorksInAnotherFolder) {
  test::run_in_process([] {
    const TempFolder folder("spawn");
    write_file(folder.path() + "/convoy-sample", "#!/bin/sh\npwd\n", 0755);
    fs::current_path(folder.path());
    ::setenv("PATH", concat(".:", std::getenv("PATH")).c_str(), 1);
    EXPECT_EQ(run({.arguments = {"convoy-sample"}, .working_folder = "/"}).out, "/\n");
    fs::current_path("/");
  });
}

TEST(SpawnErrorTest, SaysWhatCouldNotBeDone) {
  const auto refuse = [](std::string_view part, const SpawnOptions& options) {
    expect_error(ErrorKind::kInvalidArgument, part, [&] { ChildProcess::spawn(options); });
  };
  refuse("no program to run", {.arguments = {}});
  refuse("no program to run", {.arguments = {""}});
  refuse("program 'no-such-program' was not found in PATH (a program in this folder is './",
         {.arguments = {"no-such-program"}});
  refuse("running '/nowhere/x': executing it: No such file", {.arguments = {"/nowhere/x"}});
  refuse("running '/': executing it: Permission denied", {.arguments = {"/"}});
  refuse("entering folder /nowhere: No such file",
         {.arguments = {"true"}, .working_folder = "/nowhere"});
  refuse("passing descriptor 99999 on: Bad file descriptor",
         {.arguments = {"true"}, .inherited = {99999}});
  refuse("passing descriptor 99999 as standard stream",
         {.arguments = {"true"}, .standard_output = 99999});
  refuse("pinning it to its cores", {.arguments = {"true"}, .cores = {1000}});
  refuse("pinning it to its cores", {.arguments = {"true"}, .cores = {-1}});
  refuse("setting death signal 999", {.arguments = {"true"}, .death_signal = 999});
  refuse("Argument list too long", {.arguments = {"true", std::string(std::size_t{4} << 20, 'x')}});
}

TEST(SpawnErrorTest, MissingInterpreterIsAnExecError) {
  const TempFolder folder("spawn");
  const std::string script = folder.path() + "/script";
  write_file(script, "#!/no/such/interpreter\n", 0755);
  expect_error(ErrorKind::kInvalidArgument, concat("running '", script, "': executing it"),
               [&] { ChildProcess::spawn({.arguments = {script}}); });
}

TEST(SpawnDeathSignalTest, ChildDiesWithItsParent) {
  test::RankGroup group(1, test::RankMode::kProcesses);
  group.start([](test::Rank& r) {
    const auto child =
        ChildProcess::spawn({.arguments = {"sleep", "1000"}, .death_signal = SIGTERM});
    r.store()->set("child", std::to_string(child.pid()));
    r.mark("spawned");
    r.wait_for("never");
  });
  group.wait_mark("spawned");
  const UniqueFd child = open_pidfd(static_cast<pid_t>(std::stol(group.store()->get("child"))));
  ASSERT_TRUE(child);
  EXPECT_FALSE(wait_ready(child.get(), POLLIN, Deadline::after(seconds(0))));
  group.kill(0, SIGKILL);
  EXPECT_TRUE(wait_ready(child.get(), POLLIN, soon()));
  group.join();
}

TEST(SpawnDeathSignalTest, ChildDiesWithTheThreadThatSpawnedIt) {
  // What the comment in process.h warns of.
  ChildProcess child;
  std::jthread([&] {
    child = ChildProcess::spawn({.arguments = {"sleep", "1000"}, .death_signal = SIGKILL});
  }).join();
  const auto status = child.wait(soon());
  ASSERT_TRUE(status);
  EXPECT_EQ(status->signal, SIGKILL);
}

TEST(SpawnThreadsTest, ManyThreadsSpawnAtOnce) {
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 10; ++i) {
        auto child = ChildProcess::spawn({.arguments = {"sh", "-c", concat("exit ", t)}});
        const auto status = child.wait(soon());
        ASSERT_TRUE(status);
        EXPECT_EQ(status->code, t);
      }
    });
  }
}

TEST(SpawnThreadsTest, ForksOfOtherThreadsDoNotHoldUpASpawn) {
  test::run_in_process([] {
    // Each fork lives on for a while, with whatever it got; had it the write end of a spawn's
    // report pipe, the spawn would wait for it.
    std::atomic<bool> stop = false;
    std::vector<pid_t> forks;
    std::jthread forker([&] {
      while (!stop && forks.size() < 100) {
        const pid_t pid = ::fork();
        if (pid == 0) {
          ::alarm(60);
          for (;;) ::pause();
        }
        forks.push_back(pid);
      }
    });
    for (int i = 0; i < 30; ++i) {
      const auto start = Deadline::after(seconds(20));
      auto child = ChildProcess::spawn({.arguments = {"true"}});
      EXPECT_FALSE(start.expired());
      child.wait(soon());
    }
    stop = true;
    forker.join();
    for (const pid_t pid : forks) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  });
}

}  // namespace
}  // namespace convoy
