// Process groups: ranks add up tensors, in the world and in parts of it.
//
//   convoy run -n 4 all_reduce
//   torchrun --no-python --nproc-per-node 4 all_reduce
//   mpirun -n 4 all_reduce
//   all_reduce                                            (a group of one)
//   mpirun -n 4 all_reduce mpi                            (over MPI, on any number of hosts)
#include <convoy/error.h>
#include <convoy/group.h>
#include <convoy/init.h>
#include <torch/types.h>

#include <cstdio>
#include <string>

namespace {

void run(const std::string& backend) {
  const auto world = convoy::init({.backend = backend});

  // In place, and it waits.
  auto ones = torch::ones({1000});
  world.all_reduce(ones);

  // Begun here, waited for later; memory of the group is not copied on the way.
  auto gradients = world.allocate({1 << 20});
  gradients.fill_(world.rank() + 1);
  const auto work = world.all_reduce_async(gradients, {.op = convoy::ReduceOp::kAvg});
  const auto squared = world.all_gather_object(std::to_string(world.rank() * world.rank()));
  work.wait(std::chrono::seconds(30));

  // Pairs of neighbours; whatever is called in the scope can find its group.
  const auto pair = world.split_by(world.rank() / 2);
  auto mine = torch::full({3}, world.rank());
  {
    const convoy::GroupScope scope(pair);
    convoy::current_group().all_reduce(mine);
  }

  std::string squares;
  for (const auto& square : squared) squares += (squares.empty() ? "" : " ") + square;
  std::printf("rank %d of %d: ones %g, average %g, squares %s, pair of %d adds up to %g\n",
              world.rank(), world.size(), ones[0].item<double>(), gradients[0].item<double>(),
              squares.c_str(), pair.size(), mine[0].item<double>());
  world.barrier();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 ? argv[1] : "convoy");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
