#include "launch/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "os/file.h"

namespace convoy::launch {
namespace {

using testing::HasSubstr;

class Program : public testing::Test {
 protected:
  Program() {
    write_file(folder_.path() + "/plain", "", 0644);
    write_file(folder_.path() + "/script.py", "", 0644);
    write_file(folder_.path() + "/good", "#!/bin/sh\n", 0755);
    std::filesystem::create_directory(folder_.path() + "/folder");
  }
  void expect_problem(const std::string& name, int code, const std::string& said,
                      const std::string& search_path = "/nowhere") {
    const auto problem = check_program(name, search_path, folder_.path());
    ASSERT_TRUE(problem) << name;
    EXPECT_EQ(problem->exit_code, code);
    EXPECT_THAT(problem->line, HasSubstr(said));
    EXPECT_EQ(problem->line.find('\n'), std::string::npos);
  }

  const TempFolder folder_{"launch-test"};
};

TEST_F(Program, GoodOnesPass) {
  EXPECT_FALSE(check_program("./good", "", folder_.path()));
  EXPECT_FALSE(check_program(folder_.path() + "/good", "", ""));
  EXPECT_FALSE(check_program("good", "/nowhere:" + folder_.path(), ""));
}

TEST_F(Program, NotFound) {
  expect_problem("./missing", 127, "'./missing' was not found");
  expect_problem("no/such/folder/program", 127, "there is no folder");
  expect_problem("missing", 127, "was not found in PATH");
  expect_problem("good", 127, "write './good'");
}

TEST_F(Program, NotExecutable) {
  expect_problem("./plain", 126, "is not executable; chmod +x it");
  expect_problem("./script.py", 126, "or run it with python3");
  expect_problem("./folder", 126, "is a folder");
  expect_problem("plain", 126, "is not executable", folder_.path());
}

// As it was typed, and with a folder where it lies in that one.
TEST_F(Program, PathsAreShownAsTheyAre) {
  expect_problem("./script.py", 126, "'" + folder_.path() + "/script.py' is not executable");
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder_.path());
  const auto problem = check_program("./script.py", "/nowhere", "");
  std::filesystem::current_path(before);
  ASSERT_TRUE(problem);
  EXPECT_THAT(problem->line, HasSubstr("'./script.py' is not executable"));
}

TEST_F(Program, WorkingFolderMustBeThere) {
  const auto problem = check_program("ls", "/bin", folder_.path() + "/plain");
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->exit_code, 2);
  EXPECT_THAT(problem->line, HasSubstr("--workdir"));
}

}  // namespace
}  // namespace convoy::launch
