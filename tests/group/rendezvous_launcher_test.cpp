// The same program under real launchers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "base/concat.h"
#include "group/launched_ranks.h"
#include "os/file.h"
#include "support/programs.h"

namespace convoy::test {
namespace {

using testing::HasSubstr;
using testing::Not;

// The output of all ranks together, as a launcher passes it on.
void expect_all_met(const ProgramResult& result, int size, const std::string& launcher,
                    int meetings = 1) {
  EXPECT_EQ(result.code, 0) << result.output;
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(times_in(result.output,
                       concat("met: rank ", rank, " of ", size, ", local ", rank, " of ", size,
                              ", by ", launcher, ", sum ", size * (size + 1) / 2, "\n")),
              meetings)
        << result.output;
  }
}

TEST(RendezvousLauncherTest, ConvoyRun) {
  const std::string convoy = sibling_program("convoy");
  const auto result =
      run_one({convoy, "run", "-n", "3", probe_program(), "meetings=2", "show=listening"},
              // Inside an allocation, whose variables say something else.
              {{"SLURM_JOB_ID", "1"},
               {"SLURM_STEP_ID", "0"},
               {"SLURM_PROCID", "0"},
               {"SLURM_NTASKS", "1"}});
  expect_all_met(result, 3, "convoy run", 2);
  EXPECT_THAT(result.output, Not(HasSubstr("listens")));
}

TEST(RendezvousLauncherTest, ProgramsOneAfterAnotherUnderConvoyRun) {
  const auto result = run_one({sibling_program("convoy"), "run", "-n", "2", "sh", "-c",
                               concat(probe_program(), " && ", probe_program())});
  expect_all_met(result, 2, "convoy run", 2);
}

TEST(RendezvousLauncherTest, Mpirun) {
  if (!on_path("mpirun")) GTEST_SKIP() << "no mpirun on this host";
  const TempFolder folder("mpi");
  const auto result = run_one(
      {"mpirun", "-n", "3", "--oversubscribe", probe_program(), "meetings=2", "show=listening"},
      {{"TMPDIR", folder.path()}});
  expect_all_met(result, 3, "Open MPI", 2);
  EXPECT_THAT(result.output, Not(HasSubstr("listens")));
  // Several programs at once do not meet each other. Each mpirun has a folder of its own for what
  // it keeps: two that make the same one at once may fail ("mkdir: File exists").
  const auto at_once = [&](const std::string& name, std::vector<std::string> program) {
    const std::string own = concat(folder.path(), "/", name);
    std::filesystem::create_directory(own);
    program.insert(program.begin(),
                   {"mpirun", "--mca", "orte_tmpdir_base", own, "-n", "2", "--oversubscribe"});
    return Program{std::move(program), {{"TMPDIR", folder.path()}}};
  };
  const auto results = run_programs(
      {at_once("first", {probe_program()}), at_once("second", {"sh", "-c", probe_program()})});
  for (const auto& one : results) expect_all_met(one, 2, "Open MPI");
  const std::string meeting_folder = concat(folder.path(), "/convoy-", ::geteuid());
  EXPECT_TRUE(std::filesystem::is_empty(meeting_folder));
}

TEST(RendezvousLauncherTest, Torchrun) {
  if (::access(CONVOY_TORCHRUN, X_OK) != 0) GTEST_SKIP() << "no " << CONVOY_TORCHRUN;
  const TempFolder folder("torchrun");
  // torchrun's agent serves the store, and keeps it when it starts the ranks again.
  const auto result =
      run_one({CONVOY_TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1",
               "--no-python", probe_program(), "meetings=2", "fail-first", "show=listening"},
              {{"TMPDIR", folder.path()}});
  expect_all_met(result, 2, "torchrun", 4);
  EXPECT_THAT(result.output, Not(HasSubstr("listens")));
}

}  // namespace
}  // namespace convoy::test
