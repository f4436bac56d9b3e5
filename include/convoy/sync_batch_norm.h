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

// Batch normalisation over the batches of all ranks of a group. The result is what one process
// would compute for the whole batch, in forward and backward.
//
//   convoy::nn::SyncBatchNorm2d norm(64, world);
//   convoy::nn::convert_sync_batchnorm(*net, world);   // or all layers of a model at once
//
// Parameters, buffers and their names are those of torch::nn::BatchNorm: checkpoints fit both. In
// training, forward and backward are one small collective each: all ranks must run them in the same
// order. Batches may differ in size, and may be empty. eval mode does not communicate. Without a
// group it is an ordinary batch normalisation. If the model's gradients are weighted
// (GradReduce::weighted), backward weights the ranks in the same way: set the weights before
// backward. Backward throws kInvalidArgument on a rank with inputs and weight 0. Not thread-safe.
namespace convoy::nn {

template <std::size_t D, class Derived>
class SyncBatchNormImplBase : public torch::nn::Cloneable<Derived> {
 public:
  // Collective if there is a group.
  explicit SyncBatchNormImplBase(const torch::nn::BatchNormOptions& norm_options,
                                 const ProcessGroup& group = {});

  // Blocks in training mode, and throws kPeerLost or kTimeout as collectives do. Throws
  // kInvalidArgument if the sizes do not fit the layer, and on all ranks if all batches together
  // have one value for a channel. Half-precision inputs are normalised in single precision. Double
  // backward throws kUnsupported.
  at::Tensor forward(const at::Tensor& input);
  // Collective. Applies from the next forward on.
  void set_group(const ProcessGroup& group);

  void reset() override;
  void reset_running_stats();
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  torch::nn::BatchNormOptions options;
  at::Tensor weight, bias;                                    // undefined if not affine
  at::Tensor running_mean, running_var, num_batches_tracked;  // undefined if not tracked

 protected:
  // Uses the given tensors themselves, not copies.
  SyncBatchNormImplBase(const torch::nn::BatchNormOptions& norm_options,
                        const at::Tensor& its_weight, const at::Tensor& its_bias,
                        const at::Tensor& its_mean, const at::Tensor& its_var,
                        const at::Tensor& its_count);

 private:
  double count_batch();
  void update_statistics(double factor, const at::Tensor& mean, const at::Tensor& variance);

  std::shared_ptr<NormGroup> group_;  // shared by all layers of a group
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

// Collective. Replaces every BatchNorm1d, 2d and 3d below `module` by a SyncBatchNorm with the same
// tensors and name, and gives every SyncBatchNorm the group. Returns how many layers these are.
//
// It can replace children of a torch::nn::Sequential, and children that only their parent holds. A
// class with a torch::nn::BatchNorm2d member would go on using that one, so this throws
// kUnsupported before anything is changed. Declare such members as SyncBatchNorm2d: until it is
// converted it is an ordinary batch normalisation. Throws kUnsupported if `module` is a BatchNorm
// itself, kInvalidArgument for an empty group.
std::size_t convert_sync_batchnorm(torch::nn::Module& module, const ProcessGroup& group);

}  // namespace convoy::nn
