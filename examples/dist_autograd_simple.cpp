// Gradients across two workers: the first example of PyTorch's design of distributed autograd.
//
//   convoy run -n 2 dist_autograd_simple
//
// It prints the gradients beside those of one process, and what was recorded.
// docs/guide/autograd.md explains it.
#include <convoy/convoy.h>
#include <torch/types.h>

#include <iostream>

namespace autograd = convoy::autograd;
namespace rpc = convoy::rpc;

torch::Tensor my_add(const torch::Tensor& t1, const torch::Tensor& t2) { return t1 + t2; }
CONVOY_RPC(my_add);

int main() {
  const rpc::Session session;
  if (session.worker_info().rank == 0) {
    torch::manual_seed(1);
    const auto t1 = torch::rand({3, 3}, torch::requires_grad());
    const auto t2 = torch::rand({3, 3}, torch::requires_grad());
    const auto t4 = torch::rand({3, 3}, torch::requires_grad());
    const int other = session.size() - 1;

    const autograd::Context context(session);  // calls are recorded from here on
    const auto t3 = session.rpc_sync<my_add>(other, t1, t2);
    const auto loss = (t3 * t4).sum();
    context.backward({loss});
    const auto gradients = context.gradients();  // .grad is untouched

    // The same in one process.
    (my_add(t1, t2) * t4).sum().backward();
    int number = 0;
    bool equal = true;
    for (const auto& t : {t1, t2, t4}) {
      equal = equal && torch::equal(gradients.at(t), t.grad());
      std::cout << "t" << (++number == 3 ? 4 : number) << ", over two workers:\n"
                << gradients.at(t) << "\nin one process:\n"
                << t.grad() << std::endl;
    }
    std::cout << (equal ? "the same" : "NOT the same") << std::endl;
    std::cout << context.dump() << std::endl;
  }
  session.shutdown();
}
