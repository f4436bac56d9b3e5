// Training that survives the loss of a member every 20 steps. The parent kills one of three members
// and starts another in its place, 19 times in 400 steps. The loss follows that of an undisturbed
// run.
//
//   elastic [steps]
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iomanip>
#include <iostream>

namespace {

using namespace std::chrono_literals;

constexpr int kMembers = 3;
constexpr std::uint64_t kEvery = 20;
constexpr int kBatch = 24;  // of all members together, however many they are

struct Batch {
  torch::Tensor input, target;
};
// A member's part of the batch of a step: the sum of all parts is always the same.
Batch batch_of(std::uint64_t step, int rank, int size) {
  auto generator = at::detail::createCPUGenerator(step + 1);
  const auto input = at::randn({kBatch, 8}, generator);
  const auto target = (input.sum(1, true) / 2).tanh();
  const int first = kBatch * rank / size, last = kBatch * (rank + 1) / size;
  return {input.slice(0, first, last), target.slice(0, first, last)};
}

torch::nn::Sequential make_net() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(8, 64), torch::nn::Tanh(),
                               torch::nn::Linear(64, 1));
}

torch::Tensor loss_of(const torch::Tensor& output, const Batch& batch) {
  return (output - batch.target).pow(2).mean();
}

// Of all that was learnt until now, on a batch that is always the same.
double test_loss(torch::nn::Sequential& net) {
  const torch::NoGradGuard no_grad;
  const auto batch = batch_of(1'000'000, 0, 1);
  return loss_of(net->forward(batch.input), batch).item<double>();
}

std::string key_of(std::uint64_t step) { return "loss/" + std::to_string(step); }

// A member.
void train(int index, const std::string& path, std::int64_t steps) {
  torch::set_num_threads(1);
  const auto store = convoy::connect_store(path, convoy::Deadline::after(30s));
  const bool replaces = store->add("starts/" + std::to_string(index), 1) > 1;
  const auto group =
      replaces
          ? convoy::new_group("convoy", {.store = convoy::make_local_store(), .rank = 0, .size = 1})
          : convoy::new_group(
                "convoy",
                {.store = convoy::with_prefix(store, "world"), .rank = index, .size = kMembers});
  auto net = make_net();
  convoy::DistributedDataParallel model(net, group);
  convoy::ShardedOptimizer<torch::optim::AdamW> optimizer(model.reducer(), 3e-3);
  convoy::elastic::run(
      model, {.store = store, .joins = replaces, .min_size = kMembers}, [&](std::uint64_t step) {
        const auto batch = batch_of(step, model.group().rank(), model.group().size());
        loss_of(model(batch.input), batch).backward();
        optimizer.step();
        if ((step + 1) % kEvery == 0) store->set(key_of(step + 1), std::to_string(test_loss(net)));
        return step + 1 < static_cast<std::uint64_t>(steps);
      });
}

}  // namespace

int main(int argc, char** argv) {
  convoy::start(argc, argv);  // members end in it
  const std::int64_t steps = argc > 1 ? std::atoll(argv[1]) : 400;
  const convoy::elastic::StoreHost host;
  const auto store = convoy::connect_store(host.path(), convoy::Deadline::after(30s));
  auto members = convoy::spawn<train>(kMembers, host.path(), steps);

  auto net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), 3e-3);
  double furthest = 0;
  std::cout << "  step      loss  undisturbed\n" << std::fixed << std::setprecision(4);
  for (std::int64_t step = 1; step <= steps; ++step) {
    const auto batch = batch_of(static_cast<std::uint64_t>(step - 1), 0, 1);
    optimizer.zero_grad();
    loss_of(net->forward(batch.input), batch).backward();
    optimizer.step();
    if (step % static_cast<std::int64_t>(kEvery) != 0) continue;
    const auto key = key_of(static_cast<std::uint64_t>(step));
    const double loss = std::stod(store->get(key, convoy::Deadline::after(60s)));
    const double expected = test_loss(net);
    furthest = std::max(furthest, std::abs(loss - expected));
    std::cout << std::setw(6) << step << std::setw(10) << loss << std::setw(13) << expected
              << std::endl;
    if (step < steps) members.restart(static_cast<int>(step / 20) % kMembers);  // kills it
  }
  members.join(1min);
  std::cout << "furthest apart: " << furthest << std::endl;
  return furthest < 0.05 ? 0 : 1;
}
