#include "tensor/handle.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>

#include "base/error.h"
#include "tensor/handle_codec.h"
#include "tensor/memory.h"
#include "transport/shm/fabric.h"

namespace convoy {
namespace {

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

struct TorchTypes {
  static std::size_t bytes(c10::ScalarType type) {
    return is_plain_type(type) ? c10::elementSize(type) : 0;
  }
  static bool is_complex(c10::ScalarType type) { return c10::isComplexType(type); }
  static bool is_floating(c10::ScalarType type) { return c10::isFloatingType(type); }
  static bool is_long(c10::ScalarType type) { return type == c10::ScalarType::Long; }
};

using Codec = HandleCodec<TensorHandle, TorchTypes>;
static_assert(static_cast<int>(c10::Layout::Strided) == Codec::kStrided &&
              static_cast<int>(c10::Layout::Sparse) == Codec::kSparse &&
              static_cast<int>(c10::Layout::SparseCsr) == Codec::kSparseCsr &&
              static_cast<int>(c10::Layout::SparseCsc) == Codec::kSparseCsc &&
              static_cast<int>(c10::Layout::SparseBsr) == Codec::kSparseBsr &&
              static_cast<int>(c10::Layout::SparseBsc) == Codec::kSparseBsc);

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

void require_memory(const at::Tensor& tensor) {
  if (tensor._is_zerotensor()) {
    fail(ErrorKind::kUnsupported,
         "a zero tensor (of autograd) has no memory that could be shared: clone() it first");
  }
  if (tensor.key_set().has(c10::DispatchKey::Functionalize)) {
    fail(ErrorKind::kUnsupported,
         "a functional tensor (of functionalization) has no memory that could be shared: share the "
         "tensor that it stands for");
  }
  if (!tensor.has_storage()) {
    fail(ErrorKind::kUnsupported, "a tensor of layout ", c10::str(tensor.layout()),
         " without a storage has no memory that could be shared");
  }
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const std::size_t needed =
      tensor.numel() == 0
          ? 0
          : at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                             static_cast<std::size_t>(tensor.storage_offset()));
  if (needed > storage->nbytes()) {
    fail(ErrorKind::kInvalidArgument, "a tensor of sizes ", c10::str(tensor.sizes()), " needs ",
         needed, " bytes and its storage has ", storage->nbytes(),
         ": it was freed or shrunk (resize_); allocate it again before it is shared");
  }
  if (storage->nbytes() > 0 && storage->_mutable_data_ptr_no_checks().get() == nullptr) {
    fail(ErrorKind::kUnsupported,
         "a tensor that only stands for one (a wrapper or a fake tensor) has no memory that could "
         "be shared");
  }
}

namespace {

// Of the parts of a tensor. All are looked at before one is located: that may move it.
std::vector<TensorHandle> handles_of(const std::vector<at::Tensor>& parts,
                                     const StorageLocator& locate) {
  for (const at::Tensor& part : parts) {
    if (part.is_cpu()) require_memory(part);
  }
  std::vector<TensorHandle> handles;
  for (const at::Tensor& part : parts) handles.push_back(handle_of(part, locate));
  return handles;
}

}  // namespace

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
    handle.parts = handles_of({tensor._indices(), tensor._values().detach()}, locate);
    return handle;
  }
  if (is_compressed(handle.layout)) {
    handle.kind = TensorHandle::Kind::kSparseCompressed;
    const bool rows = by_rows(handle.layout);
    handle.parts =
        handles_of({rows ? tensor.crow_indices() : tensor.ccol_indices(),
                    rows ? tensor.col_indices() : tensor.row_indices(), tensor.values().detach()},
                   locate);
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
  require_memory(tensor);
  const auto& storage = tensor.storage();
  handle.storage_bytes = storage.nbytes();
  // An empty tensor may be anywhere, also behind a storage that was freed.
  const auto first = static_cast<std::uint64_t>(tensor.storage_offset());
  const bool inside = first <= handle.storage_bytes / tensor.itemsize();
  handle.offset = inside ? tensor.storage_offset() : 0;
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
    if (component.storage_bytes > 0 || component.offset != 0) Codec::check_extent(component);
  }
  if (!buffer.is_contiguous()) Codec::bad("its buffer is not contiguous");
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

std::string encode(const TensorHandle& handle) { return Codec::encode(handle); }

TensorHandle decode_handle(std::string_view bytes) { return Codec::decode(bytes); }

}  // namespace convoy
