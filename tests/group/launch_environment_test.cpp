#include "group/launch_environment.h"

#include <gtest/gtest.h>

#include "base/concat.h"
#include "group/launch_variables.h"
#include "support/expect_error.h"

namespace convoy::test {
namespace {

// "torchrun 3 of 4, local 1 of 2, at tcp": what is read, in one line.
std::string read(const Variables& variables, const GivenRank& given = {}, bool ours = false) {
  const auto found = read_launch_environment(variables, given, ours);
  std::string place = "?";
  switch (meeting_place(found, variables)) {
    case MeetingPlace::kAlone: place = "home"; break;
    case MeetingPlace::kLauncherStore: place = "launcher"; break;
    case MeetingPlace::kTcp: place = "tcp"; break;
    case MeetingPlace::kJobSocket: place = "socket"; break;
  }
  return concat(found.launcher, " ", found.rank, " of ", found.size, ", local ", found.local_rank,
                " of ", found.local_size, ", at ", place);
}

struct ReadCase {
  const char* name;
  Variables variables;
  const char* expected;
  GivenRank given = {};
  bool ours = false;
};

TEST(LaunchEnvironmentTest, Reads) {
  const Variables convoy_run = join({torchrun(1, 2), {{"TORCHELASTIC_USE_AGENT_STORE", "False"}}});
  const std::vector<ReadCase> cases = {
      {"nothing", {}, "none 0 of 1, local 0 of 1, at home"},
      {"other variables", {{"HOME", "/root"}}, "none 0 of 1, local 0 of 1, at home"},
      {"a master names no rank", master(), "none 0 of 1, local 0 of 1, at home"},
      {"empty is unset", {{"RANK", ""}, {"WORLD_SIZE", ""}}, "none 0 of 1, local 0 of 1, at home"},
      // torchrun and by hand
      {"torchrun", torchrun(3, 4), "torchrun 3 of 4, local 1 of 2, at tcp"},
      {"torchrun beside its options", join({torchrun(3, 4), {{"PET_NPROC_PER_NODE", "auto"}}}),
       "torchrun 3 of 4, local 1 of 2, at tcp"},
      {"torchrun under srun", join({torchrun(3, 4), slurm(1)}),
       "torchrun 3 of 4, local 1 of 2, at tcp"},
      {"torchrun under mpirun", join({torchrun(3, 4), open_mpi(1, 2, 0, 1)}),
       "torchrun 3 of 4, local 1 of 2, at tcp"},
      {"torchrun under Kubeflow", join({torchrun(3, 4), kubeflow(1, 2)}),
       "torchrun 3 of 4, local 1 of 2, at tcp"},
      {"by hand", join({pair(1, 2), master()}), "environment 1 of 2, local 1 of 2, at tcp"},
      {"by hand, and only how many on a host",
       join({pair(3, 4), master(), {{"LOCAL_WORLD_SIZE", "2"}}}),
       "environment 3 of 4, local 1 of 2, at tcp"},
      {"by hand, and alone on its host", join({pair(1, 2), master(), {{"LOCAL_WORLD_SIZE", "1"}}}),
       "environment 1 of 2, local 0 of 1, at tcp"},
      {"by hand, with a local rank that srun's size cannot have",
       join({pair(3, 4), master(), slurm(3), {{"LOCAL_RANK", "3"}}}),
       "environment 3 of 4, local 3 of 4, at tcp"},
      {"alone by hand", pair(0, 1), "environment 0 of 1, local 0 of 1, at home"},
      {"alone, half a master", join({pair(0, 1), {{"MASTER_ADDR", "x"}}}),
       "environment 0 of 1, local 0 of 1, at home"},
      {"by hand under srun", join({pair(1, 2), master(), slurm(3)}),
       "environment 1 of 2, local 1 of 2, at tcp"},
      {"from srun's variables", join({pair(3, 4), master(), slurm(3)}),
       "environment 3 of 4, local 0 of 1, at tcp"},
      {"from mpirun's variables", join({pair(1, 2), open_mpi(1, 2, 1, 2)}),
       "environment 1 of 2, local 1 of 2, at socket"},
      {"garbage of Slurm's behind it",
       join({pair(1, 2), master(), slurm(3), {{"SLURM_NODEID", "x"}}}),
       "environment 1 of 2, local 1 of 2, at tcp"},
      // convoy run
      {"convoy run", convoy_run, "convoy run 1 of 2, local 1 of 2, at launcher", {}, true},
      {"convoy run under srun",
       join({convoy_run, slurm(3)}),
       "convoy run 1 of 2, local 1 of 2, at launcher",
       {},
       true},
      {"convoy run under mpirun",
       join({convoy_run, open_mpi(5, 7, 0, 1)}),
       "convoy run 1 of 2, local 1 of 2, at launcher",
       {},
       true},
      // Kubernetes
      {"Kubeflow's operator", kubeflow(1, 2), "environment 1 of 2, local 0 of 1, at tcp"},
      {"Kubeflow, 2:2", join({{{"PET_NNODES", "2:2"}}, kubeflow(1, 2)}),
       "environment 1 of 2, local 0 of 1, at tcp"},
      {"Kubeflow beside RANK", join({kubeflow(1, 2), pair(1, 2), master()}),
       "environment 1 of 2, local 0 of 1, at tcp"},
      {"Kubeflow, one pod", kubeflow(0, 1), "environment 0 of 1, local 0 of 1, at home"},
      {"somebody counted for Kubeflow",
       join({pair(3, 4),
             master(),
             {{"LOCAL_RANK", "1"}, {"PET_NPROC_PER_NODE", "2"}},
             kubeflow(1, 2)}),
       "environment 3 of 4, local 1 of 4, at tcp"},
      // MPI
      {"mpirun on one host", open_mpi(1, 2, 1, 2), "Open MPI 1 of 2, local 1 of 2, at socket"},
      {"mpirun with a master", join({open_mpi(1, 2, 1, 2), master()}),
       "Open MPI 1 of 2, local 1 of 2, at tcp"},
      {"mpirun on two hosts", join({open_mpi(3, 4, 1, 2), master()}),
       "Open MPI 3 of 4, local 1 of 2, at tcp"},
      {"mpirun, one rank", open_mpi(0, 1, 0, 1), "Open MPI 0 of 1, local 0 of 1, at home"},
      {"mpirun whose helper srun started", join({open_mpi(3, 4, 1, 2), master(), slurm(1)}),
       "Open MPI 3 of 4, local 1 of 2, at tcp"},
      {"MPICH and srun agree", join({{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}, slurm_one_host(1, 2)}),
       "MPICH 1 of 2, local 1 of 2, at socket"},
      {"MPICH on two hosts", join({mpich(3, 4, 1, 2), master()}),
       "MPICH 3 of 4, local 1 of 2, at tcp"},
      {"a program of one rank after MPI_Init",
       {{"PMIX_RANK", "0"}, {"PMIX_NAMESPACE", "1"}},
       "none 0 of 1, local 0 of 1, at home"},
      // Slurm
      {"srun on one host", slurm_one_host(1, 2), "Slurm 1 of 2, local 1 of 2, at socket"},
      {"srun on two hosts", join({slurm(2), master()}), "Slurm 2 of 4, local 2 of 3, at tcp"},
      {"srun, second host", join({slurm(3), master()}), "Slurm 3 of 4, local 0 of 1, at tcp"},
      {"srun, a step smaller than its job",
       join({{{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NUM_NODES", "1"}}, slurm_one_host(1, 8)}),
       "Slurm 1 of 2, local 1 of 2, at socket"},
      {"a shell of srun", slurm_one_host(0, 1), "Slurm 0 of 1, local 0 of 1, at home"},
      {"sbatch without srun",
       {{"SLURM_JOB_ID", "77"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}},
       "none 0 of 1, local 0 of 1, at home"},
      {"sbatch, a step with a special number",
       join({{{"SLURM_STEP_ID", "4294967291"}}, slurm_one_host(0, 8)}),
       "none 0 of 1, local 0 of 1, at home"},
      {"salloc",
       {{"SLURM_JOB_ID", "77"}, {"SLURM_NTASKS", "8"}},
       "none 0 of 1, local 0 of 1, at home"},
      {"salloc with a shell on the host",
       join({{{"SLURM_STEP_ID", "4294967290"}}, slurm_one_host(0, 8)}),
       "none 0 of 1, local 0 of 1, at home"},
      {"a step with a name", join({{{"SLURM_STEP_ID", "interactive"}}, slurm_one_host(0, 8)}),
       "none 0 of 1, local 0 of 1, at home"},
      // given by the caller
      {"given, nothing set", {}, "none 0 of 1, local 0 of 1, at home", {0, 1}},
      {"given, a master", master(), "none 1 of 2, local 1 of 2, at tcp", {1, 2}},
      {"given, others set",
       join({pair(3, 4), master()}),
       "environment 1 of 2, local 1 of 2, at tcp",
       {1, 2}},
      {"given, garbage set",
       join({{{"RANK", "x"}, {"PMI_SIZE", "-"}}, master()}),
       "environment 1 of 2, local 1 of 2, at tcp",
       {1, 2}},
      {"given, launchers disagree",
       join({pair(3, 4), open_mpi(0, 2, 0, 2)}),
       "environment 1 of 2, local 0 of 2, at socket",
       {1, 2}},
      {"rank given",
       join({{{"WORLD_SIZE", "4"}}, master()}),
       "environment 2 of 4, local 2 of 4, at tcp",
       {2, std::nullopt}},
      {"size given",
       join({pair(1, 4), master()}),
       "environment 1 of 2, local 1 of 2, at tcp",
       {std::nullopt, 2}},
      {"given to convoy run",
       convoy_run,
       "convoy run 0 of 1, local 0 of 1, at launcher",
       {0, 1},
       true},
  };
  for (const auto& item : cases) {
    SCOPED_TRACE(item.name);
    try {
      EXPECT_EQ(read(item.variables, item.given, item.ours), item.expected);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

struct ErrorCase {
  const char* name;
  Variables variables;
  std::vector<const char*> parts;
  GivenRank given = {};
};

TEST(LaunchEnvironmentTest, SaysWhatIsWrongAndWhatToSet) {
  const std::vector<ErrorCase> cases = {
      {"no size", {{"RANK", "1"}}, {"RANK=1 is set but WORLD_SIZE is not", "MASTER_ADDR"}},
      {"no rank", {{"WORLD_SIZE", "2"}}, {"WORLD_SIZE=2 is set but RANK is not"}},
      {"no number", {{"RANK", "one"}, {"WORLD_SIZE", "2"}}, {"RANK='one' is not a number"}},
      {"a space", {{"RANK", "1 "}, {"WORLD_SIZE", "2"}}, {"RANK='1 ' is not a number"}},
      {"too large",
       {{"RANK", "1"}, {"WORLD_SIZE", "99999999999"}},
       {"WORLD_SIZE=", "is not a number"}},
      {"beyond the last", pair(2, 2), {"RANK=2 WORLD_SIZE=2", "from 0 to size - 1"}},
      {"below the first", pair(-1, 2), {"RANK=-1 WORLD_SIZE=2"}},
      {"none of none", pair(0, 0), {"RANK=0 WORLD_SIZE=0"}},
      {"local beyond the last",
       join({pair(1, 2), master(), {{"LOCAL_RANK", "2"}}}),
       {"LOCAL_RANK=2", "RANK=1 WORLD_SIZE=2"}},
      {"more on the host than there are",
       join({pair(1, 2), {{"LOCAL_WORLD_SIZE", "3"}}}),
       {"LOCAL_WORLD_SIZE=3"}},
      {"local garbage", join({pair(1, 2), {{"LOCAL_RANK", "x"}}}), {"LOCAL_RANK='x'"}},
      {"no master",
       pair(0, 2),
       {"rank 0 of 2 (environment)", "MASTER_ADDR and MASTER_PORT are not"}},
      {"half a master",
       join({pair(0, 2), {{"MASTER_ADDR", "host"}}}),
       {"MASTER_ADDR=host is set but MASTER_PORT is not"}},
      {"the other half",
       join({pair(0, 2), {{"MASTER_PORT", "1"}}}),
       {"MASTER_PORT=1 is set but MASTER_ADDR is not"}},
      {"no port",
       join({pair(0, 2), {{"MASTER_ADDR", "host"}, {"MASTER_PORT", "http"}}}),
       {"MASTER_PORT='http' is not a number"}},
      {"no such port",
       join({pair(0, 2), {{"MASTER_ADDR", "host"}, {"MASTER_PORT", "65536"}}}),
       {"MASTER_PORT=65536", "from 1 to 65535"}},
      {"two launchers",
       join({pair(1, 4), master(), open_mpi(0, 2, 0, 2)}),
       {"RANK=1 WORLD_SIZE=4 (environment)",
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 (Open MPI)", "unset"}},
      {"two MPIs", join({open_mpi(0, 2, 0, 2), mpich(1, 2, 1, 2)}), {"Open MPI", "PMI_RANK=1"}},
      {"Kubeflow disagrees",
       join({pair(1, 4), master(), kubeflow(1, 2)}),
       {"RANK=1 WORLD_SIZE=4", "PET_NODE_RANK=1 PET_NNODES=2"}},
      {"several ranks a pod",
       join({{{"PET_NPROC_PER_NODE", "4"}}, kubeflow(1, 2)}),
       {"PET_NPROC_PER_NODE='4'", "torchrun --no-python", "PET_NPROC_PER_NODE=1"}},
      {"per pod, not per rank",
       join({pair(1, 2), {{"PET_NPROC_PER_NODE", "auto"}}, kubeflow(1, 2)}),
       {"PET_NPROC_PER_NODE='auto'"}},
      {"an elastic job", join({{{"PET_NNODES", "1:4"}}, kubeflow(0, 1)}), {"PET_NNODES='1:4'"}},
      {"no rank of a pod", {{"PET_NNODES", "2"}}, {"PET_NNODES=2 is set but PET_NODE_RANK is not"}},
      {"half of Open MPI", {{"OMPI_COMM_WORLD_RANK", "0"}}, {"OMPI_COMM_WORLD_SIZE is not"}},
      {"mpirun on two hosts",
       open_mpi(3, 4, 1, 2),
       {"rank 3 of 4 (Open MPI)", "not all ranks are known to run on this host", "MASTER_ADDR"}},
      {"MPICH, hosts unknown", {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, {"(MPICH)", "MASTER_ADDR"}},
      {"half of PMI", {{"PMI_SIZE", "2"}}, {"PMI_SIZE=2 is set but PMI_RANK is not"}},
      {"PMIx alone", {{"PMIX_RANK", "1"}}, {"PMIX_RANK=1", "not of how many"}},
      {"srun on two hosts", slurm(1), {"(Slurm)", "scontrol show hostnames"}},
      {"srun, garbage",
       join({{{"SLURM_PROCID", "x"}}, slurm_one_host(0, 2)}),
       {"SLURM_PROCID='x'"}},
      {"given beyond the last", {}, {"rank 2 of 2"}, {2, 2}},
      {"given below the first", {}, {"rank -1 of 2"}, {-1, 2}},
      {"given, beyond what is set",
       join({{{"WORLD_SIZE", "2"}}, master()}),
       {"rank 5 (given) WORLD_SIZE=2"},
       {5, std::nullopt}},
      {"only a rank given", {}, {"rank 1 is given", "give both"}, {1, std::nullopt}},
      {"only a size given", master(), {"size 2 is given", "give both"}, {std::nullopt, 2}},
      {"given, no master", {}, {"rank 1 of 2 (none)", "MASTER_ADDR"}, {1, 2}},
  };
  for (const auto& item : cases) {
    SCOPED_TRACE(item.name);
    for (const char* part : item.parts) {
      expect_error(ErrorKind::kInvalidArgument, part, [&] { read(item.variables, item.given); });
    }
  }
}

TEST(LaunchEnvironmentTest, JobsHaveNamesOfTheirOwn) {
  const auto job = [](const Variables& variables) {
    return read_launch_environment(variables, {}, false).job;
  };
  EXPECT_EQ(job(open_mpi(0, 2, 0, 2)), job(open_mpi(1, 2, 1, 2)));
  EXPECT_NE(job(open_mpi(0, 2, 0, 2)),
            job(join({{{"PMIX_NAMESPACE", "934281218"}}, open_mpi(0, 2, 0, 2)})));
  EXPECT_EQ(job(slurm(0)), job(slurm(3)));
  for (const char* name : {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}) {
    EXPECT_NE(job(slurm(0)), job(join({{{name, "9"}}, slurm(0)}))) << name;
  }
  EXPECT_EQ(job(mpich(0, 2, 0, 2)), "");
  EXPECT_EQ(job(join({pair(0, 2), master()})), "");
}

TEST(LaunchEnvironmentTest, WhatTorchrunSays) {
  const auto found = read_launch_environment(torchrun(1, 2), {}, false);
  EXPECT_TRUE(found.agent_store);
  EXPECT_EQ(found.restart, "3");
  EXPECT_EQ(read_master(torchrun(1, 2)), (Endpoint{"10.0.0.1", 29500}));
  EXPECT_EQ(read_master(kubeflow(1, 2)), (Endpoint{"job-node-0-0.job", 29400}));
  EXPECT_EQ(read_master({}), std::nullopt);
  const auto plain = read_launch_environment(join({pair(1, 2), master()}), {}, false);
  EXPECT_FALSE(plain.agent_store);
  EXPECT_EQ(plain.restart, "");
}

TEST(LaunchEnvironmentTest, TasksOnNode) {
  EXPECT_EQ(tasks_on_node("4", 0), 4);
  EXPECT_EQ(tasks_on_node("2(x3),1", 0), 2);
  EXPECT_EQ(tasks_on_node("2(x3),1", 2), 2);
  EXPECT_EQ(tasks_on_node("2(x3),1", 3), 1);
  EXPECT_EQ(tasks_on_node("2(x3),1", 4), std::nullopt);
  EXPECT_EQ(tasks_on_node("2", -1), std::nullopt);
  for (const char* text :
       {"", ",", "x", "2(x)", "2(x3", "2(x0)", "2(3)", "0", "2(x3)4", "(x2)", "2(x9999999999)"}) {
    EXPECT_EQ(tasks_on_node(text, 0), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace convoy::test
