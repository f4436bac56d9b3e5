#include "coll/tuner.h"

#include <gtest/gtest.h>

namespace convoy::coll {
namespace {

using namespace std::chrono_literals;

constexpr int kKind = 3;
constexpr std::size_t kBytes = std::size_t{1} << 20;

// Runs `count` operations in which each way costs what `cost` says; how often each was chosen.
template <class Cost>
std::array<int, kWays> run(Tuner& tuner, Route route, int count, const Cost& cost) {
  std::array<int, kWays> chosen{};
  for (int i = 0; i < count; ++i) {
    const Way way = tuner.choose(kKind, route, kBytes);
    ++chosen[static_cast<std::size_t>(way)];
    tuner.record(kKind, route, kBytes, way, cost(way));
  }
  return chosen;
}

TEST(TunerTest, TriesEveryWayAndKeepsTheFastest) {
  for (const Way best : {Way::kCached, Way::kStreaming, Way::kRead}) {
    Tuner tuner(Way::kCached);
    const auto cost = [&](Way way) { return way == best ? 100us : 200us; };
    EXPECT_GE(run(tuner, Route::kMoved, 320, cost)[static_cast<std::size_t>(best)], 300);
  }
}

TEST(TunerTest, BeginsWithTheGuess) {
  EXPECT_EQ(Tuner(Way::kCached).choose(kKind, Route::kStaged, kBytes), Way::kCached);
  EXPECT_EQ(Tuner(Way::kStreaming).choose(kKind, Route::kStaged, kBytes), Way::kStreaming);
  EXPECT_EQ(Tuner(Way::kCached).choose(kKind, Route::kDirect, kBytes), Way::kStreaming);
}

TEST(TunerTest, NeverTakesWhatIsNoWay) {
  const auto times = [](Route route, Way way) {
    Tuner tuner(Way::kCached);
    return run(tuner, route, 200, [](Way) { return 100us; })[static_cast<std::size_t>(way)];
  };
  for (const Route route : {Route::kDirect, Route::kStaged}) {
    EXPECT_EQ(times(route, Way::kRead), 0);
    EXPECT_EQ(times(route, Way::kMixed), 0);
  }
  EXPECT_EQ(times(Route::kMoved, Way::kMixed), 0);
  EXPECT_GT(times(Route::kMoved, Way::kRead), 0);
  EXPECT_EQ(times(Route::kCombined, Way::kRead), 0);
  EXPECT_GT(times(Route::kCombined, Way::kMixed), 0);
}

// A virtual machine's cores are moved: what was slow is fast now.
TEST(TunerTest, NoticesAChange) {
  Tuner tuner(Way::kCached);
  const auto before = [](Way way) { return way == Way::kCached ? 100us : 300us; };
  const auto after = [](Way way) { return way == Way::kCached ? 300us : 100us; };
  run(tuner, Route::kStaged, 100, before);
  run(tuner, Route::kStaged, 40, after);
  EXPECT_GE(run(tuner, Route::kStaged, 100, after)[1], 90);
}

TEST(TunerTest, ADisturbanceIsForgiven) {
  Tuner tuner(Way::kCached);
  const auto usual = [](Way way) { return way == Way::kCached ? 100us : 180us; };
  run(tuner, Route::kStaged, 10, usual);
  tuner.record(kKind, Route::kStaged, kBytes, Way::kCached, 250us);
  EXPECT_EQ(tuner.choose(kKind, Route::kStaged, kBytes), Way::kCached);
}

TEST(TunerTest, AFirstTryThatWasDisturbedIsForgiven) {
  Tuner tuner(Way::kCached);
  tuner.record(kKind, Route::kStaged, kBytes, Way::kCached, 2000us);
  const auto usual = [](Way way) { return way == Way::kCached ? 100us : 180us; };
  EXPECT_GE(run(tuner, Route::kStaged, 100, usual)[0], 90);
}

// Those that are nearly as good are tried often, others seldom.
TEST(TunerTest, TryingCostsLittle) {
  for (const auto other : {101us, 110us, 150us, 300us, 1000us}) {
    Tuner tuner(Way::kCached);
    const auto cost = [&](Way way) { return way == Way::kCached ? 100us : other; };
    run(tuner, Route::kStaged, 10, cost);
    const auto chosen = run(tuner, Route::kStaged, 10'000, cost);
    const double lost = chosen[1] * static_cast<double>((other - 100us).count()) / (100 * 10'000);
    EXPECT_LT(lost, 0.01) << other.count();
    EXPECT_GT(chosen[1], 0) << other.count();
  }
}

TEST(TunerTest, OperationsAndSizesAreApart) {
  Tuner tuner(Way::kCached);
  run(tuner, Route::kStaged, 10, [](Way way) { return way == Way::kCached ? 300us : 100us; });
  EXPECT_EQ(tuner.choose(kKind, Route::kStaged, kBytes), Way::kStreaming);
  EXPECT_EQ(tuner.choose(kKind + 1, Route::kStaged, kBytes), Way::kCached);
  EXPECT_EQ(tuner.choose(kKind, Route::kStaged, 100 * kBytes), Way::kCached);
}

}  // namespace
}  // namespace convoy::coll
