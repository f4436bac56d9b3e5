#include "launch/tuning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "os/machine.h"

namespace convoy::launch {
namespace {

using testing::ElementsAre;
using testing::Pair;

auto tuned(int cores, int ranks, const std::set<std::string>& given = {}) {
  return tuned_variables(cores, ranks,
                         [&](const std::string& name) { return given.contains(name); });
}

TEST(Tuning, SharesTheCoresOut) {
  EXPECT_THAT(tuned(8, 2), ElementsAre(Pair("OMP_NUM_THREADS", "4"), Pair("MKL_NUM_THREADS", "4"),
                                       Pair("THP_MEM_ALLOC_ENABLE", "1")));
  EXPECT_EQ(tuned(7, 2)[0].second, "3");
  EXPECT_EQ(tuned(2, 5)[0].second, "1");
}

// libtorch takes MKL_NUM_THREADS before OMP_NUM_THREADS: ours would win over the user's.
TEST(Tuning, WhatTheUserHasSetCounts) {
  EXPECT_THAT(tuned(8, 2, {"OMP_NUM_THREADS"}), ElementsAre(Pair("THP_MEM_ALLOC_ENABLE", "1")));
  EXPECT_THAT(tuned(8, 2, {"MKL_NUM_THREADS", "THP_MEM_ALLOC_ENABLE"}),
              ElementsAre(Pair("OMP_NUM_THREADS", "4")));
}

std::vector<CoreSite> plain(int cores) {
  std::vector<CoreSite> sites;
  for (int core = 0; core < cores; ++core) sites.push_back({core, 0, core});
  return sites;
}

TEST(Tuning, PinsToDisjointCores) {
  EXPECT_THAT(pin_plan(plain(4), 2), ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3)));
  EXPECT_THAT(pin_plan(plain(5), 2), ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3, 4)));
  EXPECT_THAT(pin_plan(plain(3), 3), ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2)));
}

TEST(Tuning, PinsInTurnsWhereCoresAreFew) {
  EXPECT_THAT(pin_plan(plain(2), 3), ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(0)));
}

TEST(Tuning, KeepsHardwareThreadsOfACoreTogether) {
  // Linux often numbers the second threads behind all first ones: 0 and 4 share a core.
  std::vector<CoreSite> sites;
  for (int core = 0; core < 8; ++core) sites.push_back({core, 0, core % 4});
  EXPECT_THAT(pin_plan(sites, 4), ElementsAre(ElementsAre(0, 4), ElementsAre(1, 5),
                                              ElementsAre(2, 6), ElementsAre(3, 7)));
}

TEST(Tuning, KeepsSocketsTogether) {
  const std::vector<CoreSite> sites = {{0, 0, 0}, {1, 1, 0}, {2, 0, 1}, {3, 1, 1}};
  EXPECT_THAT(pin_plan(sites, 2), ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3)));
}

TEST(Tuning, PinsNobodyWhereNothingIsKnown) {
  EXPECT_THAT(pin_plan({}, 2), ElementsAre(ElementsAre(), ElementsAre()));
}

TEST(Tuning, FindsTheCoresOfThisProcess) {
  EXPECT_GE(static_cast<int>(usable_core_sites().size()), usable_cores());
}

}  // namespace
}  // namespace convoy::launch
