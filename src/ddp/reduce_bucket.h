#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "convoy/error.h"
#include "convoy/reducer.h"

namespace convoy {

// True of ours. Gloo has no mean, and NCCL's rounds in another way: for them gradients are divided
// before.
bool averages(const ProcessGroup& group);

// Starts the reduction of a flat buffer in place. `weight` is of kWeighted: this rank's share of
// all samples.
HookResult reduce_bucket(const ProcessGroup& group, const at::Tensor& buffer,
                         const GradReduce& reduce, double weight);
// The same for parts of it that may lie elsewhere, each of them flat, of a group of ours. Not
// weighted.
HookResult reduce_pieces(const ProcessGroup& group, const std::vector<at::Tensor>& pieces,
                         const at::Tensor& buffer, const GradReduce& reduce);
// `gradient`, which is coalesced, becomes the result.
void reduce_sparse_gradient(const ProcessGroup& group, at::Tensor& gradient,
                            const GradReduce& reduce, double weight);

// A group of the same ranks, so that it can be aborted alone; the same one if it cannot be split.
// Collective.
ProcessGroup own_group(const ProcessGroup& group, const std::string& purpose = "hook");

// True if buckets had better travel at the end of backward. Overlap needs a core that computes
// nothing: with none, the thread that reduces takes its time from the one that computes, and ranks
// wait for each other at every bucket instead of once. CONVOY_DDP_LAUNCH=early or late
// decides it where the options do not.
bool launches_late(const ProcessGroup& group, BucketLaunch wish);

// What all ranks have found together, and throw alike: nobody waits for this one.
class AgreedError : public Error {
 public:
  using Error::Error;
};
// In a handler, while `what` was done: others may wait for this rank, and the group is ended,
// unless the error is an AgreedError, or that of a lost or late rank, which has ended the group
// already.
void give_up(const ProcessGroup& group, const std::string& what) noexcept;
// Ends the group on all ranks, which are told why, if the backend can tell.
void abort_because(const ProcessGroup& group, const std::string& why) noexcept;

// Without the backtrace that libtorch's have.
std::string first_line(const std::exception& error);
// In a handler: throws what is being handled, as an Error whose text begins with `head`.
[[noreturn]] void rethrow_with(const std::string& head);

}  // namespace convoy
