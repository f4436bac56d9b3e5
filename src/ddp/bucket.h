#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "convoy/reducer.h"

namespace convoy {

// A tensor shaped and strided like `like` (contiguous, if that overlaps or has holes) in the memory
// of a flat one. Autograd does not see it as a view: optimizers detach gradients in place.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like);
// True if the tensor is that one: same memory, same strides.
bool is_alias(const at::Tensor& tensor, const at::Tensor& slot);

// Gradients in one piece of memory, and the places of the single ones in it.
struct Bucket {
  std::vector<std::size_t> parameters;  // their numbers in the reducer
  at::Tensor buffer;
  std::vector<at::Tensor> slots;  // by parameter, made by alias()

  // In a backward:
  std::size_t pending = 0;  // parameters whose gradient is not there yet
  bool launched = false;
  bool skipped = false;
  std::optional<HookResult> result;
};

// Memory for the gradients of these of the parameters: group memory if the group has such.
Bucket make_bucket(const ProcessGroup& group, const std::vector<at::Tensor>& parameters,
                   std::vector<std::size_t> indices);

// Fills a GradBucket, whose members are nobody else's.
struct BucketAccess {
  static GradBucket make(std::size_t index, std::size_t count, const Bucket& bucket,
                         const std::vector<at::Tensor>& parameters, const ProcessGroup& group);
};

}  // namespace convoy
