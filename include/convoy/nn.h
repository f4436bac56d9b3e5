#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "convoy/group.h"

// Collectives that autograd goes through: results are new tensors, and their gradients travel back
// by the matching collective, so that the gradient is that of the sum of all ranks' losses.
//
// Backward communicates: every rank must run it, through the same of these calls in the same order.
// A rank whose tensor does not require a gradient, or that leaves a result out of its loss, makes
// the others wait until the group's time-out. Twice differentiable. Errors and threads as for
// ProcessGroup.
namespace convoy::nn {

// kSum, kAvg, kPremulSum; kMin and kMax, whose gradient goes to the ranks that had the value, in
// equal parts. kUnsupported for the others.
at::Tensor all_reduce(const at::Tensor& tensor, const ProcessGroup& group,
                      const ReduceOptions& options = {});
// (size(), sizes...): every rank's tensor.
at::Tensor all_gather(const at::Tensor& tensor, const ProcessGroup& group,
                      const CallOptions& options = {});
// Rank r gets the r-th of size() equal parts along the first dimension, combined over all ranks.
// kSum, kAvg, kPremulSum.
at::Tensor reduce_scatter(const at::Tensor& tensor, const ProcessGroup& group,
                          const ReduceOptions& options = {});
// Parts along the first dimension change places: part r goes to rank r. Splits as in
// ProcessGroup::all_to_all_single; with none, equal parts.
at::Tensor all_to_all(const at::Tensor& tensor, const ProcessGroup& group,
                      const SplitsOptions& options = {});
// The root's tensor; the gradients of all ranks meet there, others get zeros. Only the root's
// tensor decides whether a gradient is required.
at::Tensor broadcast(const at::Tensor& tensor, const ProcessGroup& group,
                     const RootOptions& options = {});
std::vector<at::Tensor> all_to_all(const std::vector<at::Tensor>& tensors,
                                   const ProcessGroup& group, const CallOptions& options = {});

}  // namespace convoy::nn
