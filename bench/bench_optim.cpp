// Steps of parameters on four other workers: one round of every case, as a line of JSON.
//
//   bench_optim [quick]
//
// step: SGD of a parameter of 3 x 3 at each of four owners, with gradients that are there. apart: a
// small loss over them, backward, and then the step; together: the same with the step in backward.
// apart_1, together_1: with one owner.
#include <torch/torch.h>

#include <cstdlib>

#include "calls.h"
#include "convoy/autograd.h"
#include "convoy/distributed_optimizer.h"
#include "workers.h"

namespace bench {

namespace autograd = convoy::autograd;
using convoy::DistributedOptimizer;
using convoy::RRef;
using convoy::rpc::Session;

constexpr int kOwners = 4;

at::Tensor make_weight() { return torch::rand({3, 3}, torch::requires_grad()); }
CONVOY_RPC(make_weight);
at::Tensor times(const RRef<at::Tensor>& weight, const at::Tensor& x) {
  return weight.local_value().mm(x);
}
CONVOY_RPC(times);

namespace {

Session join(const std::string& folder, int rank) {
  return Session({.name = "worker" + std::to_string(rank),
                  .method = "file://" + folder + "/store",
                  .rank = rank,
                  .size = kOwners + 1});
}

class Model {
 public:
  Model(const Session& session, int owners) : session_(session) {
    for (int owner = 1; owner <= owners; ++owner) {
      weights_.push_back(session.remote<make_weight>(owner));
    }
    optimizer_.emplace(session, weights_, convoy::Sgd{.lr = 1e-6});
  }
  at::Tensor loss() const {
    std::vector<convoy::rpc::Future<at::Tensor>> parts;
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      parts.push_back(session_.rpc_async<times>(static_cast<int>(i) + 1, weights_[i], x_));
    }
    at::Tensor sum = torch::zeros({});
    for (auto& part : parts) sum = sum + part.wait().sum();
    return sum;
  }
  const DistributedOptimizer& optimizer() const { return *optimizer_; }

 private:
  const Session& session_;
  std::vector<RRef<at::Tensor>> weights_;
  std::optional<DistributedOptimizer> optimizer_;
  const at::Tensor x_ = torch::rand({3, 3});
};

// Of backward and step alone; the forward is not counted.
template <class Function>
double timed_pass(const Session& session, const Model& model, Function pass) {
  const autograd::Context context(session);
  const auto loss = model.loss();
  const auto start = Clock::now();
  pass(context, loss);
  return microseconds_since(start);
}

void run(const std::string& folder, const CallBudget& budget) {
  const Session session = join(folder, 0);
  Medians medians;
  for (const int owners : {kOwners, 1}) {
    const Model model(session, owners);
    const std::string name = owners == 1 ? "_1" : "";
    {
      const autograd::Context context(session);
      context.backward({model.loss()});
      medians.add("step" + name, repeat(budget, 3000, [&] {
                    const auto start = Clock::now();
                    model.optimizer().step(context);
                    return microseconds_since(start);
                  }));
    }
    medians.add("apart" + name, repeat(budget, 3000, [&] {
                  return timed_pass(session, model, [&](const auto& context, const auto& loss) {
                    context.backward({loss});
                    model.optimizer().step(context);
                  });
                }));
    medians.add("together" + name, repeat(budget, 3000, [&] {
                  return timed_pass(session, model, [&](const auto& context, const auto& loss) {
                    context.backward({loss}, {.optimizers = {model.optimizer().in_backward()}});
                  });
                }));
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
  const RunFolder folder("optim");
  Workers owners(folder, 1 + kOwners);
  run(folder.path(), CallBudget::from(first));
  owners.wait();
  return 0;
}
