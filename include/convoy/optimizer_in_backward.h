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
  // Clips the gradients of all groups together to this norm; 0: no clipping.
  double max_norm = 0;
  double norm_type = 2;  // or infinity
  // A step whose gradient norm is NaN or Inf is skipped, on all ranks.
  bool skip_nonfinite = false;
  // false: `.grad` is undefined after backward, and nothing has to be zeroed.
  bool keep_gradients = false;
};

// Updates parameters at the end of the backward that computes their gradients, straight from the
// buckets, in one pass over each: backward() is the whole step.
//
//   convoy::OptimizerInBackward optimizer(model.reducer(), convoy::AdamW{.lr = 3e-4}, {.max_norm =
//   1}); for (...) loss(model(input), target).backward();
//
// The result is that of a separate step. It comes after the ranks have agreed on how backward went:
// all of them step, or none. What no rank has used is left alone, with its state. Backwards inside
// of no_sync() only accumulate. Parameters in no group keep their gradients. One reducer may have
// several of these optimizers, for different parameters.
//
// Copies are the same optimizer, and the reducer keeps it: it goes on without them. Thread-safety
// as for Reducer.
class OptimizerInBackward {
 public:
  // Collective: rules, options and groups must be the same on all ranks. kInvalidArgument if they
  // are not, for values without meaning, and for parameters that are not the reducer's, are in two
  // groups or have an optimizer already; kUnsupported for sparse ones and for types that are not
  // f32, f64 or complex: see DdpOptions::mixed_precision.
  OptimizerInBackward(Reducer& reducer, const OptimizerRule& rule,
                      const OptimizerInBackwardOptions& options = {});
  OptimizerInBackward(Reducer& reducer, std::vector<OptimizerGroup> groups,
                      const OptimizerInBackwardOptions& options = {});

  // From the next backward on; the same on all ranks. Does not communicate.
  void set_lr(double lr);  // of all groups
  void set_rule(std::size_t group, const OptimizerRule& rule);
  const OptimizerRule& rule(std::size_t group = 0) const;

  struct Stats {
    std::uint64_t steps = 0, skipped = 0;
    double norm = 0;  // of the last backward's gradients, before clipping; without clipping: 0
  };
  Stats stats() const;

  // What it keeps for each parameter, and numbers of steps; rules are not part of it. The same on
  // all ranks: one of them may save it for all.
  void save(torch::serialize::OutputArchive& archive) const;
  // kInvalidArgument if it belongs to other parameters.
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
  std::shared_ptr<Impl> impl_;  // the reducer's, too
};

}  // namespace convoy
