// Asynchronous SGD: a server has the model; trainers come, train it by distributed autograd and a
// distributed optimizer, each in its own time, and go when they like.
//
//   convoy run -n 4 parameter_server
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <string>
#include <vector>

using namespace std::chrono_literals;
namespace autograd = convoy::autograd;
namespace rpc = convoy::rpc;

// y = 3x - 2 is to be learnt, by the squares of the errors.
torch::Tensor loss_of(const torch::Tensor& x, const torch::Tensor& y) {
  return (y - (3 * x - 2)).square().mean();
}
torch::nn::Linear make_model() {
  torch::manual_seed(0);
  return torch::nn::Linear(1, 1);
}

// It lives on one worker; others call it through references.
class ParameterServer {
 public:
  ParameterServer(const rpc::Session& session, int trainers) : left_(trainers) {
    for (const auto& parameter : model_->parameters()) {
      parameters_.push_back(session.rref(parameter));
    }
  }

  torch::Tensor forward(const torch::Tensor& x) { return model_(x); }
  std::vector<convoy::RRef<torch::Tensor>> parameters() { return parameters_; }
  void has_trained() {
    const std::scoped_lock lock(mutex_);
    if (--left_ == 0) done_.set_value();
  }
  rpc::Future<void> done() const { return done_.future(); }
  const torch::nn::Linear& model() const { return model_; }

 private:
  torch::nn::Linear model_ = make_model();
  std::vector<convoy::RRef<torch::Tensor>> parameters_;
  std::mutex mutex_;
  int left_;
  rpc::Promise<void> done_;
};
using Server = std::shared_ptr<ParameterServer>;
CONVOY_RPC(&ParameterServer::forward);
CONVOY_RPC(&ParameterServer::parameters);
CONVOY_RPC(&ParameterServer::has_trained);

// How trainers find it.
convoy::RRef<Server> the_server;
convoy::RRef<Server> find_server() { return the_server; }
CONVOY_RPC(find_server);

constexpr int kSteps = 100;
const convoy::Sgd kRule{.lr = 0.05};

void train(int rank) {
  torch::manual_seed(rank);
  // Half of the steps, then it goes, and comes back: the others do not care.
  for (int turn = 0; turn < 2; ++turn) {
    const rpc::Session session(
        {.name = "trainer-" + std::to_string(rank), .members = rpc::Members::kComeAndGo});
    session.wait_for("server", 60s);
    const auto server = session.rpc_sync<find_server>("server");
    const convoy::DistributedOptimizer optimizer(
        session, server.rpc_sync<&ParameterServer::parameters>(), kRule);
    for (int step = 0; step < kSteps / 2; ++step) {
      const autograd::Context context(session);
      const auto x = torch::randn({32, 1});
      const auto loss = loss_of(x, server.rpc_sync<&ParameterServer::forward>(x));
      context.backward({loss});
      optimizer.step(context);  // at the server; those of all trainers take turns
    }
    if (turn == 1) server.rpc_sync<&ParameterServer::has_trained>();
    session.shutdown();
  }
}

// The same number of steps in one process.
torch::nn::Linear train_alone(int steps) {
  auto model = make_model();
  torch::optim::SGD optimizer(model->parameters(), kRule.lr);
  for (int step = 0; step < steps; ++step) {
    const auto x = torch::randn({32, 1});
    optimizer.zero_grad();
    loss_of(x, model(x)).backward();
    optimizer.step();
  }
  return model;
}

void serve(int trainers) {
  const rpc::Session session({.name = "server", .members = rpc::Members::kComeAndGo});
  session.on_change([](const rpc::View& view) {
    for (const auto& who : view.joined) std::cout << who.name << " is here\n" << std::flush;
    for (const auto& who : view.left) std::cout << who.name << " has left\n" << std::flush;
  });
  const auto server = std::make_shared<ParameterServer>(session, trainers);
  the_server = session.rref(server);
  server->done().wait(60s);
  const auto show = [x = torch::randn({1000, 1})](const std::string& where,
                                                  torch::nn::Linear model) {
    const double loss = loss_of(x, model(x)).item<double>();
    std::cout << where << ": y = " << std::round(model->weight.item<double>()) << " x + "
              << std::round(model->bias.item<double>()) << ", loss " << loss << std::endl;
    return loss;
  };
  const double here = show("with " + std::to_string(trainers) + " trainers", server->model());
  const double alone = show("in one process", train_alone(trainers * kSteps));
  std::cout << (std::abs(here - alone) < 1e-4 ? "the same loss" : "NOT the same loss") << std::endl;
  the_server = {};
  session.shutdown();  // when no trainer refers to it any more
}

int main() {
  const int rank = std::atoi(std::getenv("RANK"));
  const int trainers = std::atoi(std::getenv("WORLD_SIZE")) - 1;
  rank == 0 ? serve(trainers) : train(rank);
}
