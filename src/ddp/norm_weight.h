#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "convoy/group.h"

namespace convoy {

// How much a rank counts in the gradients of a model. With GradReduce::weighted its gradients are
// multiplied by its samples when they are reduced. A SyncBatchNorm sums gradients over ranks before
// that, in backward, and has to weigh them in the same way. Used by one thread at a time: that of
// the model's forwards and backwards.
struct NormWeight {
  double samples = 1;  // set by the reducer; 1, if gradients are not weighted
  // What SyncBatchNorms have weighed with since the last round; cleared by the reducer.
  std::optional<double> used = {};
  bool differs = false;  // it was not always the same

  double use();
  void forget() {
    used.reset();
    differs = false;
  }
};

// A reducer of this group lives as long as what this returns.
std::shared_ptr<NormWeight> enlist_reducer(const ProcessGroup& group);
// True if there is another one.
bool has_other_reducers(const ProcessGroup& group, const std::shared_ptr<NormWeight>& self);

// The model whose forward runs in this thread: between enter_forward() and leave_forward().
void enter_forward(std::shared_ptr<NormWeight> model);
void leave_forward();

// Of the model in whose forward this was made, if there was one. Otherwise (a Reducer that is not
// told of forwards, a call of the bare module) of all reducers of the group.
class NormWeights {
 public:
  explicit NormWeights(const ProcessGroup& group);
  // For one backward. kInvalidArgument if there are several reducers, with different weights.
  double use() const;

 private:
  const ProcessGroup group_;
  const bool in_forward_;
  const std::weak_ptr<NormWeight> model_;
};

}  // namespace convoy
