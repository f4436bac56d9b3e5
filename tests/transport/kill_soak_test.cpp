// SIGKILL of either side at 200 points that follow from seeds, with 2, 8 and 64 processes.
#include <gtest/gtest.h>

#include <string>

#include "kill.h"

namespace convoy::transport::test {
namespace {

constexpr std::uint64_t kSeeds = 200;

class EndpointKillSoakTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Processes, EndpointKillSoakTest, testing::Values(2, 8, 64),
                         [](const auto& test) { return "Of" + std::to_string(test.param); });

TEST_P(EndpointKillSoakTest, SurvivorsAreTold) {
  for (std::uint64_t seed = 1000; seed < 1000 + kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    run_kill(GetParam(), seed);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace convoy::transport::test
