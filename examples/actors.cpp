// Actors fill trajectories, a learner trains on them and publishes its weights; one of the actors
// is killed, and started again.
//
//   actors                                            actors in C++
//   actors python3 examples/python/actors.py          actors in Python
#include <convoy/convoy.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cmath>
#include <iostream>

namespace {

constexpr int kActors = 3, kSteps = 64, kUpdates = 400;

// Of two numbers, which is the larger?
struct PolicyImpl : torch::nn::Module {
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(2, 16));
  torch::nn::Linear output = register_module("output", torch::nn::Linear(16, 2));
  torch::Tensor forward(const torch::Tensor& states) { return output(hidden(states).tanh()); }
};
TORCH_MODULE(Policy);

using Weights = convoy::share::Published<Policy>;

convoy::Deadline in_a_minute() { return convoy::Deadline::after(std::chrono::minutes(1)); }

// In each actor's process, until the learner closes the slots.
void act(int /*index*/, const convoy::share::Slots& slots, const Weights& weights) {
  torch::NoGradGuard no_gradients;
  torch::manual_seed(static_cast<std::uint64_t>(::getpid()));
  Policy policy;
  while (auto slot = slots.fill(in_a_minute())) {
    const auto version = weights.load_into(policy);  // the newest, whole
    const auto states = torch::rand({kSteps, 2});
    const auto actions = policy(states).softmax(1).multinomial(1).squeeze(1);
    slot["states"].copy_(states);
    slot["actions"].copy_(actions);
    slot["rewards"].copy_(actions == states.argmax(1));
    slot["version"].fill_(static_cast<std::int64_t>(version));
    slot.commit();
  }
}

torch::Tensor loss_of(Policy& policy, const convoy::share::Slot& slot) {
  const auto chosen =
      policy(slot["states"]).log_softmax(1).gather(1, slot["actions"].unsqueeze(1)).squeeze(1);
  return -(chosen * (slot["rewards"] - 0.5)).mean();
}

}  // namespace

int main(int argc, char** argv) {
  convoy::start(argc, argv);  // an actor's process runs act() here, and ends

  Policy policy;
  torch::optim::Adam adam(policy->parameters(), 0.01);
  const Weights weights(policy, {.buffers = kActors + 2});
  const convoy::share::Slots slots(2 * kActors, {{"states", {kSteps, 2}},
                                                 {"actions", {kSteps}, torch::kLong},
                                                 {"rewards", {kSteps}},
                                                 {"version", {}, torch::kLong}});
  const std::vector<std::string> python(argv + 1, argv + argc);
  auto actors = python.empty() ? convoy::spawn<act>(kActors, slots, weights)
                               : convoy::start_processes(python, {.count = kActors},
                                                         {slots.handle(), weights.handle()});

  double reward = 0.5, behind = 0;
  for (int update = 1; update <= kUpdates; ++update) {
    const auto slot = slots.next(in_a_minute());
    adam.zero_grad();
    loss_of(policy, slot).backward();
    adam.step();
    reward += 0.05 * (slot["rewards"].mean().item<double>() - reward);
    const auto version = static_cast<std::uint64_t>(slot["version"].item<std::int64_t>());
    behind += static_cast<double>(weights.version() - version) / kUpdates;
    weights.publish(policy);

    if (update == kUpdates / 4) ::kill(actors.pids()[1], SIGKILL);
    for (const auto& failure : actors.restart_failed()) {
      std::cout << "update " << update << ": " << failure.to_string() << "; started again"
                << std::endl;
    }
  }
  slots.close();
  actors.join(std::chrono::minutes(1));
  std::cout << kUpdates << " updates from " << kActors << " actors, reward "
            << std::round(100 * reward) / 100 << ", weights " << std::round(10 * behind) / 10
            << " versions old" << std::endl;
  return reward > 0.8 ? 0 : 1;
}
