#pragma once

#include <cstdint>

namespace convoy {

// How the values of several ranks are combined. Ranks compare these numbers, so only append.
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

// Rounding of sums and averages of f32. Each source is rounded to a 16-bit format, the sources are
// added in f32, and the result is rounded again. The result has the bits of the same operation on
// tensors of that format, but nothing is stored in 16 bits. Ranks compare these numbers, so only
// append.
enum class Rounding : std::uint8_t { kNone, kF16, kBF16 };

}  // namespace convoy
