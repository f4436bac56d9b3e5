// 10,000 programs of letters against a model; SIGKILL at 200 points is in kill_soak_test.cpp.
#include "programs.h"

namespace convoy::transport::test {
namespace {

TEST(EndpointSoakTest, ProgramsOverSharedMemory) { run_programs(NetKind::kShm, 1000, 10'000); }
TEST(EndpointSoakTest, ProgramsOverASimulation) {
  run_programs(NetKind::kSimulated, 1000, 100'000);
}
TEST(EndpointSoakTest, ProgramsThroughTheFaultyEndpoint) {
  run_programs(NetKind::kFaultyShm, 1000, 1'000);
  run_programs(NetKind::kFaultySimulated, 1000, 10'000);
}

}  // namespace
}  // namespace convoy::transport::test
