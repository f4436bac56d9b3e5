// Trains a small network in bf16 with parameters in f32, and the optimizer inside of backward:
//
//   convoy run -n 2 mixed_precision
//
// Forward and backward compute in 16 bits, the optimizer and checkpoints see 32.
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  const auto world = convoy::init();
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::GELU(), torch::nn::Linear(64, 64),
                            torch::nn::GELU(), torch::nn::Linear(64, 1));
  const convoy::MixedPrecision mixed{.param_dtype = torch::kBFloat16,
                                     .reduce_dtype = torch::kFloat};
  convoy::DistributedDataParallel model(net, world, {.mixed_precision = mixed});
  convoy::OptimizerInBackward optimizer(model.reducer(), convoy::AdamW{.lr = 1e-2},
                                        {.max_norm = 1});

  torch::manual_seed(100 + world.rank());  // each rank has data of its own
  for (int step = 1; step <= 200; ++step) {
    if (step == 150) optimizer.set_lr(1e-3);
    const auto x = torch::randn({64, 16});
    const auto target = torch::sin(x.sum(1, /*keepdim=*/true));
    const auto output = model(x);  // bf16
    const auto loss = torch::mse_loss(output.to(torch::kFloat), target);
    loss.backward();  // reduces in f32, clips, and updates the f32 parameters
    if (step % 50 != 0) continue;
    const auto mean = loss.detach();
    world.all_reduce(mean, {.op = convoy::ReduceOp::kAvg});
    if (world.rank() == 0) {
      std::cout << "step " << step << ": loss " << mean.item<float>() << ", norm of gradients "
                << optimizer.stats().norm << ", parameters are " << net->parameters()[0].dtype()
                << std::endl;
    }
  }
}
