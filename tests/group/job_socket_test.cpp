#include "group/job_socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "base/unique_fd.h"
#include "os/file.h"
#include "support/expect_error.h"

namespace convoy {
namespace {

using namespace std::chrono_literals;
using test::expect_error;

// The folder lies in a temporary one of this test's.
class JobSocketTest : public testing::Test {
 protected:
  JobSocketTest() {
    ::setenv("TMPDIR", folder_.path().c_str(), 1);
    ::unsetenv("XDG_RUNTIME_DIR");
  }
  ~JobSocketTest() override { ::setenv("TMPDIR", before_.c_str(), 1); }

  const std::string before_ = std::getenv("TMPDIR");
  TempFolder folder_{"job"};
};

int entries(const std::string& folder) {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

TEST_F(JobSocketTest, RanksMeetAndNothingIsLeft) {
  auto served = serve_job_socket("job 1");
  EXPECT_EQ(entries(job_folder()), 1);
  const auto deadline = Deadline::after(20s);
  const auto other = connect_job_socket("job 1", deadline);
  EXPECT_EQ(other.server, nullptr);
  served.store->set("key", "value");
  EXPECT_EQ(other.store->get("key", deadline), "value");
  served.server->unlink();
  EXPECT_EQ(entries(job_folder()), 0);
  other.store->set("key", "again");
  EXPECT_EQ(served.store->get("key", deadline), "again");
}

TEST_F(JobSocketTest, JobsDoNotMeetEachOther) {
  const auto one = serve_job_socket("job 1");
  const auto two = serve_job_socket("job 2");
  one.store->set("key", "1");
  two.store->set("key", "2");
  EXPECT_EQ(connect_job_socket("job 2", Deadline::after(20s)).store->get("key"), "2");
}

TEST_F(JobSocketTest, RankZeroMayComeLast) {
  std::jthread client([] {
    EXPECT_EQ(connect_job_socket("job", Deadline::after(20s)).store->get("key"), "value");
  });
  const auto served = serve_job_socket("job");
  served.store->set("key", "value");
  client.join();  // before the server goes
}

TEST_F(JobSocketTest, NobodyThere) {
  expect_error(ErrorKind::kTimeout, "rank 0 did not open",
               [] { connect_job_socket("job", Deadline::after(20ms)); });
}

TEST_F(JobSocketTest, OneRankZeroOnly) {
  const auto served = serve_job_socket("job");
  expect_error(ErrorKind::kInvalidArgument, "two processes are rank 0 of the same job",
               [] { serve_job_socket("job"); });
}

TEST_F(JobSocketTest, ADeadJobsSocketIsReplaced) {
  std::string path;
  {
    const auto served = serve_job_socket("job");
    path = std::filesystem::directory_iterator(job_folder())->path().string();
  }
  // What a killed process leaves: bound, and nobody listens.
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  {
    const UniqueFd dead(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::bind(dead.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  expect_error(ErrorKind::kTimeout, "rank 0 did not open",
               [] { connect_job_socket("job", Deadline::after(20ms)); });
  const auto served = serve_job_socket("job");
  connect_job_socket("job", Deadline::after(20s)).store->set("key", "value");
  EXPECT_EQ(served.store->get("key"), "value");
}

TEST_F(JobSocketTest, AFolderThatOthersMayEnterIsNotUsed) {
  const std::string folder = job_folder();
  struct stat info {};
  ASSERT_EQ(::stat(folder.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  for (const mode_t mode : {0755, 0710, 0701}) {
    ASSERT_EQ(::chmod(folder.c_str(), mode), 0);
    expect_error(ErrorKind::kInvalidArgument, "not safe to meet in",
                 [] { serve_job_socket("job"); });
    expect_error(ErrorKind::kInvalidArgument, "not safe to meet in",
                 [] { connect_job_socket("job", Deadline::after(20s)); });
  }
  ASSERT_EQ(::rmdir(folder.c_str()), 0);
  ASSERT_EQ(::symlink(folder_.path().c_str(), folder.c_str()), 0);
  expect_error(ErrorKind::kInvalidArgument, "not safe to meet in", [] { job_folder(); });
  if (::geteuid() == 0) {
    ASSERT_EQ(::unlink(folder.c_str()), 0);
    ASSERT_EQ(::mkdir(folder.c_str(), 0700), 0);
    ASSERT_EQ(::chown(folder.c_str(), 12345, 12345), 0);
    expect_error(ErrorKind::kInvalidArgument, "not safe to meet in", [] { job_folder(); });
  }
}

TEST_F(JobSocketTest, WhereTheFolderIs) {
  const std::string name = "/convoy-" + std::to_string(::geteuid());
  EXPECT_EQ(job_folder(), folder_.path() + name);
  const TempFolder runtime("run");
  ::setenv("XDG_RUNTIME_DIR", runtime.path().c_str(), 1);
  EXPECT_EQ(job_folder(), runtime.path() + name);
  ::setenv("XDG_RUNTIME_DIR", "/does/not/exist", 1);
  EXPECT_EQ(job_folder(), folder_.path() + name);
  ::unsetenv("XDG_RUNTIME_DIR");
  // Too long for the path of a socket.
  const std::string longer = folder_.path() + "/" + std::string(60, 'x');
  ASSERT_EQ(::mkdir(longer.c_str(), 0700), 0);
  ::setenv("TMPDIR", longer.c_str(), 1);
  const bool there = std::filesystem::exists("/tmp" + name);
  EXPECT_EQ(job_folder(), "/tmp" + name);
  if (!there) ::rmdir(("/tmp" + name).c_str());
}

TEST_F(JobSocketTest, TheParentNamesAJob) {
  const std::string here = job_of_parent();
  EXPECT_EQ(here, job_of_parent());
  EXPECT_NE(here.find("process "), std::string::npos);
}

}  // namespace
}  // namespace convoy
