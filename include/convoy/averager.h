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

// Models that drift apart between their averages: local SGD, post-local SGD.
struct AveragingLevel {
  std::uint64_t period;  // steps between two averages
  ProcessGroup group;    // over these ranks
};
struct AveragerOptions {
  std::uint64_t warmup_steps = 0;  // no average before so many
};

// Averages parameters every so many steps. With several levels, such as all ranks of a host every 4
// steps and all ranks of the job every 16, a step takes the level with the longest period that is
// due. All ranks of a group make the same steps. Not to be shared between threads.
class ModelAverager {
 public:
  // kInvalidArgument without a level, for a level without a period or a group, and for periods that
  // do not divide each other: such a level would be left out where it is due.
  explicit ModelAverager(std::vector<AveragingLevel> levels, const AveragerOptions& options = {});

  // Counts one step, and becomes an average where one is due: at the first step after the warm-up,
  // and then by period. Collective then. Parameters may be of any types; returns true if they were
  // averaged.
  bool average_parameters(at::TensorList parameters);
  std::uint64_t steps() const { return steps_; }

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  std::vector<AveragingLevel> levels_;  // the longest period first
  AveragerOptions options_;
  std::uint64_t steps_ = 0;
};

// An optimizer whose steps end with the averager's: with hooks::PostLocalSgd, post-local SGD.
//
//   convoy::PostLocalSgdOptimizer optimizer(sgd, convoy::ModelAverager({{4, world}}, {.warmup_steps
//   = 100})); model.register_comm_hook(convoy::hooks::PostLocalSgd({.start_local_sgd_iter = 100}));
//
// The inner optimizer must outlive it.
class PostLocalSgdOptimizer {
 public:
  PostLocalSgdOptimizer(torch::optim::Optimizer& inner, ModelAverager averager)
      : inner_(&inner), averager_(std::move(averager)) {}

  at::Tensor step(std::function<at::Tensor()> closure = nullptr);
  void zero_grad(bool set_to_none = true);
  torch::optim::Optimizer& inner() { return *inner_; }
  const ModelAverager& averager() const { return averager_; }

  // The inner optimizer's state and the number of steps.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  torch::optim::Optimizer* inner_;
  ModelAverager averager_;
};

}  // namespace convoy
