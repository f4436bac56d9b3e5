// Batch normalisation over the batches of all ranks.
//
//   convoy run -n 2 sync_batch_norm
//
// Mean and variance are those of the whole batch, as if one process had it. Small batches per rank
// need that; large ones do not.
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  const auto world = convoy::init();
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8), torch::nn::ReLU(),
                            torch::nn::Linear(8, 1));
  convoy::nn::convert_sync_batchnorm(*net, world);  // the same parameters under the same names
  convoy::DistributedDataParallel model(net, world);
  torch::optim::SGD sgd(net->parameters(), 0.01);

  torch::manual_seed(world.rank());
  for (int step = 0; step < 10; ++step) {
    sgd.zero_grad();
    // Two samples a rank: too few for statistics of its own.
    model(torch::randn({2, 4})).pow(2).mean().backward();
    sgd.step();
  }
  if (world.rank() == 0) {
    std::cout << net
              << "\nrunning mean: " << net->named_buffers()["1.running_mean"].mean().item<double>()
              << "\n"
              << model.report() << std::endl;
  }
}
