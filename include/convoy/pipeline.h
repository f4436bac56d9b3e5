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

// A model whose stages are on several workers. The stages work on different micro-batches at once.
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

// The order in which a stage works on micro-batches.
enum class PipelineSchedule {
  kGPipe,  // all forwards, then all backwards
  k1F1B,   // each backward as soon as possible: a stage keeps few activations
};

struct PipelineOptions {
  int micro_batches = 4;  // a batch is cut into so many along its first dimension
  PipelineSchedule schedule = PipelineSchedule::k1F1B;
  Timeout timeout = std::chrono::minutes(30);  // of one step() or forward()
};

// A part of a model, on the worker that has its parameters. A function of that worker makes it;
// others use it through an RRef. Copies are the same stage. Thread-safe, except for what its
// functions do. Each stage has one thread, which runs its functions.
class PipelineStage {
 public:
  using Forward = std::function<at::Tensor(const at::Tensor& input)>;
  // Returns a scalar, such as the mean over the samples of a micro-batch.
  using Loss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

  // Makes a stage from a module holder. The last stage needs a loss. Throws kInvalidArgument if the
  // function is empty, or if a parameter is undefined or not a leaf.
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
  // The error of the last step that failed at this stage, as the stage was told. Empty: none
  // failed.
  std::string last_error() const;

  class Impl;  // opaque
  Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<Impl> impl_;  // shared with steps under way
};

// One piece of work of a stage, with its times.
struct PipelineSpan {
  enum class Kind : std::uint8_t { kForward, kBackward };
  using Time = std::chrono::steady_clock::time_point;

  std::size_t stage = 0;
  Kind kind = Kind::kForward;
  int micro_batch = 0;
  Time begin, end;
};

struct PipelineTimeline {
  std::vector<std::string> workers = {};  // by stage
  std::vector<PipelineSpan> spans = {};

  // An SVG picture: one row for each stage, time to the right.
  std::string svg() const;
  // JSON for chrome://tracing and Perfetto.
  std::string chrome_trace() const;
};

struct PipelineStep {
  at::Tensor loss;  // mean of the micro-batches' losses, weighted by their samples
  PipelineTimeline timeline = {};
};

// Runs batches through stages. Activations and gradients go directly from stage to stage, not
// through the worker of this object. That worker may have a stage of its own. A stage does one
// thing at a time, in the order of the schedule. Sums of gradients do not depend on timing: they
// are bit-identical to those of one process that works on one micro-batch after the other. Not
// thread-safe.
class Pipeline {
 public:
  // Stages in their order. The last one must have a loss for step(). Does not wait for the stages.
  // Throws kInvalidArgument if there are no stages, if one is an empty reference, or if
  // micro_batches is less than 1.
  Pipeline(const rpc::Session& session, std::vector<RRef<PipelineStage>> stages,
           const PipelineOptions& options = {});

  // Runs forward and backward. Blocks. Gradients are added on the stages' workers: to the
  // distributed autograd context of the calling thread (convoy/autograd.h), or to `.grad` if it has
  // none. Throws kInvalidArgument for a batch that cannot be cut. If the step fails, it throws
  // rpc::RemoteError with the stage and its worker: kRemote if a function of the stage threw,
  // kPeerLost or kTimeout. All stages are told the same error, and no gradient was added; only if a
  // worker dies while gradients are added ("commit" in the text) others may have added theirs.
  PipelineStep step(const at::Tensor& input, const at::Tensor& target) const;
  // Returns the output of the last stage, without loss and gradients. Blocks. Throws as step()
  // does.
  at::Tensor forward(const at::Tensor& input) const;

  // References to the parameters of all stages, in their order, for a DistributedOptimizer. Calls
  // each stage, and blocks.
  std::vector<RRef<at::Tensor>> parameters() const;
  const std::vector<RRef<PipelineStage>>& stages() const;
  const PipelineOptions& options() const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace convoy
