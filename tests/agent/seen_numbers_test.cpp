#include "agent/seen_numbers.h"

#include <gtest/gtest.h>

#include <set>

#include "base/random.h"

namespace convoy::agent {
namespace {

TEST(SeenNumbersTest, EachIsNewOnce) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    SeenNumbers seen;
    std::set<std::uint64_t> model;
    std::uint64_t floor = 1;
    std::uint64_t top = 1;
    for (int i = 0; i < 300; ++i) {
      if (random.below(10) == 0) floor += random.below(std::max<std::uint64_t>(top - floor, 1));
      const std::uint64_t number =
          floor - std::min<std::uint64_t>(floor - 1, random.below(3)) + random.below(20);
      top = std::max(top, number);
      const bool is_new = number >= floor && model.insert(number).second;
      ASSERT_EQ(seen.add(number, floor), is_new) << "seed " << seed << ", number " << number;
      ASSERT_LE(seen.ranges(), 25u) << "those below the floor are forgotten";
    }
  }
}

TEST(SeenNumbersTest, InOrderNothingIsKept) {
  SeenNumbers seen;
  for (std::uint64_t number = 1; number < 1000; ++number) {
    EXPECT_TRUE(seen.add(number, 1));
    EXPECT_FALSE(seen.add(number, 1));
  }
  EXPECT_EQ(seen.ranges(), 0u);
}

}  // namespace
}  // namespace convoy::agent
