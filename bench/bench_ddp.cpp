// Our side of bench/ddp.py, which runs it under `convoy run`: steps of a model that stays up
// between cases. A case is a line, rank 0 answers with JSON:
//
//   pids                    of the ranks
//   step MODEL MODE COUNT   times of COUNT steps; MODE: ddp, no_sync, bare, adamw_sharded
//   pairs MODEL A B COUNT   of COUNT steps of each of two models, in turns; A and B: ddp, no_sync,
//                           find_unused_parameters, bare (not wrapped), fp16, bf16 (these comm
//                           hooks), all with SGD; sgd_in_backward, adamw,
//                           adamw_in_backward, adamw_sharded; adamw_alone (the bare model with
//                           our fused AdamW: no reduction), adamw_alone_part (this rank's part of
//                           that update)
//   observe MODEL COUNT     steps, and what measuring them took inside of our code, every one
//                           sampled
//   rounded BYTES COUNT     of COUNT means of a buffer in group memory, in turns: plain, and
//                           rounded to f16 and to bf16
//
// Times are in microseconds, on the slowest rank.
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "convoy/ddp.h"
#include "convoy/init.h"
#include "convoy/optimizer_in_backward.h"
#include "convoy/sharded_optimizer.h"
#include "models.h"
#include "optim/optimizer_kernels.h"

namespace bench {
namespace {

using Clock = std::chrono::steady_clock;
using Wrapped = convoy::DistributedDataParallel<torch::nn::SequentialImpl>;

// Our fused AdamW over a whole model, or over the first `part` of each parameter.
class FusedAdamW {
 public:
  FusedAdamW(const std::vector<at::Tensor>& parameters, double part) : part_(part) {
    for (const auto& p : parameters) items_.push_back({p, at::zeros_like(p), at::zeros_like(p)});
  }
  void step() {
    ++number_;
    for (auto& [p, mean, square] : items_) {
      const convoy::RuleMemory<float> memory{
          p.data_ptr<float>(),
          p.grad().data_ptr<float>(),
          {mean.data_ptr<float>(), square.data_ptr<float>(), nullptr}};
      convoy::rule_step(convoy::AdamStep{.lr = 1e-4, .weight_decay = 1e-2, .number = number_},
                        memory, static_cast<std::size_t>(part_ * static_cast<double>(p.numel())));
      p.mutable_grad().reset();
    }
  }

 private:
  struct Item {
    at::Tensor parameter, mean, square;
  };
  std::vector<Item> items_;
  double part_;
  std::int64_t number_ = 0;
};

// A model in training: wrapped, or bare.
class Trainer {
 public:
  Trainer(const std::string& name, const std::string& mode, const convoy::ProcessGroup& world)
      : world_(world), model_(make_model(name)) {
    if (mode == "adamw") {
      optimizer_ = std::make_unique<torch::optim::AdamW>(model_.net->parameters(),
                                                         torch::optim::AdamWOptions(1e-4));
    } else if (mode.starts_with("adamw_alone")) {
      fused_.emplace(model_.net->parameters(), mode == "adamw_alone" ? 1.0 : 1.0 / world.size());
      return;
    } else if (!mode.ends_with("_in_backward") && mode != "adamw_sharded") {
      optimizer_ = std::make_unique<torch::optim::SGD>(model_.net->parameters(), 1e-4);
    }
    if (mode == "bare") return;
    wrapped_ = std::make_unique<Wrapped>(
        model_.net, world,
        convoy::DdpOptions{.find_unused_parameters = mode == "find_unused_parameters"});
    if (mode == "fp16") wrapped_->register_comm_hook(convoy::hooks::fp16_compress);
    if (mode == "bf16") wrapped_->register_comm_hook(convoy::hooks::bf16_compress);
    if (mode == "sgd_in_backward") {
      in_backward_.emplace(wrapped_->reducer(), convoy::Sgd{.lr = 1e-4});
    } else if (mode == "adamw_sharded") {
      optimizer_ = std::make_unique<convoy::ShardedOptimizer<torch::optim::AdamW>>(
          wrapped_->reducer(), torch::optim::AdamWOptions(1e-4));
    } else if (!optimizer_) {
      in_backward_.emplace(wrapped_->reducer(), convoy::AdamW{.lr = 1e-4});
    }
  }

  // Microseconds on the slowest rank.
  double step(bool syncs = true) {
    world_.barrier();
    const auto start = Clock::now();
    {
      std::optional<convoy::Reducer::NoSync> scope;
      if (!syncs) scope.emplace(wrapped_->reducer());
      if (optimizer_) optimizer_->zero_grad();
      const auto output = wrapped_ ? (*wrapped_)(model_.data) : model_.net->forward(model_.data);
      const auto loss = output.square().mean();
      loss.backward();
      if (optimizer_) optimizer_->step();
      if (fused_) fused_->step();
      if (!first_loss_) first_loss_ = loss.item<double>();
    }
    const std::chrono::duration<double, std::micro> elapsed = Clock::now() - start;
    const auto slowest = torch::full({1}, elapsed.count(), torch::kDouble);
    world_.all_reduce(slowest, {.op = convoy::ReduceOp::kMax});
    return slowest.item<double>();
  }

  double first_loss() const { return first_loss_.value_or(0); }
  Wrapped& wrapped() { return *wrapped_; }

 private:
  const convoy::ProcessGroup& world_;
  Model model_;
  std::unique_ptr<Wrapped> wrapped_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;  // none: in backward, or fused
  std::optional<FusedAdamW> fused_;
  std::optional<convoy::OptimizerInBackward> in_backward_;
  std::optional<double> first_loss_;
};

std::string list_of(const std::vector<double>& numbers) {
  std::ostringstream text;
  for (const double number : numbers) text << (text.tellp() == 0 ? "[" : ", ") << number;
  return text.str() + "]";
}

class Ranks {
 public:
  explicit Ranks(const convoy::ProcessGroup& world) : world_(world) {}

  std::string answer(const std::string& line) {
    std::istringstream words(line);
    std::string op;
    words >> op;
    if (op == "step") return step(words);
    if (op == "pairs") return pairs(words);
    if (op == "observe") return observe(words);
    if (op == "rounded") return rounded(words);
    if (op == "pids") return pids();
    throw std::invalid_argument("what is '" + line + "'?");
  }

 private:
  std::string pids() {
    const auto all = world_.all_gather(torch::full({1}, getpid(), torch::kLong));
    std::ostringstream text;
    for (int r = 0; r < world_.size(); ++r) {
      text << (r == 0 ? "" : ", ") << '"' << r << "\": " << all[r].item<std::int64_t>();
    }
    return text.str();
  }

  std::string step(std::istream& words) {
    std::string model, mode;
    int count = 0;
    words >> model >> mode >> count;
    const bool syncs = mode != "no_sync";
    if (!trainer_) {
      trainer_ = std::make_unique<Trainer>(model, syncs ? mode : "ddp", world_);
      for (int i = 0; i < 2; ++i) trainer_->step(syncs);  // lays out buckets
    }
    trainer_->step(syncs);  // warms up
    std::vector<double> times;
    for (int i = 0; i < count; ++i) times.push_back(trainer_->step(syncs));
    std::ostringstream text;
    text << "\"us\": " << list_of(times) << ", \"loss\": " << trainer_->first_loss();
    return text.str();
  }

  std::string rounded(std::istream& words) {
    std::int64_t bytes = 0;
    int count = 0;
    words >> bytes >> count;
    const auto buffer = world_.allocate({bytes / 4}, torch::kFloat);
    buffer.normal_();
    constexpr std::array kWays = {convoy::Rounding::kNone, convoy::Rounding::kF16,
                                  convoy::Rounding::kBF16};
    std::array<std::vector<double>, kWays.size()> times;
    for (int i = -3; i < count; ++i) {  // three to warm up
      for (std::size_t k = 0; k < kWays.size(); ++k) {
        const std::size_t way = (k + static_cast<std::size_t>(i + 3)) % kWays.size();
        world_.barrier();
        const auto start = Clock::now();
        world_.all_reduce(buffer, {.op = convoy::ReduceOp::kAvg, .rounding = kWays[way]});
        const std::chrono::duration<double, std::micro> elapsed = Clock::now() - start;
        const auto slowest = torch::full({1}, elapsed.count(), torch::kDouble);
        world_.all_reduce(slowest, {.op = convoy::ReduceOp::kMax});
        if (i >= 0) times[way].push_back(slowest.item<double>());
      }
    }
    return "\"plain\": " + list_of(times[0]) + ", \"f16\": " + list_of(times[1]) +
           ", \"bf16\": " + list_of(times[2]);
  }

  std::string pairs(std::istream& words) {
    std::string model;
    std::array<std::string, 2> modes;
    int count = 0;
    words >> model >> modes[0] >> modes[1] >> count;
    std::array<std::unique_ptr<Trainer>, 2> trainers;
    std::array<bool, 2> syncs{};
    for (std::size_t i = 0; i < 2; ++i) {
      syncs[i] = modes[i] != "no_sync";
      trainers[i] = std::make_unique<Trainer>(model, syncs[i] ? modes[i] : "ddp", world_);
    }
    const auto step = [&](std::size_t i) { return trainers[i]->step(syncs[i]); };
    for (const std::size_t i : {0, 1, 1, 0, 0, 1}) step(i);
    std::array<std::vector<double>, 2> times;
    for (int i = 0; i < count; ++i) {
      const auto first = static_cast<std::size_t>(i % 2);  // each inherits the other's caches
      times[first].push_back(step(first));
      times[1 - first].push_back(step(1 - first));
    }
    return "\"" + modes[0] + "\": " + list_of(times[0]) + ", \"" + modes[1] +
           "\": " + list_of(times[1]);
  }

  std::string observe(std::istream& words) {
    std::string model;
    int count = 0;
    words >> model >> count;
    Trainer trainer(model, "ddp", world_);
    trainer.wrapped().set_runtime_logging_sample_rate(1);
    for (int i = 0; i < 3; ++i) trainer.step();
    std::vector<double> times, observing;
    for (int i = 0; i < count; ++i) {
      times.push_back(trainer.step());
      const std::chrono::duration<double, std::micro> own =
          trainer.wrapped().stats().observing_time;
      observing.push_back(own.count());
    }
    return "\"us\": " + list_of(times) + ", \"observing_us\": " + list_of(observing);
  }

  const convoy::ProcessGroup& world_;
  std::unique_ptr<Trainer> trainer_;
};

int serve(const std::string& folder) {
  torch::set_num_threads(1);
  const auto world = convoy::init();
  std::ifstream cases(folder + "/" + std::to_string(world.rank()));
  std::ofstream answers;
  if (world.rank() == 0) answers.open(folder + "/answers");
  Ranks ranks(world);
  for (std::string line; std::getline(cases, line);) {
    const std::string answer = ranks.answer(line);
    if (world.rank() == 0) answers << "{" << answer << "}" << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace bench

int main() {
  const char* folder = std::getenv("BENCH_SIDE");
  if (folder == nullptr) {
    std::fprintf(stderr, "This is started by bench/ddp.py (make bench-ddp).\n");
    return 2;
  }
  try {
    return bench::serve(folder);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_ddp: %s\n", error.what());
    return 1;
  }
}
