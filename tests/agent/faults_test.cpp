// Calls over faulty endpoints, in simulated worlds: see programs.h.
#include <gtest/gtest.h>

#include "programs.h"

namespace convoy::agent::test {
namespace {

TEST(AgentFaultsTest, CallsEndAndAreExecutedOnceAtMost) { run_programs(1, 1000); }

}  // namespace
}  // namespace convoy::agent::test
