// Every system call may fail. A sample of the cases; all of them are in errno_all_test.cpp.
#include "fault/scenarios.h"

namespace convoy::fault {
namespace {

// Ranks as threads. With processes, and for the launcher, some cases end at a deadline when the
// machine is busy: those are in errno_all_test.cpp only.
std::vector<Scenario> scenarios_of_threads() {
  auto scenarios = core_scenarios();
  std::erase_if(scenarios, [](const Scenario& scenario) { return scenario.processes; });
  return scenarios;
}

class ErrnoTest : public testing::TestWithParam<Scenario> {};
INSTANTIATE_TEST_SUITE_P(Sample, ErrnoTest, testing::ValuesIn(scenarios_of_threads()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(ErrnoTest, AClearErrorOrSuccess) { expect_no_findings(GetParam(), Extent::kSample); }

}  // namespace
}  // namespace convoy::fault
