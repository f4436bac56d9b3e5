// Bytes of a handle:
//   0  4  magic "CVT1"
//   4  1  kind             5  1  element type, as torch numbers it
//   6  1  layout, likewise 7  1  flags: 1 requires_grad, 2 conjugate, 4 negative, 8 coalesced
//   8  1  dimensions d     9  1  parts p        10  6  zero
//  16  8  offset          24  8  segment        32  8  offset in the segment
//  40  8  storage bytes   48  8d sizes          then 8d strides if strided,
//  then p parts, each a handle of its own with its length (8) in front
#include "tensor/handle.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>

#include <array>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "tensor/memory.h"
#include "transport/shm/fabric.h"

namespace convoy {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire order is the native one");

constexpr std::array<char, 4> kMagic = {'C', 'V', 'T', '1'};
constexpr std::size_t kHeaderBytes = 48;
constexpr std::size_t kMaxDimensions = 64;

enum Flag : std::uint8_t { kRequiresGrad = 1, kConjugate = 2, kNegative = 4, kCoalesced = 8 };

[[noreturn]] void bad(const char* why) {
  fail(ErrorKind::kInvalidArgument, "this is no handle of a tensor: ", why);
}

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Takes from the front.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <class T>
  T take() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view take(std::size_t length) {
    if (length > bytes_.size()) bad("it is cut off");
    const auto front = bytes_.substr(0, length);
    bytes_.remove_prefix(length);
    return front;
  }
  bool empty() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
};

bool is_compressed(c10::Layout layout) {
  return layout == c10::kSparseCsr || layout == c10::kSparseCsc || layout == c10::kSparseBsr ||
         layout == c10::kSparseBsc;
}

bool by_rows(c10::Layout layout) { return layout == c10::kSparseCsr || layout == c10::kSparseBsr; }

// Types whose elements are plain bytes of a known number.
bool is_plain_type(c10::ScalarType type) {
  const auto number = static_cast<int>(type);
  return number >= 0 && number < static_cast<int>(c10::ScalarType::Undefined) &&
         !c10::isQIntType(type) && c10::elementSize(type) > 0;
}

// Sizes and strides may be anything that somebody sent: every sum is checked.
void check_extent(const TensorHandle& handle) {
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
  const auto item = static_cast<std::int64_t>(c10::elementSize(handle.type));
  std::int64_t end = 0;
  if (__builtin_add_overflow(empty ? handle.offset : last, empty ? 0 : 1, &end) ||
      __builtin_mul_overflow(end, item, &end) ||
      static_cast<std::uint64_t>(end) > handle.storage_bytes) {
    bad("its elements are not all inside of its storage");
  }
  if (static_cast<bool>(handle.storage) != (handle.storage_bytes > 0)) {
    bad("it has a storage without a place, or a place without a storage");
  }
}

std::size_t parts_of(TensorHandle::Kind kind) {
  switch (kind) {
    case TensorHandle::Kind::kStrided: return 0;
    case TensorHandle::Kind::kSparseCoo: return 2;
    case TensorHandle::Kind::kSparseCompressed: return 3;
  }
  bad("its kind is unknown");
}

void check(const TensorHandle& handle) {
  if (!is_plain_type(handle.type)) bad("its element type is unknown");
  if (handle.parts.size() != parts_of(handle.kind)) bad("it has too few or too many parts");
  for (const auto& part : handle.parts) {
    if (part.kind != TensorHandle::Kind::kStrided) bad("a part has parts");
  }
  switch (handle.kind) {
    case TensorHandle::Kind::kStrided:
      if (handle.layout != c10::kStrided) bad("kind and layout do not match");
      return check_extent(handle);
    case TensorHandle::Kind::kSparseCoo:
      if (handle.layout != c10::kSparse) bad("kind and layout do not match");
      break;
    case TensorHandle::Kind::kSparseCompressed:
      if (!is_compressed(handle.layout)) bad("kind and layout do not match");
      break;
  }
  if (handle.parts.back().type != handle.type) bad("its values are of another type");
  for (const std::int64_t size : handle.sizes) {
    if (size < 0) bad("a size is negative");
  }
}

void append(std::string& out, const TensorHandle& handle) {
  out.append(kMagic.data(), kMagic.size());
  put(out, static_cast<std::uint8_t>(handle.kind));
  put(out, static_cast<std::uint8_t>(handle.type));
  put(out, static_cast<std::uint8_t>(handle.layout));
  put(out, static_cast<std::uint8_t>(
               (handle.requires_grad ? kRequiresGrad : 0) | (handle.conjugate ? kConjugate : 0) |
               (handle.negative ? kNegative : 0) | (handle.coalesced ? kCoalesced : 0)));
  put(out, static_cast<std::uint8_t>(handle.sizes.size()));
  put(out, static_cast<std::uint8_t>(handle.parts.size()));
  out.append(6, '\0');
  put(out, handle.offset);
  put(out, std::uint64_t{handle.storage.segment});
  put(out, handle.storage.offset);
  put(out, handle.storage_bytes);
  for (const auto size : handle.sizes) put(out, size);
  if (handle.kind == TensorHandle::Kind::kStrided) {
    for (const auto stride : handle.strides) put(out, stride);
  }
  for (const auto& part : handle.parts) {
    const std::string bytes = encode(part);
    put(out, std::uint64_t{bytes.size()});
    out += bytes;
  }
}

TensorHandle parse(std::string_view bytes, int depth) {
  if (depth > 1) bad("a part has parts");
  Reader in(bytes);
  if (std::memcmp(in.take(kMagic.size()).data(), kMagic.data(), kMagic.size()) != 0) {
    bad("it begins with other bytes, or is of another version");
  }
  TensorHandle handle;
  handle.kind = static_cast<TensorHandle::Kind>(in.take<std::uint8_t>());
  handle.type = static_cast<c10::ScalarType>(in.take<std::int8_t>());
  handle.layout = static_cast<c10::Layout>(in.take<std::int8_t>());
  const auto flags = in.take<std::uint8_t>();
  if (flags > (kRequiresGrad | kConjugate | kNegative | kCoalesced)) bad("its flags are unknown");
  handle.requires_grad = flags & kRequiresGrad;
  handle.conjugate = flags & kConjugate;
  handle.negative = flags & kNegative;
  handle.coalesced = flags & kCoalesced;
  const std::size_t dimensions = in.take<std::uint8_t>();
  const std::size_t parts = in.take<std::uint8_t>();
  if (dimensions > kMaxDimensions) bad("it has too many dimensions");
  if (in.take(6) != std::string_view("\0\0\0\0\0\0", 6)) bad("bytes that must be zero are not");
  handle.offset = in.take<std::int64_t>();
  handle.storage.segment = static_cast<shm::SegmentId>(in.take<std::uint64_t>());
  handle.storage.offset = in.take<std::uint64_t>();
  handle.storage_bytes = in.take<std::uint64_t>();
  for (std::size_t i = 0; i < dimensions; ++i) handle.sizes.push_back(in.take<std::int64_t>());
  if (handle.kind == TensorHandle::Kind::kStrided) {
    for (std::size_t i = 0; i < dimensions; ++i) handle.strides.push_back(in.take<std::int64_t>());
  }
  for (std::size_t i = 0; i < parts; ++i) {
    const auto length = in.take<std::uint64_t>();
    handle.parts.push_back(parse(in.take(length), depth + 1));
  }
  if (!in.empty()) bad("there is more behind it");
  check(handle);
  return handle;
}

}  // namespace

TensorHandle handle_of(const at::Tensor& tensor) {
  if (!tensor.defined()) fail(ErrorKind::kInvalidArgument, "an undefined tensor has no handle");
  if (!tensor.device().is_cpu()) {
    fail(ErrorKind::kUnsupported, "a tensor on ", tensor.device().str(), " has no handle here");
  }
  if (!is_plain_type(tensor.scalar_type())) {
    fail(ErrorKind::kUnsupported, "a tensor of type ", c10::toString(tensor.scalar_type()),
         " has no handle");
  }
  TensorHandle handle;
  handle.type = tensor.scalar_type();
  handle.layout = tensor.layout();
  handle.requires_grad = tensor.requires_grad();
  handle.sizes = tensor.sizes().vec();
  if (handle.layout == c10::kSparse) {
    handle.kind = TensorHandle::Kind::kSparseCoo;
    handle.coalesced = tensor.is_coalesced();
    handle.parts = {handle_of(tensor._indices()), handle_of(tensor._values().detach())};
    return handle;
  }
  if (is_compressed(handle.layout)) {
    handle.kind = TensorHandle::Kind::kSparseCompressed;
    const bool rows = by_rows(handle.layout);
    handle.parts = {handle_of(rows ? tensor.crow_indices() : tensor.ccol_indices()),
                    handle_of(rows ? tensor.col_indices() : tensor.row_indices()),
                    handle_of(tensor.values().detach())};
    return handle;
  }
  if (handle.layout != c10::kStrided || !tensor.has_storage()) {
    fail(ErrorKind::kUnsupported, "a tensor of layout ", c10::str(handle.layout), " has no handle");
  }
  handle.conjugate = tensor.is_conj();
  handle.negative = tensor.is_neg();
  handle.strides = tensor.strides().vec();
  handle.offset = tensor.storage_offset();
  const auto& storage = tensor.storage();
  handle.storage_bytes = storage.nbytes();
  if (handle.storage_bytes > 0) {
    handle.storage = shm::Fabric::instance().locate(storage.data(), storage.nbytes());
    if (!handle.storage) {
      fail(ErrorKind::kInvalidArgument,
           "the tensor is not in shared memory; make it there (group.allocate) or move it first");
    }
  }
  return handle;
}

at::Tensor tensor_of(const TensorHandle& handle, const StorageResolver& resolve) {
  const auto options = at::TensorOptions().dtype(handle.type).layout(handle.layout);
  at::Tensor tensor;
  switch (handle.kind) {
    case TensorHandle::Kind::kStrided: {
      tensor = at::detail::empty_generic({0}, c10::GetCPUAllocator(),
                                         c10::DispatchKeySet(c10::DispatchKey::CPU), handle.type,
                                         std::nullopt);
      if (handle.storage) {
        tensor.set_(resolve(handle.storage, handle.storage_bytes), handle.offset, handle.sizes,
                    handle.strides);
      } else {
        tensor = tensor.as_strided(handle.sizes, handle.strides);
      }
      if (handle.conjugate) tensor._set_conj(true);
      if (handle.negative) tensor._set_neg(true);
      break;
    }
    case TensorHandle::Kind::kSparseCoo:
      tensor =
          at::_sparse_coo_tensor_unsafe(tensor_of(handle.parts[0], resolve),
                                        tensor_of(handle.parts[1], resolve), handle.sizes, options);
      tensor._coalesced_(handle.coalesced);
      break;
    case TensorHandle::Kind::kSparseCompressed:
      tensor = at::_sparse_compressed_tensor_unsafe(
          tensor_of(handle.parts[0], resolve), tensor_of(handle.parts[1], resolve),
          tensor_of(handle.parts[2], resolve), handle.sizes, options);
      break;
  }
  if (handle.requires_grad) tensor.set_requires_grad(true);
  return tensor;
}

std::string encode(const TensorHandle& handle) {
  std::string out;
  out.reserve(kHeaderBytes + 16 * handle.sizes.size());
  append(out, handle);
  return out;
}

TensorHandle decode_handle(std::string_view bytes) { return parse(bytes, 0); }

}  // namespace convoy
