// Tests that do what the harness must notice. Run by leak_oracle_test and rank_group_test.
#include <fcntl.h>
#include <gtest/gtest.h>

#include "os/process.h"
#include "support/rank_group.h"

namespace convoy::test {
namespace {

TEST(Leaking, Descriptor) { ::open("/dev/null", O_RDONLY | O_CLOEXEC); }
TEST(Leaking, Child) { static auto child = ChildProcess::spawn({.arguments = {"sleep", "1000"}}); }
TEST(Leaking, Nothing) {}

class LeakingSuite : public testing::Test {
 protected:
  static void SetUpTestSuite() { ::open("/dev/null", O_RDONLY | O_CLOEXEC); }
};
TEST_F(LeakingSuite, Descriptor) {}

TEST(Waiting, RanksThatWaitForever) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) { r.wait_for("godot"); });
}

}  // namespace
}  // namespace convoy::test
