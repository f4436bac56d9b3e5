#include <gtest/gtest.h>

#include "base/concat.h"
#include "processes.h"

namespace convoy::rref::test {
namespace {

class RRefProcesses : public testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, RRefProcesses, testing::Range<std::uint64_t>(1, 4),
                         [](const auto& test) { return concat("Seed", test.param); });

TEST_P(RRefProcesses, NothingStaysUnderFaults) { run_faulty(GetParam()); }
TEST_P(RRefProcesses, NothingStaysWhenOneIsKilled) { run_kill(GetParam()); }

}  // namespace
}  // namespace convoy::rref::test
