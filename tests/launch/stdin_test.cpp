#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>

#include "base/concat.h"
#include "launch/launched.h"
#include "launch/writer.h"
#include "os/file.h"

namespace convoy::launch {
namespace {

using testing::UnorderedElementsAre;

// A file that is read from its start.
UniqueFd file_with(const TempFolder& folder, const std::string& text) {
  const std::string path = folder.path() + "/input";
  write_file(path, text);
  return UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

TEST(Stdin, IsWithheldUnlessAskedFor) {
  const TempFolder folder("launch-test");
  const UniqueFd input = file_with(folder, "secret\n");
  Launched job(
      {.arguments = {"run", "-n", "2", rank_probe(), "cat"}, .standard_input = input.get()});
  EXPECT_EQ(job.finish().shell_code(), 0);
  EXPECT_THAT(lines_of(job.out()), UnorderedElementsAre("[0] end of input", "[1] end of input"));
  EXPECT_EQ(::lseek(input.get(), 0, SEEK_CUR), 0) << "convoy itself has read from it";
}

TEST(Stdin, GoesToAll) {
  const TempFolder folder("launch-test");
  const UniqueFd input = file_with(folder, "one\ntwo\n");
  Launched job({.arguments = {"run", "-n", "2", "--stdin", "all", rank_probe(), "cat"},
                .standard_input = input.get()});
  EXPECT_EQ(job.finish().shell_code(), 0);
  EXPECT_THAT(lines_of(job.out()), UnorderedElementsAre("[0] one", "[0] two", "[0] end of input",
                                                        "[1] one", "[1] two", "[1] end of input"));
}

TEST(Stdin, GoesToOneRank) {
  const TempFolder folder("launch-test");
  const UniqueFd input = file_with(folder, "one\n");
  Launched job({.arguments = {"run", "-n", "3", "--stdin", "1", rank_probe(), "cat"},
                .standard_input = input.get()});
  EXPECT_EQ(job.finish().shell_code(), 0);
  EXPECT_THAT(lines_of(job.out()), UnorderedElementsAre("[0] end of input", "[1] one",
                                                        "[1] end of input", "[2] end of input"));
}

TEST(Stdin, SlowAndDeadRanksDoNotHinderOthers) {
  // Rank 0 reads nothing until rank 2 has read all 4 MB; rank 1 closes its input at once; rank 3
  // ends without reading. Ranks 0 and 2 get every byte.
  const TempFolder folder("launch-test");
  const UniqueFd input = file_with(folder, std::string(4 << 20, 'x'));
  Launched job(
      {.arguments = {"run",   "-n",    "4",    "--stdin", "all",   rank_probe(), "only",
                     "0",     "await", "done", "count",   "only",  "1",          "close-stdin",
                     "await", "done",  "only", "2",       "count", "announce",   "done",
                     "only",  "3",     "exit", "0"},
       .standard_input = input.get()});
  EXPECT_EQ(job.finish().shell_code(), 0) << job.err();
  EXPECT_THAT(lines_of(job.out()), UnorderedElementsAre("[0] bytes 4194304", "[2] bytes 4194304"));
}

TEST(Stdin, AnEndlessInputDoesNotKeepTheJob) {
  // A pipe that nobody closes: the job ends all the same when its ranks do.
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd read_end(ends[0]);
  const UniqueFd write_end(ends[1]);
  Launched job({.arguments = {"run", "-n", "2", "--stdin", "all", rank_probe(), "say", "x"},
                .standard_input = read_end.get()});
  EXPECT_EQ(job.finish().shell_code(), 0);
}

TEST(Stdin, IsPassedOnAsItComes) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  Launched job({.arguments = {"run", "-n", "2", "--stdin", "all", rank_probe(), "echo"},
                .standard_input = read_end.get()});
  for (const char* word : {"first", "second"}) {
    ASSERT_EQ(write_fully(write_end.get(), concat(word, "\n")), 0);
    ASSERT_TRUE(job.wait_for(word, 2));
  }
  write_end.reset();
  EXPECT_EQ(job.finish().shell_code(), 0);
}

}  // namespace
}  // namespace convoy::launch
