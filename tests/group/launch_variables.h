#pragma once

#include <string>
#include <vector>

#include "group/launch_environment.h"

namespace convoy::test {

// What launchers set, as far as we look at it.

// Of variables that are in several parts the first wins.
inline Variables join(const std::vector<Variables>& parts) {
  Variables all;
  for (const auto& part : parts) all.insert(part.begin(), part.end());
  return all;
}

inline Variables pair(int rank, int size) {
  return {{"RANK", std::to_string(rank)}, {"WORLD_SIZE", std::to_string(size)}};
}
inline Variables master() { return {{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29500"}}; }
inline Variables torchrun(int rank, int size) {
  return join({pair(rank, size),
               master(),
               {{"LOCAL_RANK", std::to_string(rank % 2)},
                {"LOCAL_WORLD_SIZE", "2"},
                {"TORCHELASTIC_RUN_ID", "none"},
                {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                {"TORCHELASTIC_RESTART_COUNT", "3"}}});
}
// What mpirun 4.1 sets.
inline Variables open_mpi(int rank, int size, int local_rank, int local_size) {
  return {{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
          {"OMPI_COMM_WORLD_SIZE", std::to_string(size)},
          {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(local_rank)},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", std::to_string(local_size)},
          {"OMPI_MCA_ess_base_jobid", "934281217"},
          {"OMPI_MCA_orte_precondition_transports", "9649dee3e6461488-c4c0a9a76d1de062"},
          {"PMIX_NAMESPACE", "934281217"},
          {"PMIX_RANK", std::to_string(rank)}};
}
inline Variables mpich(int rank, int size, int local_rank, int local_size) {
  return {{"PMI_RANK", std::to_string(rank)},
          {"PMI_SIZE", std::to_string(size)},
          {"MPI_LOCALRANKID", std::to_string(local_rank)},
          {"MPI_LOCALNRANKS", std::to_string(local_size)}};
}
// A step of four tasks on two hosts.
inline Variables slurm(int rank) {
  return {{"SLURM_JOB_ID", "77"},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_NTASKS", "4"},
          {"SLURM_STEP_NUM_TASKS", "4"},
          {"SLURM_STEP_NUM_NODES", "2"},
          {"SLURM_STEP_TASKS_PER_NODE", "3,1"},
          {"SLURM_NNODES", "2"},
          {"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_NODEID", rank < 3 ? "0" : "1"},
          {"SLURM_LOCALID", std::to_string(rank % 3)}};
}
inline Variables slurm_one_host(int rank, int size) {
  return {{"SLURM_JOB_ID", "77"},
          {"SLURM_STEP_ID", "2"},
          {"SLURM_NTASKS", std::to_string(size)},
          {"SLURM_NNODES", "1"},
          {"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_LOCALID", std::to_string(rank)}};
}
inline Variables kubeflow(int rank, int size) {
  return {{"PET_NNODES", std::to_string(size)},
          {"PET_NODE_RANK", std::to_string(rank)},
          {"PET_NPROC_PER_NODE", "1"},
          {"PET_MASTER_ADDR", "job-node-0-0.job"},
          {"PET_MASTER_PORT", "29400"}};
}

}  // namespace convoy::test
