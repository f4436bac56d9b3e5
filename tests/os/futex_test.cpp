#include "os/futex.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace convoy {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Word = std::atomic<std::uint32_t>;

TEST(FutexTest, OtherValueReturnsAtOnce) {
  const Word word{1};
  EXPECT_TRUE(futex_wait(word, 0, Deadline::never()));
}

TEST(FutexTest, DeadlinePasses) {
  const Word word{0};
  const auto deadline = Deadline::after(milliseconds(10));
  while (futex_wait(word, 0, deadline)) {  // it may return early
  }
  EXPECT_TRUE(deadline.expired());
}

TEST(FutexTest, PastDeadlineReturnsAtOnce) {
  const Word word{0};
  EXPECT_FALSE(futex_wait(word, 0, Deadline::after(seconds(-1))));
  EXPECT_FALSE(futex_wait(word, 0, Deadline::at(Deadline::Clock::time_point())));
  EXPECT_FALSE(futex_wait(word, 0, Deadline::at(Deadline::Clock::time_point::min())));
}

TEST(FutexTest, WakeEndsTheWait) {
  Word word{0};
  std::jthread sleeper([&] {
    const auto deadline = Deadline::after(seconds(30));
    while (word.load() == 0) ASSERT_TRUE(futex_wait(word, 0, deadline));
  });
  word.store(1);
  futex_wake(word);
}

TEST(FutexTest, WakeEndsAllWaits) {
  Word word{0};
  {
    std::vector<std::jthread> sleepers;
    for (int i = 0; i < 4; ++i) {
      sleepers.emplace_back([&] {
        const auto deadline = Deadline::after(seconds(30));
        while (word.load() == 0) ASSERT_TRUE(futex_wait(word, 0, deadline));
      });
    }
    word.store(1);
    futex_wake(word);
  }
}

TEST(FutexTest, WakeOfNobodyIsHarmless) {
  const Word word{0};
  futex_wake(word);
  futex_wake(word, 1);
}

}  // namespace
}  // namespace convoy
