#include "os/wait.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>

#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "os/file.h"
#include "os/machine.h"
#include "os/segment.h"
#include "os/socket.h"
#include "support/rank_group.h"

namespace convoy {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::Rank;
using test::RankGroup;
using test::RankMode;

constexpr WaitPolicy kSleepOnly{.spins = 0, .yields = 0};

TEST(WaitTest, ReadyAtOnceDoesNotSleep) {
  WaitWord word;
  word.value = 5;
  for (const WaitPolicy& policy : {kSleepOnly, WaitPolicy{}, WaitPolicy{.spins = 0, .yields = 1}}) {
    EXPECT_TRUE(wait_until(word, policy, Deadline::after(seconds(0)),
                           [](std::uint32_t value) { return value == 5; }));
  }
  EXPECT_EQ(word.sleepers.load(), 0u);
}

TEST(WaitTest, DeadlinePasses) {
  WaitWord word;
  const auto deadline = Deadline::after(milliseconds(10));
  EXPECT_FALSE(wait_until(word, kSleepOnly, deadline, [](std::uint32_t) { return false; }));
  EXPECT_TRUE(deadline.expired());
  EXPECT_EQ(word.sleepers.load(), 0u);
}

TEST(WaitTest, LooksOnceMoreAtTheDeadline) {
  WaitWord word;
  int looks = 0;
  EXPECT_TRUE(wait_until(word, kSleepOnly, Deadline::after(milliseconds(1)),
                         [&](std::uint32_t) { return ++looks == 2; }));
}

TEST(WaitTest, ThrowingConditionLeavesNoSleeperBehind) {
  WaitWord word;
  const auto broken = [](std::uint32_t) -> bool { throw std::runtime_error("aborted"); };
  EXPECT_THROW(wait_until(word, kSleepOnly, Deadline::after(seconds(1)), broken),
               std::runtime_error);
  EXPECT_EQ(word.sleepers.load(), 0u);
}

TEST(WaitTest, WakesThroughAnotherConditionThanTheValue) {
  // An abort flag beside the word: whoever sets it wakes, and the value stays.
  WaitWord word;
  std::atomic<bool> aborted = false;
  std::jthread aborter([&] {
    while (word.sleepers.load() == 0) yield_cpu();
    aborted = true;
    word.value.fetch_add(1, std::memory_order_release);
    word.wake();
  });
  EXPECT_TRUE(wait_until(word, kSleepOnly, Deadline::after(seconds(30)),
                         [&](std::uint32_t) { return aborted.load(); }));
}

// Two sides answer each other as fast as they can, always through the sleep: one lost wake-up and a
// side sleeps until its deadline.
template <class Advance>
void ping_pong(WaitWord& mine, WaitWord& other, bool first, std::uint32_t rounds, Advance advance) {
  const auto deadline = Deadline::after(seconds(60));
  for (std::uint32_t i = 1; i <= rounds; ++i) {
    if (first) advance(mine, i);
    ASSERT_TRUE(
        wait_until(other, kSleepOnly, deadline, [i](std::uint32_t value) { return value >= i; }))
        << "round " << i;
    if (!first) advance(mine, i);
  }
}

void store_and_wake(WaitWord& word, std::uint32_t value) { word.store_and_wake(value); }
void release_then_wake(WaitWord& word, std::uint32_t value) {
  word.value.store(value, std::memory_order_release);
  word.wake();
}

TEST(WaitTest, NoWakeUpIsLostBetweenThreads) {
  for (const auto advance : {store_and_wake, release_then_wake}) {
    WaitWord a;
    WaitWord b;
    std::jthread other([&] { ping_pong(b, a, false, 10000, advance); });
    ping_pong(a, b, true, 10000, advance);
  }
}

TEST(WaitTest, ManySleepersOnOneWord) {
  WaitWord word;
  WaitWord done;
  constexpr std::uint32_t kSleepers = 4;
  constexpr std::uint32_t kRounds = 500;
  const auto deadline = Deadline::after(seconds(60));
  std::vector<std::jthread> sleepers;
  for (std::uint32_t s = 0; s < kSleepers; ++s) {
    sleepers.emplace_back([&] {
      for (std::uint32_t i = 1; i <= kRounds; ++i) {
        ASSERT_TRUE(wait_until(word, kSleepOnly, deadline, [i](auto value) { return value >= i; }));
        done.value.fetch_add(1, std::memory_order_release);
        done.wake();
      }
    });
  }
  for (std::uint32_t i = 1; i <= kRounds; ++i) {
    word.store_and_wake(i);
    ASSERT_TRUE(
        wait_until(done, kSleepOnly, deadline, [i](auto value) { return value == i * kSleepers; }));
  }
}

TEST(WaitTest, PublishesWhatWasWrittenBefore) {
  // Plain memory behind the word: ThreadSanitizer would see a missing release or acquire.
  WaitWord word;
  int payload = 0;
  std::jthread writer([&] {
    payload = 42;
    word.store_and_wake(1);
  });
  ASSERT_TRUE(wait_until(word, WaitPolicy{}, Deadline::after(seconds(30)),
                         [](auto value) { return value == 1; }));
  EXPECT_EQ(payload, 42);
}

TEST(WaitTest, NoWakeUpIsLostBetweenProcesses) {
  const TempFolder folder("wait");
  const std::string& path = folder.path();
  RankGroup(2, RankMode::kProcesses).run([&](Rank& r) {
    // Rank 0 makes the memory and hands it to rank 1.
    Segment memory;
    if (r.id() == 0) {
      memory = Segment::create(2 * sizeof(WaitWord), "words");
      new (memory.data()) WaitWord[2];
      const Listener listener(path + "/sockets", "door");
      r.store()->set("door", listener.path());
      Socket socket = listener.accept(r.deadline());
      const std::byte hello{1};
      const int fd = memory.fd();
      socket.send({&hello, 1}, r.deadline(), {&fd, 1});
      r.barrier();
    } else {
      Socket socket = Socket::connect(r.store()->get("door", r.deadline()), r.deadline());
      std::byte hello{};
      std::vector<UniqueFd> fds;
      socket.receive({&hello, 1}, r.deadline(), &fds);
      ASSERT_EQ(fds.size(), 1u);
      memory = Segment::adopt(std::move(fds[0]), page_size());
      r.barrier();
    }
    auto* words = reinterpret_cast<WaitWord*>(memory.data());
    ping_pong(words[r.id()], words[1 - r.id()], r.id() == 0, 5000, store_and_wake);
  });
}

TEST(WaitPolicyTest, SpinsOnlyWhereThereIsRoom) {
  EXPECT_EQ(WaitPolicy::for_ranks(3, 2).spins, 0);
  EXPECT_GT(WaitPolicy::for_ranks(3, 2).yields, 0);
  EXPECT_GT(WaitPolicy::for_ranks(2, 2).spins, 0);
  EXPECT_GT(WaitPolicy::for_ranks(1, 1).spins, 0);
}

}  // namespace
}  // namespace convoy
