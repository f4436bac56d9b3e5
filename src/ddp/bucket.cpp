#include "ddp/bucket.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"

namespace convoy {

at::Tensor alias(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like) {
  const at::NoGradGuard no_grad;
  at::Tensor made = at::empty({0}, flat.options());
  c10::DimVector strides(like.strides());
  if (!like.is_non_overlapping_and_dense()) strides = c10::contiguous_strides(like.sizes());
  made.set_(flat.storage(), flat.storage_offset() + offset, like.sizes(), strides);
  return made;
}

bool is_alias(const at::Tensor& tensor, const at::Tensor& slot) {
  return tensor.defined() && tensor.layout() == c10::kStrided &&
         tensor.const_data_ptr() == slot.const_data_ptr() && tensor.is_alias_of(slot) &&
         tensor.sizes().equals(slot.sizes()) && tensor.strides().equals(slot.strides());
}

Bucket make_bucket(const ProcessGroup& group, const std::vector<at::Tensor>& parameters,
                   std::vector<std::size_t> indices) {
  CONVOY_CHECK(!indices.empty());
  Bucket bucket;
  std::int64_t elements = 0;
  for (const std::size_t i : indices) elements += parameters[i].numel();
  const at::Tensor& first = parameters[indices[0]];
  bucket.buffer =
      group.allocate({elements}, at::TensorOptions().dtype(first.dtype()).device(first.device()));
  std::int64_t offset = 0;
  for (const std::size_t i : indices) {
    bucket.slots.push_back(alias(bucket.buffer, offset, parameters[i]));
    offset += parameters[i].numel();
  }
  bucket.parameters = std::move(indices);
  return bucket;
}

GradBucket BucketAccess::make(std::size_t index, std::size_t count, const Bucket& bucket,
                              const std::vector<at::Tensor>& parameters,
                              const ProcessGroup& group) {
  GradBucket made;
  made.index_ = index;
  made.count_ = count;
  made.buffer_ = bucket.buffer;
  made.indices_ = bucket.parameters;
  for (const std::size_t i : bucket.parameters) made.parameters_.push_back(parameters[i]);
  made.group_ = group;
  return made;
}

std::vector<at::Tensor> GradBucket::gradients() const {
  std::vector<at::Tensor> made;
  made.reserve(parameters_.size());
  std::int64_t offset = 0;
  for (const at::Tensor& parameter : parameters_) {
    made.push_back(alias(buffer_, offset, parameter));
    offset += parameter.numel();
  }
  return made;
}

GradBucket GradBucket::with(at::Tensor buffer) const {
  if (!buffer.defined() || buffer.numel() != buffer_.numel() || !buffer.is_contiguous()) {
    fail(ErrorKind::kInvalidArgument, "GradBucket::with: bucket ", index_, " needs a contiguous ",
         "tensor of ", buffer_.numel(), " elements");
  }
  GradBucket other = *this;
  other.buffer_ = buffer.view({-1});
  return other;
}

}  // namespace convoy
