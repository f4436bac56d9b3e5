#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace convoy {

// Which floating-point types a model computes and communicates with; its parameters stay in their
// own, mostly f32, outside of forward and backward: optimizers and checkpoints see these. Complex
// numbers and integers are left alone. docs/reference/ddp.md has the rules.
struct MixedPrecision {
  // Forward and backward compute with copies of the parameters in this type.
  std::optional<c10::ScalarType> param_dtype = {};
  // Gradients travel in this; unset: in param_dtype. Sums are made in f32 in any case.
  std::optional<c10::ScalarType> reduce_dtype = {};
  // Buffers become this for good, when the model is wrapped.
  std::optional<c10::ScalarType> buffer_dtype = {};
  // Tensors that forward gets become param_dtype.
  bool cast_forward_inputs = true;
};

}  // namespace convoy
