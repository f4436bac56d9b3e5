// One agent, many observers: each observer plays in a world of its own and asks the agent what to
// do. The agent answers all of them by one pass of its policy (batched in the handler).
//
//   convoy run -n 4 rl_agents
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <cmath>
#include <iostream>
#include <map>
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
  void learn(const std::vector<std::vector<double>>& rewards) {
    const std::scoped_lock lock(mutex_);
    std::vector<torch::Tensor> log_probabilities;
    std::vector<double> returns;
    for (std::size_t observer = 0; observer < rewards.size(); ++observer) {
      double after = 0;
      for (std::size_t step = rewards[observer].size(); step-- > 0;) {
        after = rewards[observer][step] + 0.5 * after;
        returns.push_back(after);
        log_probabilities.push_back(taken_[static_cast<int>(observer)][step]);
      }
    }
    auto gain = torch::tensor(returns);
    gain = (gain - gain.mean()) / (gain.std() + 1e-6);
    optimizer_.zero_grad();
    (-torch::stack(log_probabilities) * gain).mean().backward();
    optimizer_.step();
    taken_.clear();
  }

 private:
  void act_for_all() {
    const auto log_probabilities = torch::log_softmax(policy_->forward(torch::stack(states_)), 1);
    const auto actions = log_probabilities.exp().detach().multinomial(1).squeeze(1);
    for (std::size_t i = 0; i < answers_.size(); ++i) {
      const int action = actions[static_cast<std::int64_t>(i)].item<int>();
      taken_[who_[i]].push_back(log_probabilities[static_cast<std::int64_t>(i)][action]);
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
  std::map<int, std::vector<torch::Tensor>> taken_;  // since it has learned, by observer
};
CONVOY_RPC(&Agent::act);

// A ball on a line; a push to the left or to the right. The farther from the middle, the worse.
std::vector<double> play(int observer, const convoy::RRef<std::shared_ptr<Agent>>& agent,
                         int steps) {
  double place = observer % 2 == 0 ? 1.0 : -1.0;
  std::vector<double> rewards;
  for (int i = 0; i < steps; ++i) {
    const int action = agent.rpc_sync<&Agent::act>(observer, torch::tensor({place, 1.0}));
    place += action == 0 ? -0.3 : 0.3;
    rewards.push_back(-std::abs(place));
  }
  return rewards;
}
CONVOY_RPC(play);

// Of all games, the mean distance from the middle.
double distance_of(const std::vector<std::vector<double>>& rewards) {
  double sum = 0;
  for (const auto& game : rewards) {
    for (const double reward : game) sum -= reward / static_cast<double>(game.size());
  }
  return sum / static_cast<double>(rewards.size());
}

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
      const auto rewards = rpc::wait_all(games);
      last = distance_of(rewards);
      if (episode == 0) first = last;
      agent->learn(rewards);
    }
    std::cout << "distance at first: " << first << ", in the end: " << last << std::endl;
    std::cout << (last < first / 2 ? "the agent has learned" : "the agent has learned nothing")
              << std::endl;
  }
  session.shutdown();
}
