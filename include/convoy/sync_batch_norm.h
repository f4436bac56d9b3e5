#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <iosfwd>
#include <memory>

#include "convoy/group.h"

namespace convoy {
class NormGroup;  // opaque
}

// Batch normalisation over the batches of all ranks of a group: what one process would compute for
// the whole batch, forward and backward.
//
//   convoy::nn::SyncBatchNorm2d norm(64, world);
//   convoy::nn::convert_sync_batchnorm(*net, world);   // or all of a model at once
//
// Parameters, buffers and their names are those of torch::nn::BatchNorm: checkpoints fit both. In
// training each forward is one small collective, and each backward another: all ranks run them in
// the same order. Batches may have different sizes, also none. In eval mode nothing is
// communicated. Without a group it is an ordinary batch normalisation. Where the model's gradients
// are weighted (GradReduce::weighted), its backward weighs ranks in the same way: set the weights
// before backward. A rank with inputs and weight 0 is kInvalidArgument.
namespace convoy::nn {

template <std::size_t D, class Derived>
class SyncBatchNormImplBase : public torch::nn::Cloneable<Derived> {
 public:
  // Collective, if there is a group.
  explicit SyncBatchNormImplBase(const torch::nn::BatchNormOptions& norm_options,
                                 const ProcessGroup& group = {});

  // kInvalidArgument for other sizes than the layer's, and on all ranks if there is one value for a
  // channel in all batches together. Half-precision inputs are normalised in single precision. Its
  // backward cannot be differentiated again: kUnsupported.
  at::Tensor forward(const at::Tensor& input);
  // From the next forward on. Collective.
  void set_group(const ProcessGroup& group);

  void reset() override;
  void reset_running_stats();
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  torch::nn::BatchNormOptions options;
  at::Tensor weight, bias;                                    // undefined, if not affine
  at::Tensor running_mean, running_var, num_batches_tracked;  // or if not tracked

 protected:
  // The tensors themselves are taken over.
  SyncBatchNormImplBase(const torch::nn::BatchNormOptions& norm_options,
                        const at::Tensor& its_weight, const at::Tensor& its_bias,
                        const at::Tensor& its_mean, const at::Tensor& its_var,
                        const at::Tensor& its_count);

 private:
  double count_batch();
  void update_statistics(double factor, const at::Tensor& mean, const at::Tensor& variance);

  std::shared_ptr<NormGroup> group_;  // one for all layers of a group
};

#define CONVOY_SYNC_BATCH_NORM(D)                                                              \
  class SyncBatchNorm##D##dImpl : public SyncBatchNormImplBase<D, SyncBatchNorm##D##dImpl> {   \
   public:                                                                                     \
    using SyncBatchNormImplBase<D, SyncBatchNorm##D##dImpl>::SyncBatchNormImplBase;            \
    /* A layer with the tensors of another one. */                                             \
    template <class BatchNorm>                                                                 \
    static std::shared_ptr<SyncBatchNorm##D##dImpl> take_over(const BatchNorm& norm) {         \
      return std::shared_ptr<SyncBatchNorm##D##dImpl>(                                         \
          new SyncBatchNorm##D##dImpl(norm.options, norm.weight, norm.bias, norm.running_mean, \
                                      norm.running_var, norm.num_batches_tracked));            \
    }                                                                                          \
  };                                                                                           \
  TORCH_MODULE(SyncBatchNorm##D##d)

CONVOY_SYNC_BATCH_NORM(1);  // (N, C) or (N, C, L)
CONVOY_SYNC_BATCH_NORM(2);  // (N, C, H, W)
CONVOY_SYNC_BATCH_NORM(3);  // (N, C, D, H, W)
#undef CONVOY_SYNC_BATCH_NORM

// Every BatchNorm1d, 2d and 3d below `module` becomes a SyncBatchNorm with the same tensors under
// the same name, and every SyncBatchNorm gets the group. Returns how many these are. Collective.
//
// What can be exchanged are the parts of a torch::nn::Sequential, and children that nobody holds
// but their parent. A class that has a torch::nn::BatchNorm2d as a member would go on to use that:
// kUnsupported, before anything is changed. Declare such members as SyncBatchNorm2d, which does
// nothing special until it is converted.
std::size_t convert_sync_batchnorm(torch::nn::Module& module, const ProcessGroup& group);

}  // namespace convoy::nn
