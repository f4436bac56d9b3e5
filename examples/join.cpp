// Ranks with different numbers of batches: rank r has r + 2 of them.
//
//   convoy run -n 3 join
//
// A rank without further batches takes part in the steps of the others until all have finished, and
// adds nothing. Without the join the others would get an error.
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  const auto world = convoy::init();
  torch::manual_seed(0);
  convoy::DistributedDataParallel model(torch::nn::Linear(4, 1), world);
  torch::optim::SGD sgd(model->parameters(), 0.01);

  int batches = 0;
  convoy::join({&model}, [&] {
    while (batches < world.rank() + 2) {
      sgd.zero_grad();
      model(torch::randn({8, 4})).pow(2).mean().backward();
      sgd.step();
      ++batches;
    }
  });

  const auto sum = model->weight.sum().item<double>();  // the same everywhere
  std::cout << "rank " << world.rank() << ": " << batches << " batches, weights sum to " << sum
            << std::endl;
}
