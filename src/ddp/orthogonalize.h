#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace convoy {

// Makes the columns of a contiguous matrix (f32 or f64) orthonormal, in place and from the left, by
// Gram-Schmidt in f64: the same bits on every machine. `epsilon` is added to their lengths. A
// column that depends on those before it, or is zero, becomes zero: returns their numbers.
std::vector<std::int64_t> orthogonalize(const at::Tensor& matrix, double epsilon);

}  // namespace convoy
