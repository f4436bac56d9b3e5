// More of processes_test.cpp.
#include <gtest/gtest.h>

#include "base/concat.h"
#include "processes.h"

namespace convoy::rref::test {
namespace {

class RRefSoak : public testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, RRefSoak, testing::Range<std::uint64_t>(0, 20),
                         [](const auto& test) { return concat("Seeds", test.param); });

TEST_P(RRefSoak, NothingStaysUnderFaults) {
  for (std::uint64_t i = 0; i < 50 && !HasFailure(); ++i) run_faulty(1000 + 50 * GetParam() + i);
}
TEST_P(RRefSoak, NothingStaysWhenOneIsKilled) {
  for (std::uint64_t i = 0; i < 10 && !HasFailure(); ++i) run_kill(1000 + 10 * GetParam() + i);
}

}  // namespace
}  // namespace convoy::rref::test
