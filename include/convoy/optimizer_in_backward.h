#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "convoy/optimizer_rules.h"
#include "convoy/reducer.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace convoy {

struct OptimizerInBackwardOptions {
  // Clips the gradients of all groups together to this norm. 0: no clipping.
  double max_norm = 0;
  double norm_type = 2;  // 2 or infinity
  // Skips the step, on all ranks, if the gradient norm is NaN or Inf.
  bool skip_nonfinite = false;
  // false: `.grad` is undefined after backward, and nothing has to be zeroed.
  bool keep_gradients = false;
};

// Updates parameters at the end of the backward that computes their gradients. It works on the
// reducer's buckets, in one pass over each bucket. backward() is the whole step.
//
//   convoy::OptimizerInBackward optimizer(model.reducer(), convoy::AdamW{.lr = 3e-4},
//                                         {.max_norm = 1});
//   for (...) loss(model(input), target).backward();
//
// The result is the same as that of a separate step. The step runs after the ranks have agreed on
// how backward went: all of them step, or none. Parameters that no rank used do not change, and
// neither does their state. A backward inside no_sync() only accumulates. Parameters in no group
// keep their gradients. One reducer may have several of these optimizers, for different parameters.
//
// Copies are the same optimizer. The reducer holds a reference too, so the optimizer keeps stepping
// after the last copy is gone. Thread-safety is as for Reducer.
class OptimizerInBackward {
 public:
  // Collective: rules, options and groups must be the same on all ranks. Throws kInvalidArgument on
  // all ranks if they differ, if a value is out of range, or if a parameter is not the reducer's or
  // is in two groups; kUnsupported if its type is not f32, f64 or complex (see
  // DdpOptions::mixed_precision). Throws kInvalidArgument if a parameter has such an optimizer
  // already, kUnsupported if its gradients are sparse.
  OptimizerInBackward(Reducer& reducer, const OptimizerRule& rule,
                      const OptimizerInBackwardOptions& options = {});
  OptimizerInBackward(Reducer& reducer, std::vector<OptimizerGroup> groups,
                      const OptimizerInBackwardOptions& options = {});

  // Both apply from the next backward on, and do not communicate. All ranks must set the same. They
  // throw kInvalidArgument for a value out of range. A group cannot change to another type of rule.
  void set_lr(double lr);  // for all groups
  void set_rule(std::size_t group, const OptimizerRule& rule);
  const OptimizerRule& rule(std::size_t group = 0) const;

  struct Stats {
    std::uint64_t steps = 0, skipped = 0;
    double norm = 0;  // of the last backward's gradients before clipping; 0: not computed
  };
  Stats stats() const;

  // Saves the state of each parameter and the step counts, but not the rules. The state is the same
  // on all ranks, so one rank may save it for all.
  void save(torch::serialize::OutputArchive& archive) const;
  // Throws kInvalidArgument if the archive belongs to other parameters. Nothing is changed then.
  void load(torch::serialize::InputArchive& archive);
  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const OptimizerInBackward& optimizer) {
    optimizer.save(archive);
    return archive;
  }
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    OptimizerInBackward& optimizer) {
    optimizer.load(archive);
    return archive;
  }

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // shared with the reducer
};

}  // namespace convoy
