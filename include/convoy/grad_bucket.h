#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "convoy/group.h"
#include "convoy/work.h"

// What comm hooks (convoy/hooks.h) and optimizers see of a backward.
namespace convoy {

// Gradients that travel together, as a comm hook sees them: complete, not divided. Cheap to copy;
// valid until the backward ends.
class GradBucket {
 public:
  // Buckets are numbered in the order in which hooks are called: the same on all ranks, and the
  // same at every step until the layout changes (parameters frozen or thawed, another group).
  std::size_t index() const { return index_; }
  std::size_t count() const { return count_; }
  // Number of this backward among all that this reducer reduced, also those that failed: 1, 2, ...,
  // the same on all ranks.
  std::uint64_t backward() const { return backward_; }
  // No bucket after it goes through the hook in this backward. (In the one that notices thawed
  // parameters, those follow in buckets of their own.)
  bool is_last() const { return is_last_; }
  // All gradients one after the other: 1-D, contiguous.
  const at::Tensor& buffer() const { return buffer_; }
  // By parameter, as it is shaped and strided, in the buffer's memory.
  std::vector<at::Tensor> gradients() const;
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // Their numbers in the reducer: what a hook keeps by parameter survives a change of layout.
  const std::vector<std::size_t>& indices() const { return indices_; }
  // The group for this hook's operations. It is the hook's own: a hook that fails on one rank does
  // not leave the others waiting. What is done on another group has no such protection.
  const ProcessGroup& group() const { return group_; }
  // The same bucket with other contents, for a hook that wraps another. As many elements.
  GradBucket with(at::Tensor buffer) const;

 private:
  friend struct BucketAccess;

  std::size_t index_ = 0, count_ = 1;
  std::uint64_t backward_ = 1;
  bool is_last_ = true;
  at::Tensor buffer_;
  std::vector<at::Tensor> slots_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::size_t> indices_;
  ProcessGroup group_;
};

// What a comm hook returns: the reduced buffer, now or later.
class HookResult {
 public:
  HookResult(at::Tensor result);  // NOLINT(google-explicit-constructor): return bucket.buffer();
  // When the work is done, this tensor holds the result.
  HookResult(Work work, at::Tensor result);
  // When the work is done, `finish` gives the result. It is called once, in the backward's thread,
  // in the order of the buckets.
  HookResult(Work work, std::function<at::Tensor()> finish);
  // Of a tensor, or of a list that begins with one.
  HookResult(
      c10::intrusive_ptr<c10::ivalue::Future> future);  // NOLINT(google-explicit-constructor)

  // One more step, after the others.
  HookResult then(std::function<at::Tensor(at::Tensor)> step) &&;
  // Blocks. Once.
  at::Tensor wait();

 private:
  std::function<at::Tensor()> finish_;
};

// Called once for each bucket, in their order, in the backward's thread. What it returns must have
// the buffer's number of elements and type; it replaces the gradients as it is: nothing is divided.
// An exception fails this backward on every rank.
using CommHook = std::function<HookResult(const GradBucket&)>;

// Takes the gradients of some parameters when they have been reduced, in place of `.grad`; an
// optimizer, for example. See Reducer::register_consumer().
struct GradConsumer {
  std::vector<bool> takes;  // by number of the parameter; what is beyond its end is not taken
  bool keeps = false;       // gradients become `.grad` all the same; otherwise that is undefined
  // Called at the end of each backward that went well on all ranks, with all its buckets and with
  // the parameters that some rank has used: gradients of others have no meaning. Must do the same
  // on all ranks. If it throws, the group is aborted.
  std::function<void(const std::vector<GradBucket>& buckets, const std::vector<bool>& used)>
      function;
};

}  // namespace convoy
