// Saves the state of a training and resumes from it, with any number of ranks:
//
//   convoy run -n 2 checkpoint        20 steps from the beginning
//   convoy run -n 3 checkpoint        20 more from checkpoint.model and checkpoint.adam
//
// docs/guide/checkpoints.md explains it.
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <filesystem>
#include <iostream>

namespace fs = std::filesystem;

// One rank writes: all have the same weights. A crash leaves the old file or the new one.
template <class Value>
void save(const Value& value, const std::string& path) {
  torch::save(value, path + ".new");
  fs::rename(path + ".new", path);
}

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : "checkpoint";
  const auto world = convoy::init();
  torch::manual_seed(world.rank());
  torch::nn::Linear net(4, 1);
  const bool resumes = fs::exists(path + ".adam");
  if (resumes) torch::load(net, path + ".model");
  convoy::DistributedDataParallel model(net, world);  // rank 0's weights go to all ranks
  torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(0.05));
  if (resumes) torch::load(adam, path + ".adam");  // every rank: its state is not broadcast
  world.barrier();                                 // no rank writes while others still read

  float loss = 0;
  for (int step = 0; step < 20; ++step) {
    const auto x = torch::randn({64, 4});
    adam.zero_grad();
    const auto error = torch::mse_loss(model(x), x.sum(1, /*keepdim=*/true));
    error.backward();
    adam.step();
    loss = error.item<float>();
  }
  if (world.rank() == 0) {
    save(model, path + ".model");
    save(adam, path + ".adam");  // last: a checkpoint is complete if this file is there
    std::cout << (resumes ? "resumed" : "started") << ", loss " << loss << std::endl;
  }
}
