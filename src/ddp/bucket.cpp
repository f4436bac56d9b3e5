#include "ddp/bucket.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/strides.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"

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
  return tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_conj() &&
         !tensor.is_neg() && tensor.const_data_ptr() == slot.const_data_ptr() &&
         tensor.is_alias_of(slot) && tensor.sizes().equals(slot.sizes()) &&
         tensor.strides().equals(slot.strides());
}

const at::Tensor& Bucket::handle(std::size_t slot) {
  if (!is_alias(handles[slot], slots[slot])) {
    handles[slot] =
        alias(buffer, slots[slot].storage_offset() - buffer.storage_offset(), slots[slot]);
  }
  return handles[slot];
}

at::Tensor allocate_for(const ProcessGroup& group, std::int64_t elements,
                        const at::TensorOptions& options) {
  try {
    return group.allocate({elements}, options);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kResource) throw;
    log_warn("no group memory for ", elements, " elements (", e.what(), "): using ordinary memory");
    return at::empty({elements}, options);
  }
}

Bucket make_bucket(const ProcessGroup& group, const std::vector<at::Tensor>& parameters,
                   std::vector<std::size_t> indices, at::ScalarType type) {
  CONVOY_CHECK(!indices.empty());
  Bucket bucket;
  std::int64_t elements = 0;
  for (const std::size_t i : indices) elements += parameters[i].numel();
  const at::Tensor& first = parameters[indices[0]];
  bucket.buffer =
      allocate_for(group, elements, at::TensorOptions().dtype(type).device(first.device()));
  std::int64_t offset = 0;
  for (const std::size_t i : indices) {
    bucket.slots.push_back(alias(bucket.buffer, offset, parameters[i]));
    offset += parameters[i].numel();
  }
  bucket.handles.resize(bucket.slots.size());
  bucket.parameters = std::move(indices);
  return bucket;
}

GradBucket BucketAccess::make(const std::vector<Bucket>& buckets, std::size_t index,
                              const std::vector<at::Tensor>& parameters, const ProcessGroup& group,
                              std::uint64_t backward) {
  const Bucket& bucket = buckets[index];
  GradBucket made;
  made.index_ = index;
  made.count_ = buckets.size();
  made.backward_ = backward;
  made.is_last_ = std::all_of(buckets.begin() + static_cast<std::ptrdiff_t>(index) + 1,
                              buckets.end(), [](const Bucket& other) { return other.skipped; });
  made.buffer_ = bucket.buffer;
  made.slots_ = bucket.slots;
  made.indices_ = bucket.parameters;
  for (const std::size_t i : bucket.parameters) made.parameters_.push_back(parameters[i]);
  made.group_ = group;
  return made;
}

std::vector<at::Tensor> GradBucket::gradients() const {
  std::vector<at::Tensor> made;
  made.reserve(slots_.size());
  std::int64_t offset = 0;
  for (const at::Tensor& slot : slots_) {
    made.push_back(alias(buffer_, offset, slot));
    offset += slot.numel();
  }
  return made;
}

GradBucket GradBucket::with(const at::Tensor& buffer) const {
  if (!buffer.defined() || buffer.numel() != buffer_.numel() || !buffer.is_contiguous()) {
    fail(ErrorKind::kInvalidArgument, "GradBucket::with: bucket ", index_, " needs a contiguous ",
         "tensor of ", buffer_.numel(), " elements");
  }
  GradBucket other = *this;
  other.buffer_ = buffer.view({-1});
  return other;
}

}  // namespace convoy
