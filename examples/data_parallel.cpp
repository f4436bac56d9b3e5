// Data parallel training with a data loader, accumulated gradients and an evaluation:
//
//   convoy run -n 2 data_parallel
//
// Each rank reads its own part of the data. An update sums up the gradients of four batches, which
// are exchanged once. docs/guide/data_parallel.md explains it.
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <iostream>

namespace data = torch::data;

// Example i: eight numbers, and the sine of their sum. A real one would read files here.
struct Waves : data::datasets::Dataset<Waves> {
  data::Example<> get(std::size_t i) override { return {x[i], y[i]}; }
  std::optional<std::size_t> size() const override { return x.size(0); }

  torch::Tensor x = torch::randn({2048, 8});
  torch::Tensor y = torch::sin(x.sum(1, /*keepdim=*/true));
};

int main() {
  constexpr int kAccumulate = 4;
  const auto world = convoy::init();
  torch::manual_seed(0);
  Waves waves;
  torch::nn::Sequential net(torch::nn::Linear(8, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  convoy::DistributedDataParallel model(net, world, {.bucket_cap_mb = 25});
  torch::optim::AdamW adam(model->parameters(), torch::optim::AdamWOptions(1e-2));
  data::samplers::DistributedRandomSampler sampler(waves.x.size(0), world.size(), world.rank());

  for (int epoch = 1; epoch <= 10; ++epoch) {
    sampler.set_epoch(epoch);  // another order, the same on all ranks
    auto loader = data::make_data_loader(waves.map(data::transforms::Stack<>()), sampler, 16);
    int batches = 0;
    for (const auto& batch : *loader) {
      const bool last = ++batches % kAccumulate == 0;
      const auto scope = model.no_sync(!last);  // communicates only in the last of four backwards
      (torch::mse_loss(model(batch.data), batch.target) / kAccumulate).backward();
      if (!last) continue;
      torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
      adam.step();
      adam.zero_grad();
    }
  }

  const torch::NoGradGuard no_gradients;  // forward does not communicate
  model->eval();
  const auto mine = torch::arange(world.rank(), waves.x.size(0), world.size());
  auto loss = torch::mse_loss(model(waves.x.index({mine})), waves.y.index({mine}));
  world.all_reduce(loss, {.op = convoy::ReduceOp::kAvg});
  if (world.rank() == 0) {
    std::cout << "loss " << loss.item<float>() << " on " << world.size() << " ranks" << std::endl;
  }
  return loss.item<float>() < 0.4 ? 0 : 1;
}
