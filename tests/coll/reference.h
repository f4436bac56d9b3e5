#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "coll/kernels.h"

// What the kernels must compute, element by element in plain arithmetic, written without a look at
// how they do it.
namespace convoy::coll::reference {

using Buffer = std::vector<std::byte>;

// A small binary float: sign, exponent, mantissa.
struct Format {
  int exponent;
  int mantissa;
  bool has_infinity;  // without: only the all-ones code is NaN
  std::uint32_t nan;

  int bias() const { return (1 << (exponent - 1)) - 1; }
  std::uint32_t sign() const { return 1u << (exponent + mantissa); }
};
inline constexpr Format kHalf{5, 10, true, 0x7e00};
inline constexpr Format kBrain{8, 7, true, 0x7fc0};
inline constexpr Format kE4M3{4, 3, false, 0x7f};
inline constexpr Format kE5M2{5, 2, true, 0x7f};

// The value of a code, by the definition of the format.
double decode(const Format& format, std::uint32_t code);
// The nearest code, ties to even.
std::uint32_t encode(const Format& format, float value);

bool has_meaning(DataType type, ReduceOp op);
Buffer reduce(const Reduction& reduction, std::span<const Buffer> sources);

// `count` elements: everyday values, random bits, and the corners of the type (NaN, infinities,
// subnormals, zeros of both signs, extremes), and values whose sums overflow.
Buffer random_elements(DataType type, std::size_t count, std::mt19937_64& random);

}  // namespace convoy::coll::reference
