// AdamW whose state and work are divided among the ranks, with a scheduler and clipping:
//
//   convoy run -n 2 sharded_optimizer
//
// Each rank prints how many of the model's numbers it updates, and how much state it keeps.
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  const auto world = convoy::init();
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(64, 512), torch::nn::ReLU(),
                            torch::nn::Linear(512, 512), torch::nn::ReLU(),
                            torch::nn::Linear(512, 1));
  convoy::DistributedDataParallel model(net, world);
  convoy::ShardedOptimizer<torch::optim::AdamW> optimizer(model.reducer(), 1e-3, {.max_norm = 1});
  torch::optim::StepLR schedule(optimizer, 20, 0.5);

  torch::manual_seed(1 + world.rank());  // every rank has data of its own
  double loss = 0;
  for (int step = 0; step < 60; ++step) {
    const auto input = torch::randn({32, 64});
    const auto error = (model(input) - input.mean(1, true)).pow(2).mean();
    error.backward();
    optimizer.step();  // gradients are undefined afterwards
    schedule.step();
    loss = error.item<double>();
  }
  std::int64_t all = 0;
  for (const auto& parameter : model->parameters()) all += parameter.numel();
  const auto stats = optimizer.stats();
  std::cout << "rank " << world.rank() << ": loss " << loss << "; it updates " << stats.numbers
            << " of " << all << " numbers, and keeps " << stats.state_bytes / 1024
            << " KiB of state of " << 8 * all / 1024 << std::endl;
}
