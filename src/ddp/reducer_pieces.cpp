// Reducer: gradients that are made in shared memory, and are reduced where they are.
#include <ATen/Functions.h>

#include "convoy/allocator.h"
#include "ddp/reducer_impl.h"
#include "tensor/memory.h"

namespace convoy {

// With the step allocator, gradients are made where the other ranks see them.
void Reducer::Impl::enter_births() {
  if (!births_) {
    if (size_ == 1 || !is_allocator_installed() || !travels_in_pieces()) return;
    std::vector<std::size_t> sizes;
    for (const at::Tensor& tensor : tensors_) {
      if (tensor.nbytes() >= kLeastPiece) sizes.push_back(tensor.nbytes());
    }
    births_ = std::make_unique<SharedBirths>(std::move(sizes));
  }
  births_->enter();
}

// True if the gradient lies in shared memory, and nobody but the reduction needs it in its bucket.
// Each rank decides that for itself.
bool Reducer::Impl::can_stay(std::size_t index) const {
  const Parameter& parameter = parameters_[index];
  const Bucket& bucket = buckets_[parameter.bucket];
  const at::Tensor& slot = bucket.slots[parameter.slot];
  const at::Tensor& gradient = tensors_[index].grad();
  if (!births_ || !travels_in_pieces() || slot.nbytes() < kLeastPiece) return false;
  const ShardPort* const port = port_of(bucket);
  // What is written to while backward runs must be nobody else's, and autograd may make a view of
  // what it still needs the gradient of a parameter: in `w.unsqueeze(0) + x` both get one memory.
  const bool may_stay = port == nullptr ? late_now_ : port->reads_in_place() && defers(bucket);
  if (hook_ || join_ || !consumers_.empty() || !may_stay ||
      options_.nonfinite != NonFinite::kIgnore) {
    return false;
  }
  return gradient.defined() && gradient.layout() == c10::kStrided && !gradient.requires_grad() &&
         gradient.scalar_type() == slot.scalar_type() && slot.scalar_type() == parameter.type &&
         gradient.sizes().equals(slot.sizes()) && gradient.strides().equals(slot.strides()) &&
         is_shared_memory(gradient);
}

// Autograd may give two parameters views of one memory, which must not be reduced twice: those go
// into their bucket.
void Reducer::Impl::move_shared_ones(const Bucket& bucket) {
  for (const std::size_t i : bucket.parameters) {
    Parameter& parameter = parameters_[i];
    if (!parameter.stays || tensors_[i].grad().storage().use_count() == 1) continue;
    parameter.stays = false;
    copy_in(i);
  }
}

// The same on all ranks: a signature depends on it.
bool Reducer::Impl::travels_in_pieces() const {
  return !hook_ && options_.reduce.kind() != GradReduce::Kind::kWeighted &&
         group_.backend_name() == "convoy";
}

// What is reduced of a bucket: large gradients each for itself, wherever they are, and what is
// between them. Sizes are those of all ranks.
std::vector<at::Tensor> Reducer::Impl::pieces_of(const Bucket& bucket) const {
  std::vector<at::Tensor> pieces;
  std::int64_t begin = 0, end = 0;  // of slots that lie side by side, in the buffer
  const auto add_slots = [&] {
    if (end > begin) pieces.push_back(bucket.buffer.slice(0, begin, end));
    begin = end;
  };
  for (std::size_t k = 0; k < bucket.slots.size(); ++k) {
    const at::Tensor& slot = bucket.slots[k];
    const std::size_t i = bucket.parameters[k];
    if (slot.nbytes() >= kLeastPiece) {
      add_slots();
      const at::Tensor& whole = parameters_[i].stays ? tensors_[i].grad() : slot;
      pieces.push_back(whole.as_strided({whole.numel()}, {1}));
      begin += slot.numel();
    }
    end += slot.numel();
  }
  add_slots();
  return pieces;
}

}  // namespace convoy
