#include "kernels_wide.h"

#include <cstdint>
#include <type_traits>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace convoy::coll {
namespace {

constexpr std::size_t kVectorBytes = 64;
#include "coll/kernels.inc"

// One of each codec and kind of operation: all would take minutes to compile.
constexpr KernelTable make_table() {
  KernelTable table{};
  const auto set = [&table](DataType type, ReduceOp op, ReduceFunction function) {
    table.reduce[static_cast<int>(type)][static_cast<int>(op)] = function;
  };
  set(DataType::kF32, ReduceOp::kSum, run<Float<float>, Sum>);
  set(DataType::kF32, ReduceOp::kMax, run<Float<float>, Max>);
  set(DataType::kF64, ReduceOp::kPremulSum, run<Float<double>, PremulSum<double>>);
  set(DataType::kF16, ReduceOp::kSum, run<Packed<F16Format, 2>, Sum>);
  set(DataType::kBF16, ReduceOp::kSum, run<BFloat16, Sum>);
  set(DataType::kF8E4M3, ReduceOp::kSum, run<Float8E4M3, Sum>);
  set(DataType::kI16, ReduceOp::kAvg, run_integer_average<i16>);
  set(DataType::kU8, ReduceOp::kSum, run<Integer<u8>, Sum>);
  set(DataType::kBool, ReduceOp::kProduct, run<Boolean, And>);
  set(DataType::kC64, ReduceOp::kProduct, run<Float<float>, ComplexProduct<float>>);
  const auto rounded = [&table](Rounding rounding) -> ReduceFunction& {
    return table.rounded[static_cast<int>(rounding)][static_cast<int>(ReduceOp::kSum)];
  };
  rounded(Rounding::kF16) = run<Rounded<RoundF16>, Sum>;
  rounded(Rounding::kBF16) = run<Rounded<RoundBF16>, Sum>;
  table.stream_copy = stream_copy;
  return table;
}

}  // namespace

constinit const KernelTable kWideKernels = make_table();

}  // namespace convoy::coll
