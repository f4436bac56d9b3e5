// Trains a small network with DistributedDataParallel, and writes its weights at the end:
//
//   convoy run -n 2 train
//
// Without a launcher it is a group of one. docs/guide/getting_started.md goes through it line by
// line.
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  const auto world = convoy::init();  // convoy run, torchrun, mpirun, srun, or this process alone

  // The function to be learnt is y = sin(x1 + ... + x8). Every rank has all examples, in the same
  // order, and takes its own part of each batch.
  torch::manual_seed(0);
  const auto x = torch::randn({4096, 8});
  const auto y = torch::sin(x.sum(1, /*keepdim=*/true));
  const std::int64_t part = 64 / world.size();

  torch::nn::Sequential net(torch::nn::Linear(8, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  convoy::DistributedDataParallel model(net, world);  // rank 0's weights go to all ranks
  torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(1e-2));

  for (int epoch = 1; epoch <= 5; ++epoch) {
    auto sum = torch::zeros({2});
    for (const auto& batch : torch::randperm(x.size(0)).split(64)) {
      const auto mine = batch.slice(0, world.rank() * part, (world.rank() + 1) * part);
      adam.zero_grad();
      const auto loss = torch::mse_loss(model(x.index_select(0, mine)), y.index_select(0, mine));
      loss.backward();  // returns with the mean of all ranks' gradients
      adam.step();
      sum += torch::tensor({loss.item<float>(), 1.0F});
    }
    world.all_reduce(sum);  // what is printed is the loss of all ranks
    if (world.rank() == 0)
      std::cout << "epoch " << epoch << ": loss " << (sum[0] / sum[1]).item<float>() << std::endl;
  }
  if (world.rank() == 0) torch::save(model, "train.pt");  // loads into a bare `net` too
}
