// Workers call each other's functions.
//
//   convoy run -n 3 rpc
//
// Calls that wait, calls all at once, a coroutine that goes around twice, and an exception that
// comes back to the caller. docs/guide/rpc.md explains it.
#include <convoy/convoy.h>
#include <torch/types.h>

#include <iostream>

using namespace std::chrono_literals;
namespace rpc = convoy::rpc;

torch::Tensor my_add(const torch::Tensor& a, const torch::Tensor& b) { return a + b; }
CONVOY_RPC(my_add);

// Types of your own name their fields.
struct Summary {
  std::string worker;
  double mean = 0;
  std::vector<std::int64_t> sizes;
  CONVOY_FIELDS(worker, mean, sizes)
};
Summary summarize(const torch::Tensor& t) {
  if (t.numel() == 0) throw std::invalid_argument("cannot compute the mean of an empty tensor");
  return {rpc::current().session().worker_info().name, t.mean().item<double>(), t.sizes().vec()};
}
CONVOY_RPC(summarize);

// A coroutine: it holds no thread while it waits for others.
rpc::Future<torch::Tensor> add_on_the_way(torch::Tensor sum, int hops) {
  if (hops == 0) co_return sum;
  const auto session = rpc::current().session();
  const auto self = session.worker_info();
  const int next = (self.rank + 1) % session.size();
  co_return co_await session.rpc_async<add_on_the_way>(next, sum + self.rank, hops - 1);
}
CONVOY_RPC(add_on_the_way);

int main() {
  const rpc::Session session;  // torchrun, convoy run, mpirun, srun, or this process alone:
                               // "worker0", "worker1", ...
  if (session.worker_info().rank == 0) {
    const auto last = session.workers().back();
    const auto ones = torch::ones({2, 2});

    const auto sum = session.rpc_sync<my_add>(last, ones, ones);  // waits
    std::cout << "1 + 1 = " << sum[0][0].item<double>() << ", says " << last.name << std::endl;

    std::vector<rpc::Future<Summary>> summaries;  // all at once
    for (const auto& worker : session.workers()) {
      summaries.push_back(session.rpc_async<summarize>(worker, ones * worker.rank));
    }
    for (const auto& each : rpc::wait_all(summaries)) {
      std::cout << each.worker << ": mean " << each.mean << std::endl;
    }

    const auto around = session.to("worker0", {.timeout = 5s}).rpc_sync<add_on_the_way>(ones, 6);
    std::cout << "twice around: " << around[0][0].item<double>() << std::endl;

    try {
      session.rpc_sync<summarize>(last, torch::empty({0}));
    } catch (const rpc::RemoteError& error) {
      std::cout << error.worker() << " threw " << error.remote_type() << ": " << error.what()
                << std::endl;
    }
  }
  session.shutdown();  // waits until no worker has calls under way
}
