#include "os/quick_clock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace convoy {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

// Long enough that the rate of ticks is learnt, used, and learnt anew; from several threads, which
// move each other's anchor.
TEST(QuickClockTest, KeepsToTheSteadyClock) {
  constexpr auto kMostError = 100us;
  const auto end = steady_clock::now() + 1300ms;
  std::atomic<int> wrong{0};
  std::atomic<std::int64_t> looks{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        for (auto before = steady_clock::now(); before < end;) {
          const auto quick = QuickClock::now();
          const auto after = steady_clock::now();
          if (quick < before - kMostError || quick > after + kMostError) ++wrong;
          before = after;
          ++looks;
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0) << "of " << looks;
}

}  // namespace
}  // namespace convoy
