#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "coll/types.h"

namespace convoy::coll {

// What to do with elements.
//
// The bits of a result depend on the source elements, their order and this, and on nothing else:
// not on the instruction set, alignment, count, chunking or StoreHint.
// - Floats of 8 and 16 bits are widened to f32, combined over all sources, and rounded once, to
//   nearest even. What is too large for f8e4m3, which has no infinity, becomes its largest number
//   (448); in the others it becomes infinity. Both as torch converts.
// - A NaN result is the type's canonical quiet NaN (0x7fc00000, 0x7ff8..., 0x7e00, 0x7fc0, 0x7f),
//   whatever NaN went in.
// - kMin and kMax give NaN if any source is NaN; of equal values (-0 and +0) the first source's is
//   taken.
// - Integers wrap modulo 2^n. kAvg of integers divides the sum, which does not wrap, and truncates
//   toward zero.
// - kBool: sum, max, bor are OR; product, min, band are AND; bxor is XOR.
// - Complex products are (ac - bd, ad + bc), with no special treatment of infinities.
// - With a Rounding, which only sums and averages of f32 can have, sources and result are rounded
//   as if they were stored in that format.
// - The rounding mode and flush-to-zero setting of the calling thread apply.
struct Reduction {
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;
  int ranks = 1;      // divisor of kAvg, at least 1
  double factor = 1;  // of kPremulSum, rounded to the type in which sources are combined
  Rounding rounding = Rounding::kNone;
};

enum class StoreHint {
  kCached,     // results will be read soon, or are small
  kStreaming,  // results bypass the caches where the CPU can do so
};

// For results of so many bytes that are not used at once: what will not be found in a cache anyway
// need not go there.
constexpr StoreHint hint_for_output(std::size_t bytes) {
  return bytes >= std::size_t{16} << 20 ? StoreHint::kStreaming : StoreHint::kCached;
}

// Sources of an average of integers: their sum must fit into the type in which it is computed.
inline constexpr std::size_t kMostAveraged = 32768;

// Throws kInvalidArgument naming type and operation where the combination has no meaning: bitwise
// operations on floats and complex, min and max on complex, avg on bool, premul_sum on integers and
// bool, rounding of anything but sums and averages of f32.
void check_reduction(DataType type, ReduceOp op, Rounding rounding = Rounding::kNone);

// targets[t][k] = op over s of sources[s][k], combined in index order, for all t and k < count.
// A target may be exactly one of the sources; no other overlap is allowed. Addresses need no
// alignment, but streaming is fastest when all targets have equal addresses modulo 64 and are
// aligned to the element size. There is at least one source. Streaming stores are complete (a
// fence) when it returns. Throws as check_reduction, before it touches data, and kUnsupported for
// averages of integers over more than kMostAveraged sources; allocates nothing.
// Thread-safe.
void reduce(const Reduction& reduction, std::span<const std::byte* const> sources,
            std::span<std::byte* const> targets, std::size_t count, StoreHint hint);

// Copies between buffers that do not overlap, of any alignment. As for reduce, streaming stores are
// complete when it returns.
void copy(std::byte* target, const std::byte* source, std::size_t bytes, StoreHint hint);

}  // namespace convoy::coll
