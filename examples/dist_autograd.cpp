// The end-to-end example of PyTorch's design of distributed autograd: each of two workers makes
// tensors on the other one, computes a loss from them, runs the backward pass over both workers and
// lets a distributed optimizer step the tensors where they are.
//
//   convoy run -n 2 dist_autograd
//
// or, in two shells, with RANK=0 and RANK=1:
//
//   MASTER_ADDR=localhost MASTER_PORT=29500 WORLD_SIZE=2 RANK=0 dist_autograd
#include <convoy/convoy.h>
#include <torch/types.h>

#include <iostream>

namespace autograd = convoy::autograd;
namespace rpc = convoy::rpc;

torch::Tensor random_tensor() { return torch::rand({3, 3}, torch::requires_grad()); }
CONVOY_RPC(random_tensor);
torch::Tensor my_add(const torch::Tensor& t1, const torch::Tensor& t2) { return t1 + t2; }
CONVOY_RPC(my_add);

int main() {
  const rpc::Session session;
  const auto me = session.worker_info();
  const int other = (me.rank + 1) % session.size();
  {
    const autograd::Context context(session);
    // Forward: references to tensors of the other worker, and a sum that it computes.
    const auto rref1 = session.remote<random_tensor>(other);
    const auto rref2 = session.remote<random_tensor>(other);
    const auto before = rref1.to_here();
    const auto sum = session.rpc_sync<my_add>(other, before, rref2.to_here());
    const auto loss = sum.sum();

    // Backward, over both workers.
    context.backward({loss});

    // The step, at the owner.
    const convoy::DistributedOptimizer optimizer(session, {rref1, rref2}, convoy::Sgd{.lr = 0.05});
    optimizer.step(context);

    const auto after = rref1.to_here();
    const bool right = torch::allclose(after, before - 0.05);  // the gradient is one
    std::cout << me.name << ": loss " << loss.item<double>() << ", after a step "
              << my_add(after, rref2.to_here()).sum().item<double>()
              << (right ? ", as in one process\n" : ", NOT as in one process\n") << std::flush;
  }
  session.shutdown();
}
