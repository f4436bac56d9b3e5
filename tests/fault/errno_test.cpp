// Every system call may fail. A sample of the cases; all of them are in errno_all_test.cpp.
#include "fault/scenarios.h"

namespace convoy::fault {
namespace {

class ErrnoTest : public testing::TestWithParam<Scenario> {};
INSTANTIATE_TEST_SUITE_P(Sample, ErrnoTest, testing::ValuesIn(core_scenarios()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(ErrnoTest, AClearErrorOrSuccess) { expect_no_findings(GetParam(), Extent::kSample); }

TEST(LaunchErrnoTest, AClearErrorOrSuccess) { expect_clear_launches(Extent::kSample); }

}  // namespace
}  // namespace convoy::fault
