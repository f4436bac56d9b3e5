// Pipelines of three stages, each in a process of its own, 8 micro-batches: one round of every
// case, as a line of JSON.
//
//   bench_pipeline [quick]
//   bench_pipeline draw FILE     a step of timer_1f1b, as the picture in docs/reference/pipeline.md
//
// timer_gpipe, timer_1f1b: stages that wait on a timer, 5 ms in forward and 10 ms in backward.
// real_gpipe, real_1f1b: two layers of 1024 in each stage, a batch of 512; gradients in `.grad`.
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include "calls.h"
#include "convoy/pipeline.h"
#include "workers.h"

namespace bench {

using convoy::Pipeline;
using convoy::PipelineStage;
using convoy::rpc::Session;

constexpr int kStages = 3, kMicroBatches = 8, kWidth = 1024, kBatch = 512;
constexpr std::chrono::milliseconds kForward(5), kBackward(10);

// A stage that computes nothing and keeps no core busy.
struct Timed : torch::autograd::Function<Timed> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    std::this_thread::sleep_for(kForward);
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& g) {
    std::this_thread::sleep_for(kBackward);
    return g;
  }
};

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}
PipelineStage make_timed(bool last) {
  const auto weight = torch::ones({4}, torch::requires_grad());
  const auto forward = [weight](const at::Tensor& x) { return Timed::apply(x * weight); };
  return {forward, {weight}, last ? PipelineStage::Loss(loss_of) : PipelineStage::Loss()};
}
CONVOY_RPC(make_timed);
PipelineStage make_layers(bool last) {
  const torch::nn::Sequential net(torch::nn::Linear(kWidth, kWidth), torch::nn::ReLU(),
                                  torch::nn::Linear(kWidth, kWidth));
  return last ? PipelineStage(net, loss_of) : PipelineStage(net);
}
CONVOY_RPC(make_layers);

namespace {

Session join(const std::string& folder, int rank) {
  return Session({.name = "worker" + std::to_string(rank),
                  .method = "file://" + folder + "/store",
                  .rank = rank,
                  .size = kStages});
}

template <auto Make>
Pipeline make_pipeline(const Session& session, convoy::PipelineSchedule schedule) {
  std::vector<convoy::RRef<PipelineStage>> stages;
  for (int s = 0; s < kStages; ++s) {
    stages.push_back(session.remote<Make>(s, s + 1 == kStages));
  }
  return {session, stages, {.micro_batches = kMicroBatches, .schedule = schedule}};
}

template <auto Make>
std::vector<double> steps(const Session& session, const CallBudget& budget, int width,
                          convoy::PipelineSchedule schedule) {
  const Pipeline pipeline = make_pipeline<Make>(session, schedule);
  const auto input = torch::rand({kBatch, width}), target = torch::rand({kBatch, width});
  pipeline.step(input, target);
  return repeat(budget, 100, [&] {
    const auto start = Clock::now();
    pipeline.step(input, target);
    return microseconds_since(start);
  });
}

void draw(const std::string& folder, const std::string& file) {
  const Session session = join(folder, 0);
  {
    const auto pipeline = make_pipeline<make_timed>(session, convoy::PipelineSchedule::k1F1B);
    const auto x = torch::rand({kBatch, 4});
    pipeline.step(x, x);
    std::ofstream(file) << pipeline.step(x, x).timeline.svg();
  }
  session.shutdown();
}

void run(const std::string& folder, const CallBudget& budget) {
  using enum convoy::PipelineSchedule;
  const Session session = join(folder, 0);
  Medians medians;
  medians.add("timer_gpipe", steps<make_timed>(session, budget, 4, kGPipe));
  medians.add("timer_1f1b", steps<make_timed>(session, budget, 4, k1F1B));
  medians.add("real_gpipe", steps<make_layers>(session, budget, kWidth, kGPipe));
  medians.add("real_1f1b", steps<make_layers>(session, budget, kWidth, k1F1B));
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
  const RunFolder folder("pipeline");
  Workers others(folder, kStages);
  if (first == "draw") {
    draw(folder.path(), argv[2]);
  } else {
    run(folder.path(), CallBudget::from(first));
  }
  others.wait();
  return 0;
}
