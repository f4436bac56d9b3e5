#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "convoy/group.h"
#include "convoy/work.h"

// The interface of comm hooks (convoy/hooks.h) and of optimizers that run in backward.
namespace convoy {

// A bucket, as a comm hook sees it: gradients that are reduced together. All of them are computed;
// none is divided yet. Cheap to copy; valid until the backward ends.
class GradBucket {
 public:
  // Index of the bucket, in the order in which hooks are called. It is the same on all ranks. It is
  // also the same at every step until the layout changes (frozen or thawed parameters, another
  // group).
  std::size_t index() const { return index_; }
  std::size_t count() const { return count_; }
  // Number of this backward, counted by the reducer from 1, including failed ones. The same on all
  // ranks.
  std::uint64_t backward() const { return backward_; }
  // True if the hook gets no further bucket in this backward. (A backward that detects thawed
  // parameters has additional buckets for them.)
  bool is_last() const { return is_last_; }
  // All gradients concatenated: 1-D, contiguous.
  const at::Tensor& buffer() const { return buffer_; }
  // The gradient of each parameter, with the parameter's shape and strides, as a view of the
  // buffer.
  std::vector<at::Tensor> gradients() const;
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // Indices of the parameters in the reducer. State that a hook keeps by this index survives a
  // change of layout.
  const std::vector<std::size_t>& indices() const { return indices_; }
  // The group for the hook's operations. It belongs to the hook: if the hook fails on one rank, the
  // other ranks do not wait. Operations on another group have no such protection.
  const ProcessGroup& group() const { return group_; }
  // The same bucket with another buffer, for a hook that wraps another. Throws kInvalidArgument
  // unless the buffer is contiguous and has the same number of elements.
  GradBucket with(const at::Tensor& buffer) const;

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

// The result of a comm hook: the reduced buffer, now or later.
class HookResult {
 public:
  HookResult(at::Tensor result);  // NOLINT(google-explicit-constructor): return bucket.buffer();
  // After `work` is done, `result` holds the result.
  HookResult(Work work, at::Tensor result);
  // After `work` is done, `finish` returns the result. It is called once, on the thread of the
  // backward, in the order of the buckets.
  HookResult(Work work, std::function<at::Tensor()> finish);
  // The future holds a tensor, or a list whose first tensor is the result.
  HookResult(
      c10::intrusive_ptr<c10::ivalue::Future> future);  // NOLINT(google-explicit-constructor)

  // Adds a step that runs after the others.
  HookResult then(std::function<at::Tensor(at::Tensor)> step) &&;
  // Blocks until the result is there, and returns it. Call it once. Throws the error of the work or
  // the future; kInvalidArgument if the future holds no tensor.
  at::Tensor wait();

 private:
  std::function<at::Tensor()> finish_;
};

// Called once for each bucket, in order, on the thread of the backward. The result must have the
// buffer's number of elements and type. It replaces the gradients unchanged: nothing is divided. An
// exception fails this backward on every rank.
using CommHook = std::function<HookResult(const GradBucket&)>;

// Consumes the reduced gradients of some parameters instead of `.grad`, for example an optimizer.
// See Reducer::register_consumer().
struct GradConsumer {
  std::vector<bool> takes;  // by parameter index; missing entries are false
  bool keeps = false;       // gradients are also stored in `.grad`; false: it is undefined
  // Called at the end of each backward that succeeded on all ranks. Gets all buckets, and which
  // parameters any rank has used: other gradients are meaningless. Must do the same on all ranks.
  // If it throws, the group is aborted.
  std::function<void(const std::vector<GradBucket>& buckets, const std::vector<bool>& used)>
      function;
};

}  // namespace convoy
