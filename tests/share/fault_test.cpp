// Deaths, forks, limits and strangers.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/types.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/concat.h"
#include "kill.h"

namespace convoy::share::test {
namespace {

using convoy::test::run_in_process;

std::size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t found = 0;
  for (std::string line; std::getline(maps, line);) {
    found += line.find("convoy:share") != std::string::npos ? 1 : 0;
  }
  return found;
}

TEST(ShareFaultTest, KilledAtRandomPoints) { run_kills(4, 1); }

// The memory of a dead process lives until the last mapping of it.
TEST(ShareFaultTest, ADeadOwnersTensorsLive) {
  RankGroup group(2, RankMode::kProcesses);
  group.start([](Rank& r) {
    Channel peer = meet(r);
    if (r.id() == 1) {
      peer.send(at::arange(100'000, at::kFloat));
      r.mark("sent");
      r.wait_for("never");
    }
    r.wait_for("dead");
    const std::size_t before = mappings();
    {
      auto tensor = peer.receive(r.deadline());  // sent by a process that is no more
      EXPECT_EQ(tensor[99'999].item<float>(), 99'999);
      expect_error(ErrorKind::kPeerLost, "ended", [&] { (void)peer.receive(r.deadline()); });
      peer = {};
      EXPECT_EQ(tensor[5].item<float>(), 5);
      EXPECT_EQ(mappings(), before + 1);
    }
    EXPECT_EQ(mappings(), before);
    expect_nothing_held();
  });
  group.wait_mark("sent", 1);
  group.kill(1, SIGKILL);
  group.post("dead", 0);
  group.join();
}

// A receiver that is killed while it waits, and one that waits for a killed sender.
TEST(ShareFaultTest, ASleeperHearsOfADeath) {
  RankGroup group(2, RankMode::kProcesses);
  group.start([](Rank& r) {
    const Channel peer = meet(r);
    peer.send(Message{"hello"});
    peer.receive_message();
    if (r.id() == 0) {
      auto kept = at::ones({1000});
      peer.send(kept);  // unreceived, or received and held by the dead
      r.mark("waits");
      expect_error(ErrorKind::kPeerLost, "SIGKILL", [&] { (void)peer.receive(r.deadline()); });
      kept.reset();
      expect_nothing_held();
    } else {
      const auto held = peer.receive();
      r.mark("waits");
      (void)peer.receive(r.deadline());
    }
  });
  group.wait_mark("waits");
  group.kill(1, SIGKILL);
  group.join();
}

// Files of a killed process are removed by the next one that uses the folder.
TEST(ShareFaultTest, FilesOfTheDeadAreSwept) {
  RankGroup group(2, RankMode::kProcesses);
  group.start([](Rank& r) {
    set_sharing_strategy(Strategy::kFile);
    if (r.id() == 1) {
      const auto first = share_memory_(at::ones({10}));
      const auto second = share_memory_(at::ones({20}));
      r.mark("made");
      r.wait_for("never");
    }
    r.wait_for("dead");
    EXPECT_EQ(files("t-").size(), 2U);
    // Its lock goes a moment after the signal has come, with the last of its threads.
    std::vector<std::string> left;
    do {
      const auto tensor = share_memory_(at::ones({10}));
      left = files();
    } while (left.size() != 2 && !r.deadline().expired());
    EXPECT_EQ(left.size(), 2U) << testing::PrintToString(left);  // its own, and its lock
    EXPECT_TRUE(files().empty());
  });
  group.wait_mark("made", 1);
  group.kill(1, SIGKILL);
  group.post("dead", 0);
  group.join();
}

// test_inherit_tensor. The child touches memory only: libtorch's threads do not survive a fork.
TEST(ShareFaultTest, AForkedChildHasWhatItInherited) {
  run_in_process([] {
    auto tensor = share_memory_(at::zeros({100}));
    auto* const data = tensor.data_ptr<float>();
    int pipes[2];
    ASSERT_EQ(::pipe2(pipes, O_CLOEXEC), 0);
    const UniqueFd read(pipes[0]), write(pipes[1]);
    const pid_t child = ::fork();
    if (child == 0) {
      data[7] = 42;
      char byte = 0;
      if (::read(read.get(), &byte, 1) != 1) ::_exit(1);  // the parent has dropped it
      if (data[7] != 42) ::_exit(2);
      {
        const auto own = share::empty({50});  // a pool of its own
        own.data_ptr<float>()[0] = 1;
        if (!is_shared(own)) ::_exit(3);
      }
      tensor.reset();
      ::_exit(Depot::instance().stats().blocks == 0 ? 0 : 4);
    }
    const auto limit = soon();
    while (data[7] != 42 && !limit.expired()) ::sched_yield();
    EXPECT_EQ(tensor[7].item<float>(), 42);
    tensor.reset();
    EXPECT_EQ(usage().elsewhere, 1U);  // the child's
    const auto other = share::empty({100}).fill_(1);
    EXPECT_EQ(::write(write.get(), "x", 1), 1);
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(usage().elsewhere, 0U);
  });
}

TEST(ShareFaultTest, SixtyFourDescriptors) {
  run_in_process([] {
    const rlimit limit{64, 64};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    auto [a, b] = channel();
    Message message;
    for (int i = 0; i < 10'000; ++i) message.add(at::full({8}, i));
    a.send(message);
    const Message got = b.receive_message();
    EXPECT_EQ(got.tensor(9'999)[7].item<float>(), 9'999);
  });
}

TEST(ShareFaultTest, ADescriptorLimitIsAnError) {
  run_in_process([] {
    auto [a, b] = channel();
    UniqueFd highest(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const rlimit limit{static_cast<rlim_t>(highest.get()) + 1, 64};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    expect_error(ErrorKind::kResource, "", [&, &end = a] { end.send(at::ones({8})); });
    const rlimit more{64, 64};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &more), 0);
    a.send(at::ones({8}));
    EXPECT_EQ(b.receive().sum().item<float>(), 8);
  });
}

TEST(ShareFaultTest, AFileSizeLimitIsAnError) {
  run_in_process([] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    auto tensor = at::ones({1 << 20});
    expect_error(ErrorKind::kResource, "", [&] { share_memory_(tensor); });
    set_sharing_strategy(Strategy::kFile);
    expect_error(ErrorKind::kResource, "", [&] { share_memory_(tensor); });
    EXPECT_FALSE(is_shared(tensor));
    EXPECT_EQ(tensor.sum().item<float>(), 1 << 20);
  });
}

// Another user finds nothing that it could open.
TEST(ShareFaultTest, OtherUsersAreKeptOut) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  run_in_process([] {
    const TempFolder folder("share");
    const auto listener = listen(folder.path() + "/s");
    const auto tensor = at::ones({4});
    const std::string bytes = to_bytes(tensor);
    set_sharing_strategy(Strategy::kFile);
    const std::string file = to_bytes(at::ones({4}));
    const pid_t child = ::fork();
    if (child == 0) {
      if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(9);
      const auto refused = [](auto function) {
        try {
          function();
          return false;
        } catch (const Error&) {
          return true;
        }
      };
      if (!refused([&] { (void)connect(listener.path(), soon()); })) ::_exit(1);
      if (!refused([&] { from_bytes(bytes); })) ::_exit(2);
      if (!refused([&] { from_bytes(file); })) ::_exit(3);
      ::_exit(0);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "exit code " << WEXITSTATUS(status);
    from_bytes(bytes);
    from_bytes(file);
    set_sharing_strategy(Strategy::kDescriptor);
  });
}

}  // namespace
}  // namespace convoy::share::test
