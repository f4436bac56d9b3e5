// Backward passes across two workers: one round of every case, as a line of JSON.
//
//   bench_autograd [quick]
//
// example, example_fast: the design document's: a call, a loss, backward, the gradients. mlp: half
// of a small network on each worker, one sample; mlp_local: the same in one process. calls_10,
// calls_10000: backward of a loss that uses 10 calls of a context that has so many.
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>

#include "calls.h"
#include "convoy/autograd.h"
#include "convoy/deadline.h"
#include "os/process.h"

namespace bench {

namespace autograd = convoy::autograd;
using convoy::rpc::Session;

at::Tensor my_add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
CONVOY_RPC(my_add);

struct HalfImpl : torch::nn::Module {
  HalfImpl(int in, int out)
      : first(register_module("first", torch::nn::Linear(in, 64))),
        second(register_module("second", torch::nn::Linear(64, out))) {}
  at::Tensor forward(const at::Tensor& x) { return second(torch::relu(first(x))); }
  torch::nn::Linear first, second;
};
TORCH_MODULE(Half);
Half& upper() {
  static Half half(64, 10);
  return half;
}
at::Tensor forward_upper(const at::Tensor& x) { return upper()(x); }
CONVOY_RPC(forward_upper);

namespace {

Session join(const std::string& folder, int rank) {
  return Session({.name = "worker" + std::to_string(rank),
                  .method = "file://" + folder + "/store",
                  .rank = rank,
                  .size = 2});
}

void example(const Session& session, autograd::Mode mode) {
  static const auto t1 = torch::rand({3, 3}, torch::requires_grad());
  static const auto t2 = torch::rand({3, 3}, torch::requires_grad());
  static const auto t4 = torch::rand({3, 3}, torch::requires_grad());
  const autograd::Context context(session);
  const auto t3 = session.rpc_sync<my_add>("worker1", t1, t2);
  const auto loss = (t3 * t4).sum();
  context.backward({loss}, {.mode = mode});
  if (context.gradients().size() != 3) std::abort();
}

void network(const Session* session) {
  static Half lower(32, 64);
  static const auto x = torch::rand({1, 32});
  const auto forward = [&] {
    const auto h = lower(x);
    return (session ? session->rpc_sync<forward_upper>("worker1", h) : forward_upper(h)).sum();
  };
  if (!session) {
    forward().backward();
    return;
  }
  const autograd::Context context(*session);
  context.backward({forward()});
}

// Backward alone, of 10 calls among so many.
template <class Repeat>
std::vector<double> among(const Session& session, int calls, Repeat repeat_passes) {
  const auto t = torch::rand({3, 3}, torch::requires_grad());
  const autograd::Context context(session);
  at::Tensor loss = torch::zeros({});
  for (int i = 0; i < calls; ++i) {
    const auto sum = session.rpc_sync<my_add>("worker1", t, t);
    if (i >= calls - 10) loss = loss + sum.sum();
  }
  return repeat_passes([&] { context.backward({loss}, {.retain_graph = true}); });
}

void run(const std::string& folder, const CallBudget& budget) {
  const Session session = join(folder, 0);
  Medians medians;
  const auto repeated = [&](const auto& once) {
    return repeat(budget, 3000, [&] {
      const auto start = Clock::now();
      once();
      return microseconds_since(start);
    });
  };
  medians.add("example", repeated([&] { example(session, autograd::Mode::kSmart); }));
  medians.add("example_fast", repeated([&] { example(session, autograd::Mode::kFast); }));
  medians.add("forward", repeated([&] {
                const autograd::Context context(session);
                session.rpc_sync<my_add>("worker1", torch::ones({3, 3}, torch::requires_grad()),
                                         torch::ones({3, 3}));
              }));
  medians.add("calls_1", among(session, 1, repeated));
  medians.add("mlp", repeated([&] { network(&session); }));
  medians.add("mlp_local", repeated([&] { network(nullptr); }));
  medians.add("calls_10", among(session, 10, repeated));
  medians.add("calls_10000", among(session, 10'000, repeated));
  medians.print();
  session.shutdown();
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  using namespace bench;
  torch::set_num_threads(1);
  const std::string first = argc > 1 ? argv[1] : "";
  if (first == "serve") {
    join(argv[2], 1).shutdown({.timeout = std::chrono::minutes(10)});
    return 0;
  }
  std::string folder = (std::getenv("TMPDIR") ? std::string(std::getenv("TMPDIR")) : "/tmp") +
                       "/convoy-bench-autograd.XXXXXX";
  if (!::mkdtemp(folder.data())) return 1;
  auto child = convoy::ChildProcess::spawn({.arguments = {"/proc/self/exe", "serve", folder}});
  run(folder, CallBudget::from(first));
  child.wait(convoy::Deadline::after(std::chrono::minutes(1)));
  ::unlink((folder + "/store").c_str());
  ::rmdir(folder.c_str());
  return 0;
}
