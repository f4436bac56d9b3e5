#include "share/sync_memory.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <thread>
#include <vector>

#include "support/deadlines.h"
#include "support/expect_error.h"

namespace convoy::share {
namespace {

using convoy::test::expect_error;
using convoy::test::soon;

TEST(RobustMutexTest, GoesOnWhenItsHolderEnds) {
  const auto mutex = std::make_unique<RobustMutex>();
  mutex->init();
  const auto past = Deadline::after(std::chrono::seconds(0));
  EXPECT_EQ(mutex->lock(past), RobustMutex::Taken::kFree);
  expect_error(ErrorKind::kInvalidArgument, "already", [&] { mutex->lock(past); });
  std::jthread other([&] {
    EXPECT_FALSE(mutex->try_lock());
    EXPECT_FALSE(mutex->lock(Deadline::after(std::chrono::milliseconds(1))));
  });
  other.join();
  mutex->unlock();
  std::thread holder([&] { mutex->lock(soon()); });  // and ends
  holder.join();
  EXPECT_EQ(mutex->lock(soon()), RobustMutex::Taken::kFromDead);
  mutex->unlock();
  EXPECT_EQ(mutex->try_lock(), RobustMutex::Taken::kFree);
  mutex->unlock();
}

TEST(EventTest, SetWaitClear) {
  EventMemory event;
  EXPECT_FALSE(event.is_set());
  EXPECT_FALSE(event.wait(Deadline::after(std::chrono::milliseconds(1))));
  event.set();
  event.set();
  EXPECT_TRUE(event.is_set());
  EXPECT_TRUE(event.wait(soon()));
  event.clear();
  event.clear();
  EXPECT_FALSE(event.is_set());
}

// Each round is seen by both sides, though it lasts for a moment only.
TEST(EventTest, PulsesAreNotMissed) {
  EventMemory there, back;
  std::vector<int> data(1);  // ordered by the events alone
  std::jthread other([&] {
    for (int i = 0; i < 2000; ++i) {
      ASSERT_TRUE(there.wait(soon()));
      there.clear();
      ++data[0];
      back.set();
    }
  });
  for (int i = 0; i < 2000; ++i) {
    ++data[0];
    there.set();
    ASSERT_TRUE(back.wait(soon()));
    back.clear();
  }
  EXPECT_EQ(data[0], 4000);
}

TEST(BarrierTest, RoundsInStep) {
  constexpr std::uint32_t kParties = 4;
  const auto barrier = std::make_unique<BarrierMemory>();
  barrier->init(kParties);
  std::array<int, kParties> steps{};
  std::atomic<int> lasts{0};
  std::vector<std::jthread> threads;
  for (std::uint32_t t = 0; t < kParties; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 1; i <= 300; ++i) {
        steps[t] = i;
        if (barrier->wait(soon()) == 0) ++lasts;
        for (const int other : steps) EXPECT_EQ(other, i);
        barrier->wait(soon());
      }
    });
  }
  threads.clear();
  EXPECT_EQ(lasts, 300);
  EXPECT_EQ(barrier->waiting(), 0u);
}

TEST(BarrierTest, WhoGivesUpIsNotCounted) {
  const auto barrier = std::make_unique<BarrierMemory>();
  barrier->init(2);
  expect_error(ErrorKind::kTimeout, "1 of 2",
               [&] { barrier->wait(Deadline::after(std::chrono::milliseconds(1))); });
  EXPECT_EQ(barrier->waiting(), 0u);
  std::jthread other([&] { barrier->wait(soon()); });
  barrier->wait(soon());
}

TEST(BarrierTest, ResetLetsWaitersGo) {
  const auto barrier = std::make_unique<BarrierMemory>();
  barrier->init(3);
  std::jthread other(
      [&] { expect_error(ErrorKind::kPeerLost, "reset", [&] { barrier->wait(soon()); }); });
  while (barrier->waiting() == 0) std::this_thread::yield();
  barrier->reset();
  other.join();
  std::jthread second([&] { barrier->wait(soon()); });
  std::jthread third([&] { barrier->wait(soon()); });
  barrier->wait(soon());
}

}  // namespace
}  // namespace convoy::share
