// A sample of what soak_test.cpp runs.
#include "programs.h"

namespace convoy::transport::test {
namespace {

TEST(EndpointRandomTest, ProgramsOverSharedMemory) { run_programs(NetKind::kShm, 1, 150); }
TEST(EndpointRandomTest, ProgramsOverASimulation) { run_programs(NetKind::kSimulated, 1, 1000); }
TEST(EndpointRandomTest, ProgramsThroughTheFaultyEndpoint) {
  run_programs(NetKind::kFaultyShm, 1, 30);
  run_programs(NetKind::kFaultySimulated, 1, 300);
}

}  // namespace
}  // namespace convoy::transport::test
