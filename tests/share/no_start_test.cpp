// In a program whose main does not begin with convoy::start.
#include "convoy/process_pool.h"
#include "convoy/spawn.h"
#include "support.h"

namespace convoy::share::test {
namespace {

void nothing(int) {}

TEST(SpawnWithoutStartTest, IsRefused) {
  expect_error(ErrorKind::kInvalidArgument, "main has not called convoy::start(argc, argv)",
               [] { (void)spawn<nothing>(1); });
  expect_error(ErrorKind::kInvalidArgument, "main has not called convoy::start(argc, argv)",
               [] { ProcessPool pool(1); });
}

}  // namespace
}  // namespace convoy::share::test
