// Tests that do what the harness must notice. Run by leak_oracle_test and rank_group_test.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>

#include "os/file.h"
#include "os/process.h"
#include "support/leak_oracle.h"
#include "support/rank_group.h"

namespace convoy::test {
namespace {

TEST(Leaking, Descriptor) { ::open("/dev/null", O_RDONLY | O_CLOEXEC); }
TEST(Leaking, Child) { static auto child = ChildProcess::spawn({.arguments = {"sleep", "1000"}}); }
TEST(Leaking, SharedMemoryFile) { write_file(shared_file_path("left"), "x"); }
// As a process does that shares tensors by names and is killed.
TEST(Leaking, NameInTheSharedFolder) {
  const std::string folder = std::getenv("CONVOY_SHARE_FOLDER");
  ASSERT_EQ(::mkdir((folder + "/convoy-0").c_str(), 0700), 0);
}
TEST(Leaking, Nothing) {}

// Without the tag in its environment: somebody else's.
TEST(Beside, AnotherProgram) {
  auto stranger =
      ChildProcess::spawn({.arguments = {"touch", std::getenv("CONVOY_TEST_FOREIGN_FILE")},
                           .environment = std::vector<std::string>{"A=b"}});
  const auto status = stranger.wait(Deadline::after(std::chrono::seconds(10)));
  ASSERT_TRUE(status && status->success());
}

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
