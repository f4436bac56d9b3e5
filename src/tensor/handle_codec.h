#pragma once

// Bytes of a handle, and what makes one valid: without torch, so that the fuzzers see it. The
// handle itself is a template: TensorHandle, or one of plain numbers.
//
//   0  4  magic "CVT1"
//   4  1  kind             5  1  element type, as torch numbers it
//   6  1  layout, likewise 7  1  flags: 1 requires_grad, 2 conjugate, 4 negative, 8 coalesced
//   8  1  dimensions d     9  1  parts p        10  6  zero
//  16  8  offset          24  8  segment        32  8  offset in the segment
//  40  8  storage bytes   48  8d sizes          then 8d strides if strided or meta,
//  then p parts, each a handle of its own with its length (8) in front
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/wire.h"

namespace convoy {

// Wire values: only append.
enum class HandleKind : std::uint8_t { kStrided, kSparseCoo, kSparseCompressed, kMeta, kNested };

// A handle has the members of TensorHandle, with any types for `type` and `layout` that numbers
// convert to, and of `Types` these are asked:
//
//   static std::size_t bytes(type)      of an element; 0: no such type has handles
//   static bool is_complex(type), is_floating(type), is_long(type)
template <class Handle, class Types>
class HandleCodec {
 public:
  static constexpr std::size_t kHeaderBytes = 48;
  // As torch numbers layouts.
  static constexpr int kStrided = 0, kSparse = 1, kSparseCsr = 2, kSparseCsc = 4, kSparseBsr = 5,
                       kSparseBsc = 6;

  static std::string encode(const Handle& handle) {
    std::string bytes;
    bytes.reserve(kHeaderBytes + 16 * handle.sizes.size());
    append(WireWriter(bytes), handle);
    return bytes;
  }

  // kInvalidArgument for bytes that are no valid handle.
  static Handle decode(std::string_view bytes) { return parse(bytes, 0); }

  // Of a strided handle: all elements are inside of the storage.
  static void check_extent(const Handle& handle) {
    const std::int64_t last = last_element(handle);
    const auto item = static_cast<std::int64_t>(Types::bytes(handle.type));
    std::int64_t end = 0;
    if (__builtin_add_overflow(last < 0 ? handle.offset : last, last < 0 ? 0 : 1, &end) ||
        __builtin_mul_overflow(end, item, &end) ||
        static_cast<std::uint64_t>(end) > handle.storage_bytes) {
      bad("its elements are not all inside of its storage");
    }
    if (static_cast<bool>(handle.storage) != (handle.storage_bytes > 0)) {
      bad("it has a storage without a place, or a place without a storage");
    }
  }

  [[noreturn]] static void bad(const char* why) { WireReader(std::string_view(), kWhat).bad(why); }

 private:
  static constexpr std::array<char, 4> kMagic = {'C', 'V', 'T', '1'};
  static constexpr std::size_t kMaxDimensions = 64;
  static constexpr const char* kWhat = "handle of a tensor";
  enum Flag : std::uint8_t { kRequiresGrad = 1, kConjugate = 2, kNegative = 4, kCoalesced = 8 };

  static bool is_compressed(int layout) {
    return layout == kSparseCsr || layout == kSparseCsc || layout == kSparseBsr ||
           layout == kSparseBsc;
  }

  static bool has_strides(HandleKind kind) {
    return kind == HandleKind::kStrided || kind == HandleKind::kMeta;
  }

  // Sizes and strides may be anything that somebody sent: every sum is checked. The number of the
  // last element, -1 if there is none.
  static std::int64_t last_element(const Handle& handle) {
    std::int64_t last = handle.offset;
    std::int64_t count = 1;
    bool empty = false;
    for (std::size_t i = 0; i < handle.sizes.size(); ++i) {
      const std::int64_t size = handle.sizes[i], stride = handle.strides[i];
      if (size < 0 || stride < 0) bad("a size or stride is negative");
      empty = empty || size == 0;
      std::int64_t reach = 0;
      if (__builtin_mul_overflow(count, std::max<std::int64_t>(size, 1), &count) ||
          __builtin_mul_overflow(std::max<std::int64_t>(size - 1, 0), stride, &reach) ||
          __builtin_add_overflow(last, reach, &last)) {
        bad("its sizes are beyond any memory");
      }
    }
    if (handle.offset < 0) bad("its offset is negative");
    return empty ? -1 : last;
  }

  static std::size_t parts_of(HandleKind kind) {
    switch (kind) {
      case HandleKind::kStrided: return 0;
      case HandleKind::kSparseCoo: return 2;
      case HandleKind::kSparseCompressed: return 3;
      case HandleKind::kMeta: return 0;
      case HandleKind::kNested: return 4;
    }
    bad("its kind is unknown");
  }

  static void check_nested(const Handle& handle) {
    if (static_cast<std::uint8_t>(handle.layout) != kStrided || !handle.sizes.empty()) {
      bad("kind and layout do not match");
    }
    const auto& parts = handle.parts;
    if (parts[0].type != handle.type || parts[0].sizes.size() != 1) bad("its buffer is none");
    for (std::size_t i = 1; i < parts.size(); ++i) {
      if (!Types::is_long(parts[i].type) || parts[i].sizes.size() != (i == 3 ? 1U : 2U)) {
        bad("its sizes, strides or offsets are none");
      }
    }
    if (parts[1].sizes != parts[2].sizes || parts[1].sizes[0] != parts[3].sizes[0]) {
      bad("its sizes, strides and offsets do not match");
    }
  }

  static void check(const Handle& handle) {
    if (Types::bytes(handle.type) == 0) bad("its element type is unknown");
    const bool complex = Types::is_complex(handle.type);
    const bool real = Types::is_floating(handle.type);
    if (handle.conjugate && !complex) bad("it conjugates numbers that are not complex");
    if (handle.requires_grad && !complex && !real) bad("its type can have no gradient");
    if (handle.parts.size() != parts_of(handle.kind)) bad("it has too few or too many parts");
    for (const auto& part : handle.parts) {
      if (part.kind != HandleKind::kStrided) bad("a part has parts");
    }
    const int layout = static_cast<std::uint8_t>(handle.layout);
    switch (handle.kind) {
      case HandleKind::kStrided:
        if (layout != kStrided) bad("kind and layout do not match");
        return check_extent(handle);
      case HandleKind::kSparseCoo:
        if (layout != kSparse) bad("kind and layout do not match");
        break;
      case HandleKind::kSparseCompressed:
        if (!is_compressed(layout)) bad("kind and layout do not match");
        break;
      case HandleKind::kMeta:
        if (layout != kStrided) bad("kind and layout do not match");
        if (handle.storage) bad("a meta tensor has no memory");
        last_element(handle);
        return;
      case HandleKind::kNested: return check_nested(handle);
    }
    if (handle.parts.back().type != handle.type) bad("its values are of another type");
    for (const std::int64_t size : handle.sizes) {
      if (size < 0) bad("a size is negative");
    }
  }

  // The fixed part: its fields go as one.
  struct Header {
    std::array<char, 4> magic;
    std::uint8_t kind;
    std::int8_t type;
    std::int8_t layout;
    std::uint8_t flags;
    std::uint8_t dimensions;
    std::uint8_t parts;
    std::array<std::uint8_t, 6> zero;
    std::int64_t offset;
    std::uint64_t segment;
    std::uint64_t segment_offset;
    std::uint64_t storage_bytes;
  };
  static_assert(sizeof(Header) == kHeaderBytes && WireField<Header>);

  static void append(WireWriter out, const Handle& handle) {
    out.put(Header{
        .magic = kMagic,
        .kind = static_cast<std::uint8_t>(handle.kind),
        .type = static_cast<std::int8_t>(handle.type),
        .layout = static_cast<std::int8_t>(handle.layout),
        .flags = static_cast<std::uint8_t>(
            (handle.requires_grad ? kRequiresGrad : 0) | (handle.conjugate ? kConjugate : 0) |
            (handle.negative ? kNegative : 0) | (handle.coalesced ? kCoalesced : 0)),
        .dimensions = static_cast<std::uint8_t>(handle.sizes.size()),
        .parts = static_cast<std::uint8_t>(handle.parts.size()),
        .zero = {},
        .offset = handle.offset,
        .segment = static_cast<std::uint64_t>(handle.storage.segment),
        .segment_offset = handle.storage.offset,
        .storage_bytes = handle.storage_bytes,
    });
    out.put(bytes_of(handle.sizes));
    if (has_strides(handle.kind)) out.put(bytes_of(handle.strides));
    for (const auto& part : handle.parts) {
      out.put_sized<std::uint64_t>(encode(part));
    }
  }

  template <class Numbers>
  static std::string_view bytes_of(const Numbers& numbers) {
    static_assert(std::is_same_v<typename Numbers::value_type, std::int64_t>);
    return {reinterpret_cast<const char*>(numbers.data()), sizeof(std::int64_t) * numbers.size()};
  }

  static Handle parse(std::string_view bytes, int depth) {
    if (depth > 1) bad("a part has parts");
    WireReader in(bytes, kWhat);
    in.take_magic({kMagic.data(), kMagic.size()});
    Handle handle;
    handle.kind = static_cast<HandleKind>(in.take<std::uint8_t>());
    handle.type = static_cast<decltype(handle.type)>(in.take<std::int8_t>());
    handle.layout = static_cast<decltype(handle.layout)>(in.take<std::int8_t>());
    const auto flags = in.take<std::uint8_t>();
    if (flags > (kRequiresGrad | kConjugate | kNegative | kCoalesced)) bad("its flags are unknown");
    handle.requires_grad = (flags & kRequiresGrad) != 0;
    handle.conjugate = (flags & kConjugate) != 0;
    handle.negative = (flags & kNegative) != 0;
    handle.coalesced = (flags & kCoalesced) != 0;
    const std::size_t dimensions = in.take<std::uint8_t>();
    const std::size_t parts = in.take<std::uint8_t>();
    if (dimensions > kMaxDimensions) bad("it has too many dimensions");
    in.take_zeros(6);
    handle.offset = in.take<std::int64_t>();
    handle.storage.segment =
        static_cast<decltype(handle.storage.segment)>(in.take<std::uint64_t>());
    handle.storage.offset = in.take<std::uint64_t>();
    handle.storage_bytes = in.take<std::uint64_t>();
    for (std::size_t i = 0; i < dimensions; ++i) handle.sizes.push_back(in.take<std::int64_t>());
    if (has_strides(handle.kind)) {
      for (std::size_t i = 0; i < dimensions; ++i) {
        handle.strides.push_back(in.take<std::int64_t>());
      }
    }
    for (std::size_t i = 0; i < parts; ++i) {
      handle.parts.push_back(parse(in.take_sized<std::uint64_t>(), depth + 1));
    }
    in.end();
    check(handle);
    return handle;
  }
};

}  // namespace convoy
