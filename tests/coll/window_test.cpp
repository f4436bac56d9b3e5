#include "coll/window.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/concat.h"
#include "support.h"

namespace convoy::coll::test {
namespace {

using namespace std::chrono_literals;
using convoy::test::rank_mode_name;
using convoy::test::rank_modes;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

class WindowTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, WindowTest, rank_modes(), rank_mode_name);

// Memory of a rank as numbers.
std::span<std::uint64_t> numbers(std::span<std::byte> memory) {
  return {reinterpret_cast<std::uint64_t*>(memory.data()), memory.size() / 8};
}

struct Member {
  explicit Member(const Rank& r, std::size_t count = 1024, const std::string& name = "world")
      : group(make_group(r, name)),
        block(group->allocate(count * 8)),
        window(Window::create(*group, {block.data(), count * 8})) {}

  std::shared_ptr<Group> group;
  shm::Block block;
  std::shared_ptr<Window> window;
};

// A ring: everybody writes into its right neighbour and tells it, many times over.
TEST_P(WindowTest, SignalsOrderWhatWasWritten) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const Member member(r, 64);
    const Window& window = *member.window;
    const int right = (r.id() + 1) % 3, left = (r.id() + 2) % 3;
    std::memset(member.block.data(), 0, 64 * 8);
    member.group->barrier();
    const auto to = numbers(window.at(right));
    const auto mine = numbers(window.at(r.id()));
    for (std::uint64_t round = 1; round <= 500; ++round) {
      for (auto& number : to) number = round * 10 + static_cast<std::uint64_t>(r.id());
      window.signal(right);
      window.wait_signal(left, r.deadline());
      for (const auto number : mine) {
        ASSERT_EQ(number, round * 10 + static_cast<std::uint64_t>(left));
      }
      window.signal(left);  // it may write again
      window.wait_signal(right, r.deadline());
    }
    member.group->barrier();
  });
}

TEST_P(WindowTest, SignalsAreCountedAndSizesMayDiffer) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const Member member(r, r.id() == 0 ? 3 : 1000);
    EXPECT_EQ(member.window->at(1).size(), 8000u);
    EXPECT_EQ(member.window->at(0).size(), 24u);
    if (r.id() == 0) {
      for (int i = 0; i < 5; ++i) member.window->signal(1);
      member.window->signal(0);
      member.window->wait_signal(0, r.deadline());
    } else {
      for (int i = 0; i < 5; ++i) member.window->wait_signal(0, r.deadline());
      EXPECT_THAT(error_of([&] { member.window->wait_signal(0, Deadline::after(1ms)); }),
                  AllOf(StartsWith("timeout: wait_signal, group \"world\", rank 1 of 2"),
                        HasSubstr("Timed out ")));
    }
    EXPECT_THAT(error_of([&] { member.window->at(2); }), HasSubstr("there is no rank 2"));
    EXPECT_THAT(error_of([&] { member.window->signal(-1); }), HasSubstr("there is no rank -1"));
    member.group->barrier();
  });
}

// One rank without memory, then one with private memory: everybody is told.
TEST_P(WindowTest, OnlyGroupMemory) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    const auto block = group->allocate(64);
    std::vector<std::byte> own(64);
    const auto some =
        Window::create(*group, r.id() == 0 ? std::span<std::byte>() : std::span(block.data(), 64));
    EXPECT_EQ(some->at(0).size(), 0u);
    EXPECT_EQ(some->at(1).size(), 64u);
    EXPECT_THAT(
        error_of([&] {
          Window::create(*group, r.id() == 1 ? std::span(own) : std::span(block.data(), 64));
        }),
        AllOf(StartsWith("invalid argument: "), HasSubstr("the memory of rank 1 is private")));
    group->barrier();
  });
}

// Who leaves is an error to the others, and its memory is not used again while they have it.
TEST_P(WindowTest, LeavingIsSeenAndMemoryIsKeptApart) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    auto block = group->allocate(1 << 16);
    const std::byte* const was = block.data();
    const auto before = shm::Fabric::instance().stats().quarantined_blocks;
    r.barrier();
    auto window = Window::create(*group, {block.data(), 1 << 16});
    if (r.id() == 1) {
      window->signal(0);
      r.barrier();
      window.reset();
      block = {};
      std::vector<shm::Block> others;
      for (int i = 0; i < 20; ++i) others.push_back(group->allocate(1 << 16));
      for (const auto& other : others) EXPECT_NE(other.data(), was);
      r.barrier();
      r.barrier();
      // Rank 0 has left too: the next allocation finds that nobody needs it apart.
      others.push_back(group->allocate(1));
      EXPECT_LE(shm::Fabric::instance().stats().quarantined_blocks, before);
    } else {
      const auto theirs = window->at(1);
      r.barrier();
      r.barrier();
      window->wait_signal(1, r.deadline());  // sent before it left
      EXPECT_THAT(error_of([&] { window->at(1); }),
                  AllOf(StartsWith("peer lost: "), HasSubstr("has left the window")));
      EXPECT_THAT(error_of([&] { window->signal(1); }), HasSubstr("has left the window"));
      EXPECT_THAT(error_of([&] { window->wait_signal(1, r.deadline()); }),
                  HasSubstr("has left the window"));
      std::memset(theirs.data(), 1, theirs.size());  // harms nobody
      window.reset();
      r.barrier();
    }
    r.barrier();
  });
}

TEST(WindowFaultTest, ADeadPeerIsAnError) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const Member member(r);
    const Window& window = *member.window;
    if (r.id() == 2) {
      window.signal(0);
      r.mark("ready");
      for (;;) ::pause();
    }
    const auto theirs = window.at(2);
    if (r.id() == 0) window.wait_signal(2, r.deadline());
    r.mark("ready");
    // Asleep in here when it dies, or about to be.
    EXPECT_THAT(
        error_of([&] { window.wait_signal(2, r.deadline()); }),
        AllOf(StartsWith("peer lost: wait_signal, group \"world\""), HasSubstr("rank 2 (pid")));
    EXPECT_THAT(error_of([&] { window.at(2); }), StartsWith("peer lost: "));
    EXPECT_THAT(error_of([&] { window.signal(2); }), StartsWith("peer lost: "));
    std::memset(theirs.data(), 1, theirs.size());  // still mapped
    // The others have each other.
    numbers(window.at(1 - r.id()))[0] = 7;
    window.signal(1 - r.id());
    window.wait_signal(1 - r.id(), r.deadline());
    EXPECT_EQ(numbers(window.at(r.id()))[0], 7u);
  });
  ranks.wait_mark("ready");
  ranks.kill(2, SIGKILL);
  ranks.join();
}

// Rank 0 waits for rank 1, which waits for rank 2, which dies: both hear of it, once.
TEST(WindowFaultTest, ADeathOfAnotherRankIsToldOnce) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const Member member(r);
    const Window& window = *member.window;
    r.mark("ready");
    if (r.id() == 2) r.wait_for("never");
    EXPECT_THAT(
        error_of([&] { window.wait_signal(r.id() + 1, r.deadline()); }),
        AllOf(StartsWith("peer lost: wait_signal, group \"world\""), HasSubstr("rank 2 (pid")));
    if (r.id() == 0) {
      r.store()->set("told", "");
      window.wait_signal(1, r.deadline());
      EXPECT_THAT(error_of([&] { window.wait_signal(1, Deadline::after(1ms)); }),
                  StartsWith("timeout: "));
      window.signal(1);
    } else {
      r.store()->get("told", r.deadline());
      window.signal(0);
      window.wait_signal(0, r.deadline());
    }
  });
  ranks.wait_mark("ready");
  ranks.kill(2, SIGKILL);
  ranks.join();
}

// Memory shared on purpose: a forked child writes into it, and its end is not the rank's.
TEST(WindowForkTest, AChildsWritesAreSeen) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    const Member member(r);
    const Window& window = *member.window;
    numbers(window.at(r.id()))[0] = 0;
    member.group->barrier();
    if (r.id() == 0) {
      const auto theirs = numbers(window.at(1));
      const pid_t child = ::fork();
      if (child == 0) {
        theirs[0] = 42;
        window.~Window();  // what a child's exit() would do
        ::_exit(0);
      }
      int status = 0;
      EXPECT_EQ(::waitpid(child, &status, 0), child);
      window.signal(1);
    } else {
      window.wait_signal(0, r.deadline());
      EXPECT_EQ(numbers(window.at(1))[0], 42u);
    }
    member.group->barrier();
    EXPECT_FALSE(window.at(1 - r.id()).empty());
    member.group->barrier();
  });
}

}  // namespace
}  // namespace convoy::coll::test
