#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "convoy/group.h"

namespace convoy {

// How much a rank counts in the gradients of a model. With GradReduce::weighted its gradients are
// multiplied by its samples when they are reduced. A SyncBatchNorm sums gradients over ranks before
// that, in backward, and has to weigh them in the same way. Used by one thread at a time: that of
// the model's forwards and backwards.
struct NormWeight {
  double samples = 1;     // set by the reducer; 1, if gradients are not weighted
  bool weighted = false;  // whether they are
  std::set<const c10::TensorImpl*> parameters = {};  // that it reduces
  // What SyncBatchNorms have weighed with since the last round; cleared by the reducer.
  std::optional<double> used = {};
  bool differs = false;  // it was not always the same

  double use();
  void forget() {
    used.reset();
    differs = false;
  }
};

// A reducer of this group and these parameters lives as long as what this returns.
std::shared_ptr<NormWeight> enlist_reducer(const ProcessGroup& group, at::TensorList parameters);
// True if there is another one.
bool has_other_reducers(const ProcessGroup& group, const std::shared_ptr<NormWeight>& self);

// The model whose forward runs in this thread: between enter_forward() and leave_forward().
void enter_forward(std::shared_ptr<NormWeight> model);
void leave_forward();

// Of the model in whose forward this was made, if there was one. Otherwise (a Reducer that is not
// told of forwards, a call of the bare module) of the reducer that has the layer's `weight`, in
// whatever group; and of all reducers of the layer's group if that is nobody's.
class NormWeights {
 public:
  NormWeights(const ProcessGroup& group, const at::Tensor& weight);
  // For one backward. kInvalidArgument if it cannot be told: there are several reducers, with
  // different weights, or only some of other groups.
  double use() const;

 private:
  double use_all_of_group() const;

  const ProcessGroup group_;
  const bool trains_;  // the layer's weight
  const bool in_forward_;
  const std::weak_ptr<NormWeight> model_;
};

}  // namespace convoy
