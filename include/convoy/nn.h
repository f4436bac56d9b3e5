#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "convoy/group.h"

// Collectives that autograd can differentiate. Each returns new tensors. Backward runs the matching
// collective, so the gradients are those of the sum of all ranks' losses.
//
// Backward communicates: all ranks must run it, through the same calls in the same order. If a
// rank's tensor does not require a gradient, or a rank leaves a result out of its loss, the other
// ranks block in backward until the group's timeout. Double backward works. Errors, blocking and
// thread-safety are as for ProcessGroup.
namespace convoy::nn {

// Combines the tensors of all ranks: kSum, kAvg, kPremulSum, kMin or kMax. The gradient of kMin and
// kMax is split evenly among the ranks that had the value. Throws kUnsupported for other
// operations.
at::Tensor all_reduce(const at::Tensor& tensor, const ProcessGroup& group,
                      const ReduceOptions& options = {});
// Returns the tensors of all ranks, as one tensor of shape (size(), sizes...).
at::Tensor all_gather(const at::Tensor& tensor, const ProcessGroup& group,
                      const CallOptions& options = {});
// Combines the tensors of all ranks: kSum, kAvg or kPremulSum. Rank r gets part r of the size()
// equal parts along the first dimension. Throws kUnsupported for other operations, kInvalidArgument
// if size() does not divide the first dimension.
at::Tensor reduce_scatter(const at::Tensor& tensor, const ProcessGroup& group,
                          const ReduceOptions& options = {});
// Exchanges parts along the first dimension: part r goes to rank r. Splits are as in
// ProcessGroup::all_to_all_single; without splits all parts are equal. Throws kInvalidArgument if
// only one of the two splits is given, or if the tensor cannot be cut into equal parts.
at::Tensor all_to_all(const at::Tensor& tensor, const ProcessGroup& group,
                      const SplitsOptions& options = {});
// Returns the root's tensor. In backward the root gets the sum of all ranks' gradients, and the
// other ranks get zeros. Only the root's tensor decides whether the result requires a gradient.
at::Tensor broadcast(const at::Tensor& tensor, const ProcessGroup& group,
                     const RootOptions& options = {});
// Sends tensors[r] to rank r and returns one tensor from each rank. Their first dimensions may
// differ. Throws kInvalidArgument unless there is one tensor for each rank, each with a first
// dimension.
std::vector<at::Tensor> all_to_all(const std::vector<at::Tensor>& tensors,
                                   const ProcessGroup& group, const CallOptions& options = {});

}  // namespace convoy::nn
