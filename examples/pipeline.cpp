// A model in three stages, each on a worker of its own, trained by a pipeline: several parts of a
// batch are under way at once. Worker 0 compares every loss with that of one process, and draws a
// chart of what each stage did when.
//
//   convoy run -n 3 pipeline
//
// writes pipeline.svg, to be looked at in a browser, and pipeline.json, for chrome://tracing.
#include <convoy/convoy.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <vector>

namespace {

constexpr int kStages = 3, kMicroBatches = 8, kSteps = 20;
constexpr int kIn = 32, kHidden = 256, kOut = 10, kBatch = 256;
constexpr double kRate = 0.1;

}  // namespace

// The same weights wherever it is made.
torch::nn::Sequential make_net(int stage) {
  torch::manual_seed(stage);
  using torch::nn::Linear;
  using torch::nn::Sequential;
  using torch::nn::Tanh;
  if (stage == 0) return Sequential(Linear(kIn, kHidden), Tanh());
  if (stage == 1) return Sequential(Linear(kHidden, kHidden), Tanh());
  return Sequential(Linear(kHidden, kOut));
}
torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& target) {
  return torch::nn::functional::cross_entropy(output, target);
}

// The pipeline's part: made on the worker that the stage is on.
convoy::PipelineStage make_stage(int stage) {
  return stage + 1 == kStages ? convoy::PipelineStage(make_net(stage), loss_of)
                              : convoy::PipelineStage(make_net(stage));
}
CONVOY_RPC(make_stage);

// The same in one process, one micro-batch after the other.
struct OneProcess {
  OneProcess() {
    for (int s = 0; s < kStages; ++s) {
      nets.push_back(make_net(s));
      for (const auto& parameter : nets.back()->parameters()) parameters.push_back(parameter);
    }
  }
  double step(const torch::Tensor& input, const torch::Tensor& target) {
    for (auto& parameter : parameters) parameter.mutable_grad().reset();
    const auto inputs = input.chunk(kMicroBatches), targets = target.chunk(kMicroBatches);
    double sum = 0;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      auto x = inputs[i];
      for (auto& net : nets) x = net->forward(x);
      const auto loss = loss_of(x, targets[i]) / kMicroBatches;
      loss.backward();
      sum += loss.item<double>();
    }
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters) parameter.sub_(parameter.grad(), kRate);
    return sum;
  }
  std::vector<torch::nn::Sequential> nets;
  std::vector<torch::Tensor> parameters;
};

int main() {
  const convoy::rpc::Session rpc;
  bool same = true;
  if (rpc.worker_info().rank == 0) {
    std::vector<convoy::RRef<convoy::PipelineStage>> stages;
    for (int s = 0; s < kStages; ++s) stages.push_back(rpc.remote<make_stage>(s % rpc.size(), s));
    const convoy::Pipeline pipeline(rpc, stages, {.micro_batches = kMicroBatches});
    const convoy::DistributedOptimizer sgd(rpc, pipeline.parameters(), convoy::Sgd{.lr = kRate});

    OneProcess one;
    torch::manual_seed(100);
    const auto input = torch::randn({kBatch, kIn}), target = torch::randint(kOut, {kBatch});
    convoy::PipelineTimeline timeline;
    for (int i = 0; i < kSteps; ++i) {
      const convoy::autograd::Context context(rpc);
      const auto step = pipeline.step(input, target);  // gradients are in the context
      sgd.step(context);
      const double loss = step.loss.item<double>(), expected = one.step(input, target);
      same = same && std::abs(loss - expected) < 1e-5;
      if (i % 5 == 4) {
        std::cout << "step " << i + 1 << ": loss " << loss << ", in one process " << expected
                  << "\n";
      }
      timeline = step.timeline;
    }
    std::ofstream("pipeline.svg") << timeline.svg();
    std::ofstream("pipeline.json") << timeline.chrome_trace();
    std::cout << (same ? "the same losses as in one process\n" : "NOT the same losses\n")
              << "pipeline.svg and pipeline.json show the last step\n"
              << std::flush;
  }
  rpc.shutdown();
  return same ? 0 : 1;
}
