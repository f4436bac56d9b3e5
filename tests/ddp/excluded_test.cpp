// A rank that shrink leaves out, and that goes on later. excluded_soak_test runs it with many
// seeds.
#include <gtest/gtest.h>

#include "ddp/excluded.h"

namespace convoy::test {
namespace {

TEST(ExcludedRankTest, WritesThroughAWindow) { run_excluded(Before::kWindow, 1); }

TEST(ExcludedRankTest, HasAChildThatWrites) { run_excluded(Before::kChild, 2); }

// Several: whether it stops where it is about to write is chance. Each waits for a deadline.
TEST(ExcludedRankTest, StopsInACollective) {
  for (unsigned seed = 0; seed < 4 && !HasFailure(); ++seed) {
    run_excluded(Before::kCollectives, seed);
  }
}

TEST(ExcludedRankTest, StopsInTraining) {
  run_excluded(Before::kDdp, 1);
  run_excluded(Before::kSharded, 2);
  run_excluded(Before::kShardedInBackward, 3);
}

}  // namespace
}  // namespace convoy::test
