// Backward passes across workers: one round of every case, as a line of JSON.
//
//   bench_autograd [quick | case]
//
// example, example_fast: the design document's: a call, a loss, backward, the gradients. forward:
// a call in a context; call: the same without one. mlp: half of a small network on each of two
// workers, one sample; mlp_local: the same in one process. mlp_forward, mlp_forward_plain: its
// forward pass, with lineages and without. chain, chain_fast: a call through four workers, forward
// and backward. calls_10, calls_10000: backward of a loss that uses 10 calls of a context that has
// so many. Cases that are compared take turns.
#include <torch/torch.h>

#include <cstdlib>

#include "autograd/lineage.h"
#include "calls.h"
#include "convoy/autograd.h"
#include "workers.h"

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

// Times a parameter of each worker on the way, `calls` workers further.
at::Tensor relay(const at::Tensor& x, int calls) {
  static const auto weight = torch::rand({3, 3}, torch::requires_grad());
  auto y = x * weight;
  if (calls == 0) return y;
  const auto session = convoy::rpc::current().session();
  const int next = session.worker_info().rank + 1;
  return session.rpc_sync<relay>(next, y, calls - 1) * weight;
}
CONVOY_RPC(relay);

void have_lineages(bool have) {
  autograd::detail::set_most_upstream(have ? autograd::detail::Lineage::kMost : 0);
}
CONVOY_RPC(have_lineages);

namespace {

constexpr int kWorkers = 4;

Session join(const std::string& folder, int rank) {
  return Session({.name = "worker" + std::to_string(rank),
                  .method = "file://" + folder + "/store",
                  .rank = rank,
                  .size = kWorkers});
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

at::Tensor forward_network(const Session* session) {
  static Half lower(32, 64);
  static const auto x = torch::rand({1, 32});
  const auto h = lower(x);
  return (session ? session->rpc_sync<forward_upper>("worker1", h) : forward_upper(h)).sum();
}

void network(const Session* session) {
  if (!session) {
    forward_network(nullptr).backward();
    return;
  }
  const autograd::Context context(*session);
  context.backward({forward_network(session)});
}

void chain(const Session& session, autograd::Mode mode) {
  static const auto x = torch::rand({3, 3}, torch::requires_grad());
  const autograd::Context context(session);
  const auto loss = session.rpc_sync<relay>("worker1", x, kWorkers - 2).sum();
  context.backward({loss}, {.mode = mode});
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

// What is compared takes turns.
template <class First, class Second>
void add_both(Medians& medians, const CallBudget& budget, const std::string& first,
              const std::string& second, First once, Second other) {
  if (!budget.wants(first) && !budget.wants(second)) return;
  std::vector<double> seconds;
  const auto time = [](const auto& what) {
    const auto start = Clock::now();
    what();
    return microseconds_since(start);
  };
  medians.add(first, repeat(budget, 6000, [&] {
                seconds.push_back(time(other));
                return time(once);
              }));
  medians.add(second, seconds);
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
  const auto add = [&](const std::string& name, const auto& once) {
    if (budget.wants(name)) medians.add(name, repeated(once));
  };
  using autograd::Mode;
  add_both(
      medians, budget, "example", "example_fast", [&] { example(session, Mode::kSmart); },
      [&] { example(session, Mode::kFast); });
  const auto one = torch::ones({3, 3});
  add("forward", [&] {
    const autograd::Context context(session);
    session.rpc_sync<my_add>("worker1", torch::ones({3, 3}, torch::requires_grad()), one);
  });
  add("call", [&] { session.rpc_sync<my_add>("worker1", one, one); });
  if (budget.wants("calls_1")) medians.add("calls_1", among(session, 1, repeated));
  add("mlp", [&] { network(&session); });
  add("mlp_local", [&] { network(nullptr); });
  // Ten at a time: both workers are told.
  const auto forward = [&](bool lineages) {
    have_lineages(lineages);
    session.rpc_sync<have_lineages>("worker1", lineages);
    return [&session] {
      for (int i = 0; i < 10; ++i) {
        const autograd::Context context(session);
        forward_network(&session);
      }
    };
  };
  add_both(
      medians, budget, "mlp_forward", "mlp_forward_plain", [&] { forward(true)(); },
      [&] { forward(false)(); });
  have_lineages(true);
  session.rpc_sync<have_lineages>("worker1", true);
  add_both(
      medians, budget, "chain", "chain_fast", [&] { chain(session, Mode::kSmart); },
      [&] { chain(session, Mode::kFast); });
  for (const int calls : {10, 10'000}) {
    const std::string name = "calls_" + std::to_string(calls);
    if (budget.wants(name)) medians.add(name, among(session, calls, repeated));
  }
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
    join(argv[2], std::atoi(argv[3])).shutdown({.timeout = std::chrono::minutes(10)});
    return 0;
  }
  const RunFolder folder("autograd");
  Workers others(folder, kWorkers);
  run(folder.path(), CallBudget::from(first));
  others.wait();
  return 0;
}
