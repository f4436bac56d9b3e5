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

}  // namespace convoy
