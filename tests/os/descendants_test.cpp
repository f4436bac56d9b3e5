#include "os/descendants.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "os/process.h"

namespace convoy {
namespace {

// The test program is a subreaper while a test runs.
class Descendants : public testing::Test {
 protected:
  Descendants() { become_subreaper(); }
  ~Descendants() override { prctl(PR_SET_CHILD_SUBREAPER, 0); }

  static Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }

  // A shell that runs `script` and is read from until it says something.
  ChildProcess start(const std::string& script) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) std::abort();
    const UniqueFd read_end(ends[0]);
    const UniqueFd write_end(ends[1]);
    SpawnOptions options;
    options.arguments = {"/bin/sh", "-c", script};
    options.standard_output = write_end.get();
    ChildProcess child = ChildProcess::spawn(options);
    char byte = 0;
    EXPECT_EQ(::read(read_end.get(), &byte, 1), 1);
    return child;
  }
};

// A child in a session of its own whose parent is gone, one that ignores SIGTERM, and the shell.
constexpr const char* kCrowd =
    "(setsid sleep 50 >/dev/null & ); (trap '' TERM; exec sleep 50 >/dev/null) & sleep 50 "
    ">/dev/null & echo up; wait";

TEST_F(Descendants, AreFoundWhereverTheyHide) {
  ChildProcess shell = start(kCrowd);
  const auto deadline = soon();
  while (live_descendants().size() < 4 && !deadline.expired()) ::poll(nullptr, 0, 5);
  EXPECT_EQ(live_descendants().size(), 4U);
  EXPECT_TRUE(live_descendants({shell.pid()}).size() < 4U);
  shell.kill(SIGKILL);
  ASSERT_TRUE(shell.wait(soon()));
  EXPECT_FALSE(has_no_children());
  EXPECT_TRUE(kill_descendants(soon()).empty());
  EXPECT_TRUE(has_no_children());
}

TEST_F(Descendants, SparedOnesLive) {
  ChildProcess spared = start("echo up; exec sleep 50");
  ChildProcess other = start("echo up; exec sleep 50");
  EXPECT_TRUE(kill_descendants(soon(), {spared.pid()}).empty());
  EXPECT_TRUE(process_state(spared.pid()));
  EXPECT_FALSE(process_state(other.pid()));
}

TEST_F(Descendants, SignalsReachAll) {
  ChildProcess shell = start("trap 'exit 7' USR1; echo up; while :; do sleep 0.02; done");
  signal_descendants(SIGUSR1);
  const auto status = shell.wait(soon());
  ASSERT_TRUE(status);
  EXPECT_EQ(status->code, 7);
  EXPECT_TRUE(kill_descendants(soon()).empty());
}

TEST_F(Descendants, KeptOnesAreNotReaped) {
  ChildProcess kept = start("echo up; exit 5");
  const auto deadline = soon();
  while (process_state(kept.pid()) != 'Z' && !deadline.expired()) ::poll(nullptr, 0, 1);
  reap_orphans({kept.pid()});
  EXPECT_EQ(kept.wait(soon())->code, 5);
}

TEST_F(Descendants, BothWaysToListChildrenAgree) {
  ChildProcess one = start("echo up; exec sleep 50");
  ChildProcess two = start("echo up; exec sleep 50");
  auto listed = children_of(getpid());
  auto scanned = children_by_scan(getpid());
  std::sort(listed.begin(), listed.end());
  std::sort(scanned.begin(), scanned.end());
  EXPECT_EQ(listed, scanned);
  EXPECT_EQ(listed.size(), 2U);
  EXPECT_EQ(parent_of(one.pid()), getpid());
  const auto name = process_name(one.pid());  // the shell's, until it has become the other program
  EXPECT_TRUE(name == "sleep" || name == "sh") << name;
  EXPECT_FALSE(parent_of(0x3ffffff));
}

}  // namespace
}  // namespace convoy
