#pragma once

#include <cstdint>

namespace convoy {

// How values of several ranks become one. Values are part of what ranks compare: only append.
enum class ReduceOp : std::uint8_t {
  kSum,
  kAvg,  // sum divided by the number of ranks
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
  kPremulSum,  // sum of factor * source
};

// Of sums and averages of f32: each source is rounded to a format of 16 bits, they are added in
// f32, and the result is rounded again. The bits are those of the same operation on tensors of that
// format, but nothing is stored in 16 bits. Values are part of what ranks compare: only append.
enum class Rounding : std::uint8_t { kNone, kF16, kBF16 };

}  // namespace convoy
