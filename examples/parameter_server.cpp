// Asynchronous SGD: a server has the weights; trainers come, pull, push, and go when they like.
//
//   convoy run -n 4 parameter_server
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <mutex>

using namespace std::chrono_literals;
namespace rpc = convoy::rpc;

// It lives on one worker; others call it through references.
class ParameterServer {
 public:
  explicit ParameterServer(int updates) : left_(updates) {}

  torch::Tensor pull() {
    const std::scoped_lock lock(mutex_);
    return weights_.clone();
  }
  void push(const torch::Tensor& gradient) {
    const std::scoped_lock lock(mutex_);
    weights_ -= 0.05 * gradient;
    if (--left_ == 0) done_.set_value();
  }
  rpc::Future<void> done() const { return done_.future(); }

 private:
  std::mutex mutex_;
  torch::Tensor weights_ = torch::zeros({2});
  int left_;
  rpc::Promise<void> done_;
};
using Server = std::shared_ptr<ParameterServer>;
CONVOY_RPC(&ParameterServer::pull);
CONVOY_RPC(&ParameterServer::push);

// How trainers find it.
constexpr int kSteps = 100;
convoy::RRef<Server> the_server;
convoy::RRef<Server> find_server() { return the_server; }
CONVOY_RPC(find_server);

// y = 3x - 2, by the squares of the errors.
torch::Tensor gradient_of(const torch::Tensor& weights) {
  auto w = weights.clone().requires_grad_();
  const auto x = torch::randn({32});
  const auto loss = (w[0] * x + w[1] - (3 * x - 2)).square().mean();
  loss.backward();
  return w.grad();
}

void serve(int trainers) {
  const rpc::Session session({.name = "server", .members = rpc::Members::kComeAndGo});
  session.on_change([](const rpc::View& view) {
    for (const auto& who : view.joined) std::cout << who.name << " is here\n" << std::flush;
    for (const auto& who : view.left) std::cout << who.name << " has left\n" << std::flush;
  });
  const auto server = std::make_shared<ParameterServer>(trainers * kSteps);
  the_server = session.rref(server);
  server->done().wait(60s);
  const auto weights = server->pull();
  std::cout << "y = " << std::round(weights[0].item<double>()) << " x + "
            << std::round(weights[1].item<double>()) << std::endl;
  the_server = {};
  session.shutdown();  // when no trainer refers to it any more
}

void train(int rank) {
  torch::manual_seed(rank);
  // Half of the steps, then it goes, and comes back: the others do not care.
  for (int turn = 0; turn < 2; ++turn) {
    const rpc::Session session(
        {.name = "trainer-" + std::to_string(rank), .members = rpc::Members::kComeAndGo});
    session.wait_for("server", 60s);
    const auto server = session.rpc_sync<find_server>("server");
    for (int step = 0; step < kSteps / 2; ++step) {
      const auto weights = server.rpc_sync<&ParameterServer::pull>();
      server.rpc_sync<&ParameterServer::push>(gradient_of(weights));
    }
    session.shutdown();
  }
}

int main() {
  const int rank = std::atoi(std::getenv("RANK"));
  const int trainers = std::atoi(std::getenv("WORLD_SIZE")) - 1;
  rank == 0 ? serve(trainers) : train(rank);
}
