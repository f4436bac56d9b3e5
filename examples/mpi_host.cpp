// A program that is MPI's before it is ours: it has its own MPI_Init, communicator and loop (a rod
// whose ends exchange heat with their neighbours), and asks a group for what a model needs.
//
//   mpirun -n 4 mpi_host [multiple|serialized|funneled]     the thread level it asks MPI for
#include <convoy/error.h>
#include <convoy/mpi.h>
#include <torch/types.h>

#include <cstdio>
#include <string>

#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

namespace {

// The host's own MPI: one step of heat flow, with the neighbours' last elements at both ends.
void step(torch::Tensor& rod, MPI_Comm comm) {
  int rank = 0, size = 0;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  const int left = rank == 0 ? MPI_PROC_NULL : rank - 1;
  const int right = rank == size - 1 ? MPI_PROC_NULL : rank + 1;
  auto* cells = rod.data_ptr<float>();
  const auto last = rod.numel() - 1;
  MPI_Sendrecv(&cells[1], 1, MPI_FLOAT, left, 0, &cells[last], 1, MPI_FLOAT, right, 0, comm,
               MPI_STATUS_IGNORE);
  MPI_Sendrecv(&cells[last - 1], 1, MPI_FLOAT, right, 1, &cells[0], 1, MPI_FLOAT, left, 1, comm,
               MPI_STATUS_IGNORE);
  auto inner = rod.slice(0, 1, last);
  inner += 0.25 * (rod.slice(0, 0, last - 1) - 2 * inner + rod.slice(0, 2, last + 1));
}

void simulate(MPI_Comm comm) {
  // On a copy of the communicator: its messages and ours do not meet.
  const auto group = convoy::from_mpi(comm, {.name = "rods", .timeout = std::chrono::minutes(1)});
  auto rod = torch::full({66}, group.rank() == 0 ? 100.0F : 0.0F);
  auto weight = torch::zeros({1}, torch::requires_grad());
  for (int i = 0; i < 20; ++i) {
    step(rod, comm);
    // A model that learns the mean temperature of all ranks' rods.
    const auto loss = (weight - rod.mean()).square().sum();
    loss.backward();
    const auto work = group.all_reduce_async(weight.grad(), {.op = convoy::ReduceOp::kAvg});
    work.wait();
    torch::NoGradGuard guard;
    weight -= 0.5 * weight.grad();
    weight.mutable_grad().zero_();
  }
  const auto all = group.all_gather(weight.detach());
  const bool equal = (all == all[0]).all().item<bool>();
  if (group.rank() == 0) {
    std::printf("%d ranks: mean temperature %.2f, %s\n", group.size(), weight.item<double>(),
                equal ? "the same on all" : "NOT the same on all");
  }
  if (!equal) MPI_Abort(comm, 1);
}

int level_of(const std::string& name) {
  if (name == "funneled") return MPI_THREAD_FUNNELED;
  return name == "serialized" ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE;
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, level_of(argc > 1 ? argv[1] : ""), &level);
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  int status = 0;
  try {
    simulate(comm);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    status = 1;
  }
  MPI_Comm_free(&comm);
  MPI_Finalize();  // the host's to call
  return status;
}
