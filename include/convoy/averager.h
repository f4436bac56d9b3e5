#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "convoy/group.h"

namespace torch::optim {
class Optimizer;
}
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace convoy {

// Model averaging, for local SGD and post-local SGD: each rank trains its own model for some steps,
// then the ranks average their parameters.
struct AveragingLevel {
  std::uint64_t period;  // steps from one average to the next
  ProcessGroup group;    // the ranks that are averaged
};
struct AveragerOptions {
  std::uint64_t warmup_steps = 0;  // no average in the first steps
};

// Averages parameters over the ranks of a group every few steps. There may be several levels: for
// example all ranks of a host every 4 steps, and all ranks of the job every 16. If several levels
// are due at a step, the one with the longest period is used. All ranks of a group must make the
// same steps. Not thread-safe.
class ModelAverager {
 public:
  // Throws kInvalidArgument if there is no level, if a level has period 0 or no group, or if a
  // period is not a multiple of the next shorter one: the shorter level would be left out where it
  // is due.
  explicit ModelAverager(std::vector<AveragingLevel> levels, const AveragerOptions& options = {});

  // Counts one step. If an average is due, replaces the parameters by their mean, and returns true.
  // The first average is due at the first step after the warm-up. Collective and blocking if an
  // average is due. Parameters may have different types. Throws what collectives throw.
  bool average_parameters(at::TensorList parameters);
  std::uint64_t steps() const { return steps_; }

  // The number of steps. load() throws kInvalidArgument if the archive has none.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  std::vector<AveragingLevel> levels_;  // the longest period first
  AveragerOptions options_;
  std::uint64_t steps_ = 0;
};

// An optimizer whose step() also calls the averager. With hooks::PostLocalSgd this is post-local
// SGD:
//
//   model.register_comm_hook(convoy::hooks::PostLocalSgd({.start_local_sgd_iter = 100}));
//   convoy::PostLocalSgdOptimizer optimizer(
//       sgd, convoy::ModelAverager({{4, world}}, {.warmup_steps = 100}));
//
// The inner optimizer must outlive it. Not thread-safe.
class PostLocalSgdOptimizer {
 public:
  PostLocalSgdOptimizer(torch::optim::Optimizer& inner, ModelAverager averager)
      : inner_(&inner), averager_(std::move(averager)) {}

  // Steps the inner optimizer, then calls average_parameters(), which may be collective. Returns
  // what the inner optimizer returns.
  at::Tensor step(std::function<at::Tensor()> closure = nullptr);
  void zero_grad(bool set_to_none = true);
  torch::optim::Optimizer& inner() { return *inner_; }
  const ModelAverager& averager() const { return averager_; }

  // The inner optimizer's state and the number of steps. load() throws kInvalidArgument if the
  // archive was not written by save().
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  torch::optim::Optimizer* inner_;
  ModelAverager averager_;
};

}  // namespace convoy
