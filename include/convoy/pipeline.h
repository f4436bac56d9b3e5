#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/rpc.h"
#include "convoy/rref.h"

// A model whose stages are on several workers, which work on several parts of a batch at once.
//
//   convoy::PipelineStage make_stage(int hidden) {
//     return convoy::PipelineStage(torch::nn::Linear(hidden, hidden));
//   }
//   CONVOY_RPC(make_stage);
//
//   convoy::Pipeline pipeline(rpc, {rpc.remote<make_stage>("worker0", 64), ...},
//                             {.micro_batches = 8});
//   convoy::autograd::Context context(rpc);
//   const auto step = pipeline.step(input, target);    // step.loss
//   optimizer.step(context);                           // convoy/distributed_optimizer.h
//
// docs/reference/pipeline.md is the guide.
namespace convoy {

// In which order a stage works on micro-batches.
enum class PipelineSchedule {
  kGPipe,  // all forwards, then all backwards
  k1F1B,   // a backward as soon as it can be: a stage keeps few activations
};

struct PipelineOptions {
  int micro_batches = 4;  // the parts of a batch, along the first dimension
  PipelineSchedule schedule = PipelineSchedule::k1F1B;
  Timeout timeout = std::chrono::minutes(30);  // of a step
};

// A part of a model, where its parameters are: made by a function of the worker's, and used through
// a reference. Copies are the same stage. Thread-safe, but for what its functions do.
class PipelineStage {
 public:
  using Forward = std::function<at::Tensor(const at::Tensor& input)>;
  // A scalar, such as the mean over the samples of a micro-batch.
  using Loss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

  // Of a module's holder. The last stage has a loss.
  template <class Module>
    requires requires(Module& module) { module->parameters(); }
  explicit PipelineStage(Module module, Loss loss = {})
      : PipelineStage(
            [module](const at::Tensor& input) mutable -> at::Tensor {
              return module->forward(input);
            },
            module->parameters(), std::move(loss)) {}
  PipelineStage(Forward forward, std::vector<at::Tensor> parameters, Loss loss = {});

  const std::vector<at::Tensor>& parameters() const;
  // Why the last step failed that did, as this stage was told; empty: none has.
  std::string last_error() const;

  class Impl;  // opaque
  Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<Impl> impl_;  // shared with what is under way
};

// When a stage worked on what.
struct PipelineSpan {
  enum class Kind : std::uint8_t { kForward, kBackward };
  using Time = std::chrono::steady_clock::time_point;

  std::size_t stage = 0;
  Kind kind = Kind::kForward;
  int micro_batch = 0;
  Time begin, end;
};

struct PipelineTimeline {
  std::vector<std::string> workers = {};  // of the stages
  std::vector<PipelineSpan> spans = {};

  // A picture: stages below each other, time to the right.
  std::string svg() const;
  // For chrome://tracing and Perfetto.
  std::string chrome_trace() const;
};

struct PipelineStep {
  at::Tensor loss;  // of the batch: the mean of the micro-batches' losses, by their samples
  PipelineTimeline timeline = {};
};

// Runs batches through stages. The stages talk to each other: activations and gradients go from
// worker to worker, and not by way of this one, which may be one of them. A stage does one thing at
// a time, in the order of the schedule; sums of gradients do not depend on what is faster, and have
// the bits that one process gets that works on one micro-batch after the other. One thread at a
// time.
class Pipeline {
 public:
  // Stages in their order; the last one must have a loss for step(). Does not wait for them.
  Pipeline(const rpc::Session& session, std::vector<RRef<PipelineStage>> stages,
           const PipelineOptions& options = {});

  // Forward and backward. Gradients of the loss are added where the parameters are: to the
  // distributed autograd context of this thread (convoy/autograd.h), or if it has none, to `.grad`.
  // Blocks. On failure nothing was added: rpc::RemoteError with the stage and its worker (kRemote:
  // its functions threw; kPeerLost; kTimeout), and every stage is told the same. Error
  // kInvalidArgument for batches that cannot be cut.
  PipelineStep step(const at::Tensor& input, const at::Tensor& target) const;
  // What the last stage makes of it, without its loss and without gradients.
  at::Tensor forward(const at::Tensor& input) const;

  // References to the parameters of all stages, in their order, for a DistributedOptimizer.
  std::vector<RRef<at::Tensor>> parameters() const;
  const std::vector<RRef<PipelineStage>>& stages() const;
  const PipelineOptions& options() const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace convoy
