#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace convoy {

// The floating-point types in which a model computes and communicates. Outside of forward and
// backward the parameters keep their own type, usually f32: optimizers and checkpoints see only
// that. Complex and integer tensors are not converted. docs/reference/ddp.md has the rules.
struct MixedPrecision {
  // Forward and backward compute with copies of the parameters in this type.
  std::optional<c10::ScalarType> param_dtype = {};
  // Type in which gradients are sent. Unset: param_dtype. Sums are always computed in f32.
  std::optional<c10::ScalarType> reduce_dtype = {};
  // Buffers are converted to this type once, when the model is wrapped.
  std::optional<c10::ScalarType> buffer_dtype = {};
  // Converts the tensor arguments of forward to param_dtype.
  bool cast_forward_inputs = true;
};

}  // namespace convoy
