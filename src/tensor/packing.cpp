#include "tensor/packing.h"

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "base/error.h"

namespace convoy {
namespace {

// A lazy conjugate or negative has other bits in memory than it has values.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

void check(const at::Tensor& tensor) {
  if (!tensor.defined()) fail(ErrorKind::kInvalidArgument, "a tensor is undefined");
  if (!tensor.device().is_cpu()) {
    fail(ErrorKind::kUnsupported, "a tensor is on ", tensor.device().str(), ", not on the CPU");
  }
  if (tensor.layout() != c10::kStrided) {
    fail(ErrorKind::kUnsupported, "a tensor has layout ", c10::str(tensor.layout()),
         ", not strided");
  }
}

coll::Piece piece_of(const at::Tensor& tensor) {
  return {tensor.data_ptr(), static_cast<std::size_t>(tensor.numel())};
}

}  // namespace

const at::Tensor& Packing::keep(at::Tensor tensor) {
  kept_.push_back(std::move(tensor));
  return kept_.back();
}

coll::Piece Packing::input(const at::Tensor& tensor) {
  check(tensor);
  if (is_plain(tensor)) return piece_of(keep(tensor));
  const at::AutoDispatchBelowAutograd guard;
  return piece_of(keep(tensor.resolve_conj().resolve_neg().contiguous()));
}

coll::Piece Packing::output(const at::Tensor& tensor) {
  check(tensor);
  if (is_plain(tensor)) return piece_of(keep(tensor));
  at::assert_no_internal_overlap(tensor);  // it could not be written
  pairs_.push_back({tensor, at::empty(tensor.sizes(), tensor.options())});
  return piece_of(pairs_.back().packed);
}

coll::Piece Packing::in_out(const at::Tensor& tensor) {
  check(tensor);
  if (is_plain(tensor)) return piece_of(keep(tensor));
  at::assert_no_internal_overlap(tensor);
  const at::AutoDispatchBelowAutograd guard;
  auto packed = at::empty(tensor.sizes(), tensor.options().requires_grad(false));
  packed.copy_(tensor);
  pairs_.push_back({tensor, std::move(packed)});
  return piece_of(pairs_.back().packed);
}

coll::Piece Packing::bytes(const coll::Piece& piece, const at::Tensor& tensor) {
  return {piece.data, piece.count * tensor.element_size()};
}

void Packing::unpack() {
  // Below the counting of changes too, which inference tensors have only where they were made: this
  // may be another thread.
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (const auto& [target, packed] : pairs_) target.copy_(packed);
}

}  // namespace convoy
