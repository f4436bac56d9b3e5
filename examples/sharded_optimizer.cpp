// AdamW of which each rank keeps and does its part, with a scheduler and clipping.
//
//   convoy run -n 2 sharded_optimizer
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  const auto world = convoy::init();
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(64, 512), torch::nn::ReLU(),
                            torch::nn::Linear(512, 1));
  convoy::DistributedDataParallel model(net, world);
  convoy::ShardedOptimizer<torch::optim::AdamW> optimizer(model.reducer(), 3e-3, {.max_norm = 1});
  torch::optim::StepLR schedule(optimizer, 20, 0.5);

  double loss = 0;
  for (int step = 0; step < 60; ++step) {
    const auto input = torch::randn({32, 64});
    const auto error = (model(input) - input.mean(1, true)).pow(2).mean();
    error.backward();
    optimizer.step();  // gradients are undefined afterwards
    schedule.step();
    loss = error.item<double>();
  }
  const auto stats = optimizer.stats();
  std::cout << "rank " << world.rank() << ": loss " << loss << ", " << stats.numbers
            << " numbers and " << stats.state_bytes << " bytes of state are its own" << std::endl;
}
