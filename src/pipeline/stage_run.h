#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/future.h"
#include "pipeline/messages.h"
#include "pipeline/schedule.h"

namespace convoy {

// A step at one stage: what others leave for its thread, and what that makes of it. Thread-safe
// where it says so; the rest is the thread's that executes it.
class StageRun {
 public:
  explicit StageRun(const detail::StagePlan& plan);

  std::uint64_t step() const { return plan_.step; }
  int driver = -1;         // the rank of the worker that began it
  bool abandoned = false;  // guarded by the stage: nobody will ask for it any more

  // --- thread-safe ---
  // kInvalidArgument for what is not of this step.
  void take(detail::StageInput kind, int micro_batch, const at::Tensor& tensor);
  // The first one counts. Whoever waits, or will, gets it.
  void fail(const std::exception_ptr& error);
  std::exception_ptr error() const;
  rpc::Future<detail::StageReport> ended() const { return promise_.future(); }

  // --- of the thread ---
  bool is_first() const { return plan_.index == 0; }
  bool is_last() const { return plan_.index + 1 == plan_.stages; }
  bool trains() const { return plan_.trains; }
  int micro_batches() const { return plan_.micro_batches; }
  double weight(int micro_batch) const {
    return plan_.weights.at(static_cast<std::size_t>(micro_batch));
  }
  std::vector<PipelineOp> ops() const;
  // Waits for what comes from others; takes it. kTimeout.
  at::Tensor wait_for(detail::StageInput kind, int micro_batch);
  // To the stage before or behind. What goes wrong fails the step.
  static void send(const std::shared_ptr<StageRun>& run, detail::StageInput kind, int micro_batch,
                   const at::Tensor& tensor);
  // Nothing is sent any more.
  void let_neighbours_go();
  void end(std::exception_ptr error);

  struct Kept {
    at::Tensor input, output;  // output: of the last stage, its loss
  };
  std::vector<Kept> kept;        // by micro-batch
  std::vector<at::Tensor> sums;  // of gradients, by parameter; undefined: none came
  detail::StageReport report;

 private:
  std::vector<at::Tensor>& came(detail::StageInput kind);

  detail::StagePlan plan_;
  const Deadline deadline_;
  rpc::Promise<detail::StageReport> promise_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_; by micro-batch.
  std::vector<at::Tensor> activations_, gradients_, targets_;
  std::exception_ptr error_;
};

}  // namespace convoy
