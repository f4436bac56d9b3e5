// The smallest program: ranks average a tensor.
//
//   convoy run -n 4 average
//
// It runs under torchrun, mpirun and srun, too, and alone as a group of one.
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  const auto world = convoy::init();  // torchrun, convoy run, mpirun, srun, or this process alone
  auto t = torch::full({3}, world.rank() + 1.0);
  world.all_reduce(t, {.op = convoy::ReduceOp::kAvg});
  if (world.rank() == 0)
    std::cout << "average of " << world.size() << " ranks: " << t[0].item<double>() << std::endl;
}
