// Workers that are killed while they call and are called: see kill.h. Many more seeds run in
// agent_kill_soak_test.
#include <gtest/gtest.h>

#include "base/concat.h"
#include "kill.h"

namespace convoy::agent::test {
namespace {

class AgentKillTest : public testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, AgentKillTest, testing::Range<std::uint64_t>(1, 11),
                         [](const auto& test) { return concat("Seed", test.param); });

TEST_P(AgentKillTest, SurvivorsHearOfItByName) { run_kill(GetParam()); }

}  // namespace
}  // namespace convoy::agent::test
