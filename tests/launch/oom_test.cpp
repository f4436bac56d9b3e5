#include "launch/oom.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace convoy::launch {
namespace {

using testing::HasSubstr;

TEST(Oom, IsSeenInTheCgroup) {
  EXPECT_THAT(explain_kill({.cgroup = 0, .host = 5}, {.cgroup = 1, .host = 6}),
              HasSubstr("struck in this cgroup (oom_kill 0 -> 1)"));
}

TEST(Oom, IsSeenOnTheHost) {
  EXPECT_THAT(explain_kill({.cgroup = 1, .host = 5}, {.cgroup = 1, .host = 6}),
              HasSubstr("struck on this host while the job ran (oom_kill 5 -> 6)"));
}

TEST(Oom, IsRuledOut) {
  EXPECT_THAT(explain_kill({.cgroup = {}, .host = 5}, {.cgroup = {}, .host = 5}),
              HasSubstr("somebody killed it"));
}

TEST(Oom, MayBeUnknown) { EXPECT_THAT(explain_kill({}, {}), HasSubstr("see dmesg")); }

TEST(Oom, CountersOfThisMachineDoNotShrink) {
  const auto before = oom_counts();
  const auto after = oom_counts();
  EXPECT_LE(before.host.value_or(0), after.host.value_or(0));
  EXPECT_EQ(before.cgroup.has_value(), after.cgroup.has_value());
}

}  // namespace
}  // namespace convoy::launch
