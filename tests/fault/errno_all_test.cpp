// Every system call may fail: every call, errno and place. Thousands of runs, some of which wait
// for a deadline: minutes.
#include "fault/scenarios.h"

namespace convoy::fault {
namespace {

class ErrnoAllTest : public testing::TestWithParam<Scenario> {};
INSTANTIATE_TEST_SUITE_P(All, ErrnoAllTest, testing::ValuesIn(core_scenarios()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(ErrnoAllTest, AClearErrorOrSuccess) { expect_no_findings(GetParam(), Extent::kAll); }

TEST(LaunchErrnoAllTest, AClearErrorOrSuccess) { expect_clear_launches(Extent::kAll); }

}  // namespace
}  // namespace convoy::fault
