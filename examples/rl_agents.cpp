// One agent, many observers: each observer plays in a world of its own and asks the agent what to
// do. The agent answers all of them by one pass of its policy (batched in the handler).
//
//   convoy run -n 4 rl_agents
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <iostream>
#include <mutex>

namespace rpc = convoy::rpc;

class Agent {
 public:
  explicit Agent(int observers) : observers_(observers) {}

  // Called by every observer. The future ends when all have asked: callers wait, no thread does.
  rpc::Future<int> act(int observer, const torch::Tensor& state) {
    const std::scoped_lock lock(mutex_);
    states_.push_back(state);
    who_.push_back(observer);
    answers_.emplace_back();
    auto mine = answers_.back().future();
    if (static_cast<int>(answers_.size()) == observers_) act_for_all();
    return mine;
  }

  // REINFORCE: what was followed by more than the average is made likelier.
  double learn(const std::vector<std::vector<double>>& rewards) {
    const std::scoped_lock lock(mutex_);
    std::vector<torch::Tensor> terms;
    double sum = 0;
    double best = 0;
    for (const auto& of_one : rewards) {
      for (const double reward : of_one) sum += reward;
      best += static_cast<double>(of_one.size());
    }
    for (const auto& [observer, log_probability] : taken_) {
      double total = 0;
      for (const double reward : rewards[static_cast<std::size_t>(observer)]) total += reward;
      terms.push_back(-log_probability * (total - sum / static_cast<double>(rewards.size())));
    }
    optimizer_.zero_grad();
    torch::stack(terms).mean().backward();
    optimizer_.step();
    taken_.clear();
    return sum / best;
  }

 private:
  void act_for_all() {
    const auto log_probabilities = torch::log_softmax(policy_->forward(torch::stack(states_)), 1);
    const auto actions = log_probabilities.exp().detach().multinomial(1).squeeze(1);
    for (std::size_t i = 0; i < answers_.size(); ++i) {
      const int action = actions[static_cast<std::int64_t>(i)].item<int>();
      taken_.emplace_back(who_[i], log_probabilities[static_cast<std::int64_t>(i)][action]);
      answers_[i].set_value(action);
    }
    states_.clear();
    who_.clear();
    answers_.clear();
  }

  const int observers_;
  std::mutex mutex_;
  torch::nn::Linear policy_{2, 2};
  torch::optim::Adam optimizer_{policy_->parameters(), 0.1};
  std::vector<torch::Tensor> states_;
  std::vector<int> who_;
  std::vector<rpc::Promise<int>> answers_;
  std::vector<std::pair<int, torch::Tensor>> taken_;  // since it has learned
};
CONVOY_RPC(&Agent::act);

// A ball on a line; a push to the left or to the right. A reward of 1 for each step near the
// middle.
std::vector<double> play(int observer, const convoy::RRef<std::shared_ptr<Agent>>& agent,
                         int steps) {
  double place = observer % 2 == 0 ? 1.0 : -1.0;
  std::vector<double> rewards;
  for (int i = 0; i < steps; ++i) {
    const int action = agent.rpc_sync<&Agent::act>(observer, torch::tensor({place, 1.0}));
    place += action == 0 ? -0.3 : 0.3;
    rewards.push_back(std::abs(place) < 0.7 ? 1 : 0);
  }
  return rewards;
}
CONVOY_RPC(play);

int main() {
  torch::manual_seed(1);
  const rpc::Session session;
  if (session.worker_info().rank == 0) {
    const int observers = session.size() - 1;
    const auto agent = std::make_shared<Agent>(observers);
    const auto reference = session.rref(agent);
    double first = 0;
    double last = 0;
    for (int episode = 0; episode < 40; ++episode) {
      std::vector<rpc::Future<std::vector<double>>> games;
      for (int i = 0; i < observers; ++i) {
        games.push_back(session.rpc_async<play>(i + 1, i, reference, 20));
      }
      last = agent->learn(rpc::wait_all(games));
      if (episode == 0) first = last;
    }
    std::cout << "in the middle at first: " << first << ", in the end: " << last << std::endl;
    std::cout << (last > first ? "the agent has learned" : "the agent has learned nothing")
              << std::endl;
  }
  session.shutdown();
}
