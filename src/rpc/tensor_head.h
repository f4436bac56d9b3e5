#pragma once

// The bytes of a tensor in a call, and what makes them valid: without torch, so that the fuzzers
// see it.
//
//   0  1  kind              1  1  element type, as torch numbers it
//   2  1  flags             3  1  dimensions d
//   4  4  piece: 0, the tensor's bytes follow in the message; n, they are piece n of it
//   8  8  bytes
//  16  8d sizes             then 8d strides if flag kStrides is set
//  then the bytes, if piece is 0
//
// Pieces are used in order, each once.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/wire.h"

namespace convoy::rpc {

// Wire values: only append.
enum class TensorKind : std::uint8_t {
  kUndefined,  // no tensor
  kExtent,     // the memory from the first element to the last
  kPacked,     // the elements without the gaps between them, in the order of their addresses
  kHandle,     // a TensorHandle (tensor/handle_codec.h), then so many heads of kind kExtent, of
               // bytes without sizes, as it has storages: sparse, nested and meta tensors
  kLent,       // what share::to_bytes() gives: the memory is shared
};

struct TensorHead {
  static constexpr std::size_t kMostDimensions = 64;
  static constexpr std::size_t kFixedBytes = 16;
  enum Flag : std::uint8_t { kRequiresGrad = 1, kConjugate = 2, kNegative = 4, kStrides = 8 };

  // No memory is taken for more than this, or twice as many bytes as came.
  static constexpr std::uint64_t kSmallExtent = 8192;

  // What comes first.
  struct Fixed {
    TensorKind kind = TensorKind::kUndefined;
    std::uint8_t type = 0;
    std::uint8_t flags = 0;
    std::uint8_t dimensions = 0;
    std::uint32_t piece = 0;
    std::uint64_t bytes = 0;
  };
  static_assert(sizeof(Fixed) == kFixedBytes);

  TensorKind kind = TensorKind::kUndefined;
  std::uint8_t type = 0;
  std::uint8_t flags = 0;
  std::uint8_t dimensions = 0;
  std::uint32_t piece = 0;
  std::uint64_t bytes = 0;
  std::array<std::int64_t, kMostDimensions> sizes;    // the first `dimensions` of them
  std::array<std::int64_t, kMostDimensions> strides;  // always filled in

  std::span<const std::int64_t> size_span() const { return {sizes.data(), dimensions}; }
  std::span<const std::int64_t> stride_span() const { return {strides.data(), dimensions}; }

  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init): the arrays are filled as needed
  TensorHead() {}

  static std::size_t wire_bytes(std::size_t dimensions, bool strides) {
    return kFixedBytes + 8 * dimensions * (strides ? 2 : 1);
  }
  void write(WireWriter& out) const {
    out.put(Fixed{kind, type, flags, dimensions, piece, bytes});
    for (const std::int64_t size : size_span()) out.put(size);
    if ((flags & kStrides) == 0) return;
    for (const std::int64_t stride : stride_span()) out.put(stride);
  }
};

// How the elements of a strided tensor lie in memory: the dimensions that have more than one
// element, from the largest stride to the smallest. (Those of stride 0 repeat the same elements.)
struct StrideOrder {
  std::array<std::uint8_t, TensorHead::kMostDimensions> order;
  std::size_t count = 0;
  std::uint64_t elements = 1;  // distinct ones, if they do not overlap
  std::uint64_t extent = 1;    // from the first element to behind the last
  bool empty = false;
  bool overlaps = false;  // some elements lie on others
  bool overflow = false;  // beyond any memory

  // No gaps: the extent is the elements.
  bool dense() const { return elements == extent; }

  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
  StrideOrder() {}
};

inline StrideOrder stride_order(std::span<const std::int64_t> sizes,
                                std::span<const std::int64_t> strides) {
  StrideOrder result;
  std::uint64_t numel = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || strides[i] < 0) {
      result.overflow = true;
      return result;
    }
    if (sizes[i] == 0) result.empty = true;
    const auto size = static_cast<std::uint64_t>(std::max<std::int64_t>(sizes[i], 1));
    if (__builtin_mul_overflow(numel, size, &numel) || numel > INT64_MAX) result.overflow = true;
    if (sizes[i] <= 1 || strides[i] == 0) continue;
    std::size_t at = result.count++;
    while (at > 0 && strides[result.order[at - 1]] < strides[i]) {
      result.order[at] = result.order[at - 1];
      --at;
    }
    result.order[at] = static_cast<std::uint8_t>(i);
  }
  if (result.empty) {
    result.elements = result.extent = 0;
    return result;
  }
  for (std::size_t at = result.count; at-- > 0;) {
    const auto size = static_cast<std::uint64_t>(sizes[result.order[at]]);
    const auto stride = static_cast<std::uint64_t>(strides[result.order[at]]);
    if (stride < result.extent) result.overlaps = true;
    std::uint64_t reach = 0;
    if (__builtin_mul_overflow(size - 1, stride, &reach) ||
        __builtin_add_overflow(result.extent, reach, &result.extent) || result.extent > INT64_MAX) {
      result.overflow = true;
      return result;
    }
    // At most numel, which fits.
    result.elements *= size;
  }
  return result;
}

// Reads and checks a head. `item_bytes(type)`: of an element; 0 for a type that does not travel.
template <class ItemBytes>
TensorHead take_tensor_head(WireReader& in, ItemBytes item_bytes) {
  TensorHead head;
  head.kind = in.take<TensorKind>();
  head.type = in.take<std::uint8_t>();
  head.flags = in.take<std::uint8_t>();
  head.dimensions = in.take<std::uint8_t>();
  head.piece = in.take<std::uint32_t>();
  head.bytes = in.take<std::uint64_t>();
  if (head.kind > TensorKind::kLent) in.bad("a tensor's kind is unknown");
  if (head.flags > 15) in.bad("a tensor's flags are unknown");
  if (head.dimensions > TensorHead::kMostDimensions) in.bad("a tensor has too many dimensions");
  for (std::size_t i = 0; i < head.dimensions; ++i) head.sizes[i] = in.take<std::int64_t>();
  if ((head.flags & TensorHead::kStrides) != 0) {
    for (std::size_t i = 0; i < head.dimensions; ++i) head.strides[i] = in.take<std::int64_t>();
  }
  if (head.piece == 0 && head.bytes > in.left()) in.bad("it is cut off");
  if (head.kind != TensorKind::kExtent && head.kind != TensorKind::kPacked) {
    if (head.dimensions != 0) in.bad("a tensor has sizes that it should not have");
    if (head.kind == TensorKind::kUndefined && (head.bytes != 0 || head.piece != 0)) {
      in.bad("a tensor that is none has bytes");
    }
    return head;
  }
  const std::size_t item = item_bytes(head.type);
  if (item == 0) in.bad("a tensor's element type is unknown");
  if ((head.flags & TensorHead::kStrides) == 0) {
    // Checked below: sizes may be anything, and so may what is computed from them.
    std::uint64_t next = 1;
    for (std::size_t i = head.dimensions; i-- > 0;) {
      head.strides[i] = static_cast<std::int64_t>(next);
      if (head.sizes[i] > 1 &&
          (__builtin_mul_overflow(next, static_cast<std::uint64_t>(head.sizes[i]), &next) ||
           next > INT64_MAX)) {
        in.bad("a tensor's sizes are beyond any memory");
      }
    }
  }
  const StrideOrder order = stride_order(head.size_span(), head.stride_span());
  std::uint64_t bytes = 0;
  const std::uint64_t elements = head.kind == TensorKind::kPacked ? order.elements : order.extent;
  if (order.overflow || __builtin_mul_overflow(elements, std::uint64_t{item}, &bytes)) {
    in.bad("a tensor's sizes are beyond any memory");
  }
  if (bytes != head.bytes) in.bad("a tensor's sizes and bytes do not match");
  if (head.kind == TensorKind::kPacked) {
    // The memory that it needs is larger than what came.
    std::uint64_t extent = 0;
    if (order.overlaps || __builtin_mul_overflow(order.extent, std::uint64_t{item}, &extent) ||
        extent > std::max(2 * bytes, TensorHead::kSmallExtent)) {
      in.bad("a tensor's gaps are larger than its elements");
    }
  }
  return head;
}

}  // namespace convoy::rpc
