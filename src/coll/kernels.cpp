#include "coll/kernels.h"

#include <cstring>

#include "base/error.h"
#include "coll/kernel_table.h"

namespace convoy::coll {
namespace {

[[noreturn]] void refuse(DataType type, ReduceOp op) {
  fail(ErrorKind::kInvalidArgument, "reduce operation ", to_string(op), " has no meaning for ",
       to_string(type), " elements; use sum, avg, product, min or max, or convert them");
}

bool in_range(DataType type, ReduceOp op) {
  return static_cast<int>(type) < kDataTypes && static_cast<int>(op) < kReduceOps;
}

ReduceFunction find_rounded(const KernelTable& kernels, DataType type, ReduceOp op,
                            Rounding rounding) {
  const bool known = in_range(type, op) && static_cast<int>(rounding) < kRoundings;
  const ReduceFunction function =
      known && type == DataType::kF32
          ? kernels.rounded[static_cast<int>(rounding)][static_cast<int>(op)]
          : nullptr;
  if (function == nullptr) [[unlikely]] {
    fail(ErrorKind::kInvalidArgument, "only sums and averages of f32 can be rounded to ",
         to_string(rounding), ", not the ", to_string(op), " of ", to_string(type), " elements");
  }
  return function;
}

ReduceFunction find(const KernelTable& kernels, DataType type, ReduceOp op, Rounding rounding) {
  if (rounding != Rounding::kNone) return find_rounded(kernels, type, op, rounding);
  const ReduceFunction function =
      in_range(type, op) ? kernels.reduce[static_cast<int>(type)][static_cast<int>(op)] : nullptr;
  if (function == nullptr) [[unlikely]]
    refuse(type, op);
  return function;
}

}  // namespace

void check_reduction(DataType type, ReduceOp op, Rounding rounding) {
  find(kPortableKernels, type, op, rounding);
}

void reduce(const Reduction& reduction, std::span<const std::byte* const> sources,
            std::span<std::byte* const> targets, std::size_t count, StoreHint hint) {
  const ReduceFunction function =
      find(active_kernels(), reduction.type, reduction.op, reduction.rounding);
  if (sources.empty()) fail(ErrorKind::kInvalidArgument, "reduce: there is no source");
  if (reduction.ranks < 1) {
    fail(ErrorKind::kInvalidArgument, "reduce: ranks is ", reduction.ranks, ", must be at least 1");
  }
  if (sources.size() > kMostAveraged && reduction.op == ReduceOp::kAvg &&
      is_integer(reduction.type)) [[unlikely]] {
    fail(ErrorKind::kUnsupported, "reduce: the average of ", to_string(reduction.type),
         " elements takes up to ", kMostAveraged, " ranks, not ", sources.size(),
         "; average a wider type");
  }
  const std::size_t element = size_of(reduction.type);
  function({.sources = sources.data(),
            .source_count = sources.size(),
            .targets = targets.data(),
            .target_count = targets.size(),
            .bytes = count * element,
            .element = element,
            .ranks = reduction.ranks,
            .factor = reduction.factor,
            .stream = hint == StoreHint::kStreaming});
}

void copy(std::byte* target, const std::byte* source, std::size_t bytes, StoreHint hint) {
  if (bytes == 0) return;
  if (hint == StoreHint::kStreaming) {
    active_kernels().stream_copy(target, source, bytes);
  } else {
    std::memcpy(target, source, bytes);
  }
}

}  // namespace convoy::coll
