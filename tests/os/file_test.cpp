#include "os/file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <thread>

#include "base/concat.h"
#include "os/process.h"
#include "support/expect_error.h"
#include "support/file_mode.h"
#include "support/rank_group.h"

namespace convoy {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::mode_of;

TEST(FileTest, WriteAndRead) {
  const TempFolder folder("file");
  const std::string path = folder.path() + "/a";
  const std::string text("some\0bytes", 10);
  write_file(path, text);
  EXPECT_EQ(read_file(path), text);
  write_file(path, "");
  EXPECT_EQ(read_file(path), "");
  const std::string large(1'000'000, 'x');
  write_file(path, large);
  EXPECT_EQ(read_file(path), large);
}

TEST(FileTest, ReadsFilesOfProc) {
  const auto text = read_file("/proc/self/maps");  // has no size of its own, and comes in pieces
  ASSERT_TRUE(text);
  EXPECT_NE(text->find("[stack]"), std::string::npos);
}

TEST(FileTest, WhatCannotBeReadIsNothing) {
  EXPECT_EQ(read_file("/nowhere/to/be/found"), std::nullopt);
  EXPECT_EQ(read_file("/"), std::nullopt);
}

TEST(FileTest, WriteSaysWhyItFails) {
  expect_error(ErrorKind::kInvalidArgument, "/nowhere/file: No such file",
               [] { write_file("/nowhere/file", "x"); });
  expect_error(ErrorKind::kResource, "/dev/full: No space left",
               [] { write_file("/dev/full", "x"); });
}

TEST(FileTest, ModeIsThatOfTheCallForNewAndOldFiles) {
  const TempFolder folder("file");
  const std::string path = folder.path() + "/secret";
  write_file(path, "x");
  EXPECT_EQ(mode_of(path), 0600u);
  write_file(path, "x", 0644);  // whatever the umask
  EXPECT_EQ(mode_of(path), 0644u);
  write_file(path, "secret");  // must not stay open to others
  EXPECT_EQ(mode_of(path), 0600u);
}

TEST(TempFolderTest, IsOursAloneAndIsRemoved) {
  std::string path;
  {
    const TempFolder folder("temp");
    path = folder.path();
    EXPECT_EQ(mode_of(path), 0700u);
    EXPECT_EQ(fs::path(path).parent_path(), ::getenv("TMPDIR"));
    fs::create_directories(path + "/a/b");
    write_file(path + "/a/b/c", "x");
    const TempFolder other("temp");
    EXPECT_NE(other.path(), path);
  }
  EXPECT_FALSE(fs::exists(path));
}

// A process that is killed leaves its folder; the next one that makes or removes one cleans up.
TEST(TempFolderTest, FoldersOfTheDeadAreRemoved) {
  test::RankGroup ranks(2, test::RankMode::kProcesses);
  ranks.start([](test::Rank& r) {
    ::setenv("TMPDIR", r.store()->get("where").c_str(), 1);
    const TempFolder folder("left", TempFolder::Killed::kSwept);
    write_file(folder.path() + "/socket", "");
    r.store()->set(concat("folder/", r.id()), folder.path());
    r.mark("made");
    r.wait_for("end");
  });
  const TempFolder where("where");
  ranks.store()->set("where", where.path());
  ranks.wait_mark("made");
  const std::string dead = ranks.store()->get("folder/0");
  const std::string alive = ranks.store()->get("folder/1");
  ranks.kill(0, SIGKILL);
  const auto limit = Deadline::after(std::chrono::seconds(20));
  while (process_state(ranks.pid(0)).value_or('Z') != 'Z' && !limit.expired()) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(fs::exists(dead));
  const std::string before = ::getenv("TMPDIR");
  ::setenv("TMPDIR", where.path().c_str(), 1);
  { const TempFolder mine("left", TempFolder::Killed::kSwept); }
  ::setenv("TMPDIR", before.c_str(), 1);
  EXPECT_FALSE(fs::exists(dead));
  EXPECT_TRUE(fs::exists(alive));
  ranks.post("end", 1);
  ranks.join();
  EXPECT_FALSE(fs::exists(alive));
}

TEST(TempFolderTest, FallsBackToTmp) {
  const std::string before = ::getenv("TMPDIR");
  for (const char* value : {"", static_cast<const char*>(nullptr)}) {
    if (value) {
      ::setenv("TMPDIR", value, 1);
    } else {
      ::unsetenv("TMPDIR");
    }
    EXPECT_TRUE(TempFolder("convoy-test-tmp").path().starts_with("/tmp/convoy-test-tmp."));
  }
  ::setenv("TMPDIR", before.c_str(), 1);
}

TEST(TempFolderTest, SaysWhereItCouldNotBeMade) {
  const std::string before = ::getenv("TMPDIR");
  ::setenv("TMPDIR", "/nowhere", 1);
  expect_error(ErrorKind::kInvalidArgument, "/nowhere/temp", [] { TempFolder folder("temp"); });
  ::setenv("TMPDIR", before.c_str(), 1);
}

TEST(TempFolderTest, ForkedChildDoesNotRemoveIt) {
  test::run_in_process([] {
    std::optional<TempFolder> folder(std::in_place, "temp");
    const pid_t child = ::fork();
    if (child == 0) {
      folder.reset();
      ::_exit(0);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_TRUE(fs::exists(folder->path()));
  });
}

}  // namespace
}  // namespace convoy
