#include <gtest/gtest.h>

#include "base/concat.h"
#include "kill.h"
#include "programs.h"

namespace convoy::agent::test {
namespace {

class AgentKillSoakTest : public testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, AgentKillSoakTest, testing::Range<std::uint64_t>(1000, 1200),
                         [](const auto& test) { return concat("Seed", test.param); });

TEST_P(AgentKillSoakTest, SurvivorsHearOfItByName) { run_kill(GetParam()); }

TEST(AgentFaultsSoakTest, CallsEndAndAreExecutedOnceAtMost) { run_programs(10'000, 5'000); }

}  // namespace
}  // namespace convoy::agent::test
