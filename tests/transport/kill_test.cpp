// SIGKILL at a few points; kill_soak_test.cpp has 200.
#include <gtest/gtest.h>

#include "kill.h"

namespace convoy::transport::test {
namespace {

// The first seeds have all five points, and both sides as victims.
TEST(EndpointKillTest, OneOfTwo) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) run_kill(2, seed);
}
TEST(EndpointKillTest, OneOfEight) { run_kill(8, 1); }
TEST(EndpointKillTest, OneOfSixtyFour) { run_kill(64, 1); }

}  // namespace
}  // namespace convoy::transport::test
