#pragma once

namespace convoy::test {

// What the three ranks do when rank 2 is stopped.
enum class Before {
  kWindow,             // it writes into windows on the others' memory, and looks at nothing
  kChild,              // a forked child of it does
  kCollectives,        // in place, on group memory
  kDdp,                // backwards
  kSharded,            // steps of a ShardedOptimizer
  kShardedInBackward,  // the same, inside of backward
};
inline constexpr Before kAllBefore[] = {Before::kWindow,      Before::kChild,
                                        Before::kCollectives, Before::kDdp,
                                        Before::kSharded,     Before::kShardedInBackward};

// Rank 2 is stopped at a point that the seed chooses. The others time out, leave it out by
// shrink({0, 1}) and go on; then it is continued. It must not change anything of theirs.
void run_excluded(Before what, unsigned seed);

}  // namespace convoy::test
