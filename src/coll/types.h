#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "coll/shape.h"
#include "convoy/reduce_op.h"

namespace convoy::coll {

// Element types of the collectives. Values are part of the fingerprint that ranks compare: only
// append.
enum class DataType : std::uint8_t {
  kF32,
  kF64,
  kF16,
  kBF16,
  kF8E4M3,  // no infinity, one NaN code per sign (torch's float8_e4m3fn)
  kF8E5M2,
  kI8,
  kI16,
  kI32,
  kI64,
  kU8,
  kU16,
  kU32,
  kU64,
  kBool,  // one byte; any non-zero byte reads as true, results are 0 or 1
  kC64,   // pairs (real, imaginary) of f32
  kC128,  // of f64
};
inline constexpr int kDataTypes = 17;

using convoy::ReduceOp;  // its values are part of the fingerprint too
inline constexpr int kReduceOps = 9;
using convoy::Rounding;  // and so are these
inline constexpr int kRoundings = 3;

[[noreturn]] void refuse_type(DataType type);

// Elements in memory: one of several buffers of an operation.
struct Piece {
  void* data = nullptr;
  std::size_t count = 0;
  Shape shape = {};
};

// Throws kInvalidArgument for a value that is no type: it may come from a peer or a cast.
inline std::size_t size_of(DataType type) {
  constexpr std::array<std::uint8_t, kDataTypes> kSizes = {4, 8, 2, 2, 1, 1, 1, 2, 4,
                                                           8, 1, 2, 4, 8, 1, 8, 16};
  const auto index = static_cast<std::size_t>(type);
  if (index >= kSizes.size()) [[unlikely]]
    refuse_type(type);
  return kSizes[index];
}
// Signed and unsigned; not bool.
constexpr bool is_integer(DataType type) { return type >= DataType::kI8 && type <= DataType::kU64; }
// "12 x f32": so many bytes as elements.
std::string describe_elements(std::size_t bytes, DataType type);
// "f32", "bf16", "f8e4m3", "c64", ...
std::string_view to_string(DataType type);
// "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum".
std::string_view to_string(ReduceOp op);
// "none", "f16", "bf16".
std::string_view to_string(Rounding rounding);

}  // namespace convoy::coll
