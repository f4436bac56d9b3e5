// Bytes of a handle:
//   0  4  magic "CVT1"
//   4  1  kind             5  1  element type, as torch numbers it
//   6  1  layout, likewise 7  1  flags: 1 requires_grad, 2 conjugate, 4 negative, 8 coalesced
//   8  1  dimensions d     9  1  parts p        10  6  zero
//  16  8  offset          24  8  segment        32  8  offset in the segment
//  40  8  storage bytes   48  8d sizes          then 8d strides if strided or meta,
//  then p parts, each a handle of its own with its length (8) in front
#include "tensor/handle.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>

#include <array>
#include <bit>
#include <cstring>

#include "base/byte_reader.h"
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

constexpr const char* kWhat = "handle of a tensor";

[[noreturn]] void bad(const char* why) { ByteReader({}, kWhat).bad(why); }

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

bool has_strides(TensorHandle::Kind kind) {
  return kind == TensorHandle::Kind::kStrided || kind == TensorHandle::Kind::kMeta;
}

// Sizes and strides may be anything that somebody sent: every sum is checked. The number of the
// last element, -1 if there is none.
std::int64_t last_element(const TensorHandle& handle) {
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

void check_extent(const TensorHandle& handle) {
  const std::int64_t last = last_element(handle);
  const auto item = static_cast<std::int64_t>(c10::elementSize(handle.type));
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

std::size_t parts_of(TensorHandle::Kind kind) {
  switch (kind) {
    case TensorHandle::Kind::kStrided: return 0;
    case TensorHandle::Kind::kSparseCoo: return 2;
    case TensorHandle::Kind::kSparseCompressed: return 3;
    case TensorHandle::Kind::kMeta: return 0;
    case TensorHandle::Kind::kNested: return 4;
  }
  bad("its kind is unknown");
}

void check_nested(const TensorHandle& handle) {
  if (handle.layout != c10::kStrided || !handle.sizes.empty()) bad("kind and layout do not match");
  const auto& parts = handle.parts;
  if (parts[0].type != handle.type || parts[0].sizes.size() != 1) bad("its buffer is none");
  for (std::size_t i = 1; i < parts.size(); ++i) {
    if (parts[i].type != c10::ScalarType::Long || parts[i].sizes.size() != (i == 3 ? 1U : 2U)) {
      bad("its sizes, strides or offsets are none");
    }
  }
  if (parts[1].sizes != parts[2].sizes || parts[1].sizes[0] != parts[3].sizes[0]) {
    bad("its sizes, strides and offsets do not match");
  }
}

void check(const TensorHandle& handle) {
  if (!is_plain_type(handle.type)) bad("its element type is unknown");
  const bool complex = c10::isComplexType(handle.type);
  const bool real = c10::isFloatingType(handle.type);
  if (handle.conjugate && !complex) bad("it conjugates numbers that are not complex");
  if (handle.requires_grad && !complex && !real) bad("its type can have no gradient");
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
    case TensorHandle::Kind::kMeta:
      if (handle.layout != c10::kStrided) bad("kind and layout do not match");
      if (handle.storage) bad("a meta tensor has no memory");
      last_element(handle);
      return;
    case TensorHandle::Kind::kNested: return check_nested(handle);
  }
  if (handle.parts.back().type != handle.type) bad("its values are of another type");
  for (const std::int64_t size : handle.sizes) {
    if (size < 0) bad("a size is negative");
  }
}

void append(std::string& out, const TensorHandle& handle) {
  out.append(kMagic.data(), kMagic.size());
  put_bytes(out, static_cast<std::uint8_t>(handle.kind));
  put_bytes(out, static_cast<std::uint8_t>(handle.type));
  put_bytes(out, static_cast<std::uint8_t>(handle.layout));
  put_bytes(out, static_cast<std::uint8_t>((handle.requires_grad ? kRequiresGrad : 0) |
                                           (handle.conjugate ? kConjugate : 0) |
                                           (handle.negative ? kNegative : 0) |
                                           (handle.coalesced ? kCoalesced : 0)));
  put_bytes(out, static_cast<std::uint8_t>(handle.sizes.size()));
  put_bytes(out, static_cast<std::uint8_t>(handle.parts.size()));
  out.append(6, '\0');
  put_bytes(out, handle.offset);
  put_bytes(out, std::uint64_t{handle.storage.segment});
  put_bytes(out, handle.storage.offset);
  put_bytes(out, handle.storage_bytes);
  for (const auto size : handle.sizes) put_bytes(out, size);
  if (has_strides(handle.kind)) {
    for (const auto stride : handle.strides) put_bytes(out, stride);
  }
  for (const auto& part : handle.parts) {
    const std::string bytes = encode(part);
    put_bytes(out, std::uint64_t{bytes.size()});
    out += bytes;
  }
}

TensorHandle parse(std::string_view bytes, int depth) {
  if (depth > 1) bad("a part has parts");
  ByteReader in(bytes, kWhat);
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
  if (has_strides(handle.kind)) {
    for (std::size_t i = 0; i < dimensions; ++i) handle.strides.push_back(in.take<std::int64_t>());
  }
  for (std::size_t i = 0; i < parts; ++i) {
    const auto length = in.take<std::uint64_t>();
    handle.parts.push_back(parse(in.take(length), depth + 1));
  }
  if (in.left() != 0) bad("there is more behind it");
  check(handle);
  return handle;
}

}  // namespace

TensorHandle handle_of(const at::Tensor& tensor) {
  return handle_of(tensor, [](const c10::Storage& storage) {
    const auto location = shm::Fabric::instance().locate(storage.data(), storage.nbytes());
    if (!location) {
      fail(ErrorKind::kInvalidArgument,
           "the tensor is not in shared memory; make it there (group.allocate) or move it first");
    }
    return location;
  });
}

TensorHandle handle_of(const at::Tensor& tensor, const StorageLocator& locate) {
  if (!tensor.defined()) fail(ErrorKind::kInvalidArgument, "an undefined tensor has no handle");
  if (!tensor.device().is_cpu() && !tensor.is_meta()) {
    fail(ErrorKind::kUnsupported, "a tensor on ", tensor.device().str(), " has no handle here");
  }
  if (!is_plain_type(tensor.scalar_type())) {
    fail(ErrorKind::kUnsupported, "a tensor of type ", c10::toString(tensor.scalar_type()),
         " has no handle");
  }
  if (tensor.requires_grad() && !tensor.is_leaf()) {
    fail(ErrorKind::kInvalidArgument,
         "a tensor that is the result of a computation and requires a gradient has no handle: its "
         "history stays here; detach() it first");
  }
  TensorHandle handle;
  handle.type = tensor.scalar_type();
  handle.layout = tensor.layout();
  handle.requires_grad = tensor.requires_grad();
  if (handle.layout == c10::kJagged) {
    fail(ErrorKind::kUnsupported,
         "a nested tensor of layout jagged is an object of Python's: send its values and offsets");
  }
  if (tensor.is_nested()) {
    handle.kind = TensorHandle::Kind::kNested;
    const auto plain = tensor.detach();
    // The numbers of the components are copied: the tensor's own stay where they are.
    handle.parts = {handle_of(plain.values(), locate),
                    handle_of(plain._nested_tensor_size().clone(), locate),
                    handle_of(plain._nested_tensor_strides().clone(), locate),
                    handle_of(plain._nested_tensor_storage_offsets().clone(), locate)};
    return handle;
  }
  handle.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  if (handle.layout == c10::kSparse) {
    handle.kind = TensorHandle::Kind::kSparseCoo;
    handle.coalesced = tensor.is_coalesced();
    handle.parts = {handle_of(tensor._indices(), locate),
                    handle_of(tensor._values().detach(), locate)};
    return handle;
  }
  if (is_compressed(handle.layout)) {
    handle.kind = TensorHandle::Kind::kSparseCompressed;
    const bool rows = by_rows(handle.layout);
    handle.parts = {handle_of(rows ? tensor.crow_indices() : tensor.ccol_indices(), locate),
                    handle_of(rows ? tensor.col_indices() : tensor.row_indices(), locate),
                    handle_of(tensor.values().detach(), locate)};
    return handle;
  }
  if (handle.layout != c10::kStrided || !tensor.has_storage()) {
    fail(ErrorKind::kUnsupported, "a tensor of layout ", c10::str(handle.layout), " has no handle");
  }
  handle.conjugate = tensor.is_conj();
  handle.negative = tensor.is_neg();
  handle.strides.assign(tensor.strides().begin(), tensor.strides().end());
  if (tensor.is_meta()) {
    handle.kind = TensorHandle::Kind::kMeta;
    return handle;
  }
  handle.offset = tensor.storage_offset();
  const auto& storage = tensor.storage();
  handle.storage_bytes = storage.nbytes();
  if (handle.storage_bytes > 0) handle.storage = locate(storage);
  return handle;
}

namespace {

// Without the dispatcher: this is what receiving a tensor costs.
at::Tensor strided_of(const TensorHandle& handle, const StorageResolver& resolve) {
  if (!handle.storage) {
    const auto nothing = at::detail::empty_generic({0}, c10::GetCPUAllocator(),
                                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                   handle.type, std::nullopt);
    return at::Tensor(nothing).as_strided(handle.sizes, handle.strides);
  }
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      resolve(handle.storage, handle.storage_bytes), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(handle.type));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(handle.sizes, handle.strides, handle.offset);
  return tensor;
}

// The numbers are contents of memory that others can write: looked at in a copy.
at::Tensor nested_of(const TensorHandle& handle, const StorageResolver& resolve) {
  const auto number_of = [&](std::size_t part) {
    return tensor_of(handle.parts[part], resolve).contiguous().clone();
  };
  const auto buffer = tensor_of(handle.parts[0], resolve);
  const auto sizes = number_of(1), strides = number_of(2), offsets = number_of(3);
  TensorHandle component;
  component.type = handle.type;
  component.storage = {1, 0};
  component.storage_bytes = static_cast<std::uint64_t>(buffer.numel()) * buffer.element_size();
  const auto dimensions = sizes.size(1);
  for (std::int64_t i = 0; i < sizes.size(0); ++i) {
    const auto* const size = sizes.const_data_ptr<std::int64_t>() + i * dimensions;
    const auto* const stride = strides.const_data_ptr<std::int64_t>() + i * dimensions;
    component.sizes.assign(size, size + dimensions);
    component.strides.assign(stride, stride + dimensions);
    component.offset = offsets.const_data_ptr<std::int64_t>()[i];
    if (component.storage_bytes > 0 || component.offset != 0) check_extent(component);
  }
  if (!buffer.is_contiguous()) bad("its buffer is not contiguous");
  return at::_nested_view_from_buffer(buffer, sizes, strides, offsets);
}

}  // namespace

at::Tensor tensor_of(const TensorHandle& handle, const StorageResolver& resolve) {
  const auto options = at::TensorOptions().dtype(handle.type).layout(handle.layout);
  at::Tensor tensor;
  switch (handle.kind) {
    case TensorHandle::Kind::kStrided:
      tensor = strided_of(handle, resolve);
      if (handle.conjugate) tensor._set_conj(true);
      if (handle.negative) tensor._set_neg(true);
      break;
    case TensorHandle::Kind::kMeta:
      tensor = at::empty_strided(handle.sizes, handle.strides, options.device(c10::kMeta));
      break;
    case TensorHandle::Kind::kNested: tensor = nested_of(handle, resolve); break;
    // The shapes and indices of the parts are looked at here: they are contents.
    case TensorHandle::Kind::kSparseCoo: {
      const auto indices = tensor_of(handle.parts[0], resolve);
      const auto values = tensor_of(handle.parts[1], resolve);
      at::_validate_sparse_coo_tensor_args(indices, values, handle.sizes, handle.coalesced);
      tensor = at::_sparse_coo_tensor_unsafe(indices, values, handle.sizes, options);
      tensor._coalesced_(handle.coalesced);
      break;
    }
    case TensorHandle::Kind::kSparseCompressed: {
      const auto compressed = tensor_of(handle.parts[0], resolve);
      const auto plain = tensor_of(handle.parts[1], resolve);
      const auto values = tensor_of(handle.parts[2], resolve);
      at::_validate_sparse_compressed_tensor_args(compressed, plain, values, handle.sizes,
                                                  handle.layout);
      tensor =
          at::_sparse_compressed_tensor_unsafe(compressed, plain, values, handle.sizes, options);
      break;
    }
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
