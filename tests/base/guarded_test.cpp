#include "base/guarded.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace convoy {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(GuardedTest, ConstructsItsValue) {
  Guarded<std::string> text(3u, 'x');
  EXPECT_EQ(*text.lock(), "xxx");
  EXPECT_EQ(text.lock()->size(), 3u);
}

TEST(GuardedTest, LocksOutOtherThreads) {
  Guarded<int> count(0);
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 1000; ++i) *count.lock() += 1;
      });
    }
  }
  EXPECT_EQ(*count.lock(), 4000);
}

TEST(GuardedTest, WaitEndsWhenTheConditionHolds) {
  Guarded<int> value(0);
  std::jthread writer([&] {
    for (int i = 1; i <= 3; ++i) {
      *value.lock() = i;
      value.notify();
    }
  });
  auto lock = value.lock();
  EXPECT_TRUE(lock.wait(Deadline::after(seconds(30)), [&] { return *lock == 3; }));
}

TEST(GuardedTest, WaitNeverEndsByTime) {
  Guarded<bool> ready(false);
  std::jthread writer([&] {
    *ready.lock() = true;
    ready.notify();
  });
  auto lock = ready.lock();
  EXPECT_TRUE(lock.wait(Deadline::never(), [&] { return *lock; }));
}

TEST(GuardedTest, WaitEndsAtTheDeadline) {
  Guarded<bool> ready(false);
  auto lock = ready.lock();
  const auto deadline = Deadline::after(milliseconds(20));
  EXPECT_FALSE(lock.wait(deadline, [&] { return *lock; }));
  EXPECT_TRUE(deadline.expired());
  EXPECT_TRUE(lock.wait(deadline, [] { return true; }));  // looks once even when it is late
}

TEST(GuardedTest, UnlockLetsOthersIn) {
  Guarded<int> value(0);
  auto lock = value.lock();
  lock.unlock();
  std::jthread([&] { *value.lock() = 5; }).join();
  lock.relock();
  EXPECT_EQ(*lock, 5);
}

}  // namespace
}  // namespace convoy
