#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Layout.h>
#include <c10/core/Storage.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/handle_codec.h"
#include "transport/shm/arena.h"

namespace convoy {

// A tensor without its bytes: where they lie in shared memory, and how they are read. With it
// another process sees the same tensor. A value.
struct TensorHandle {
  using Kind = HandleKind;

  Kind kind = Kind::kStrided;
  c10::ScalarType type = c10::ScalarType::Float;
  c10::Layout layout = c10::kStrided;
  bool requires_grad = false;
  bool conjugate = false;
  bool negative = false;
  bool coalesced = false;  // of kSparseCoo
  c10::DimVector sizes;

  // Of kStrided; kMeta has strides. An empty storage has segment 0.
  c10::DimVector strides;
  std::int64_t offset = 0;  // of the first element in the storage, in elements
  shm::Location storage;
  std::uint64_t storage_bytes = 0;

  // Of the others: indices and values; compressed indices, plain indices and values; of a nested
  // tensor its buffer, and sizes, strides and offsets of its components.
  std::vector<TensorHandle> parts;

  friend bool operator==(const TensorHandle&, const TensorHandle&) = default;
};

// The handle of a CPU (or meta) tensor whose storage lies in this process's shared memory
// (shared_allocator). kInvalidArgument if it does not, for an undefined tensor, and for
// one that is no leaf and requires a gradient; kUnsupported for a layout, device or type that has
// no handle.
TensorHandle handle_of(const at::Tensor& tensor);
// The same with another notion of where storages lie: asked for each that is not empty, once a
// part.
using StorageLocator = std::function<shm::Location(const c10::Storage& storage)>;
TensorHandle handle_of(const at::Tensor& tensor, const StorageLocator& locate);

// Throws unless the elements of a strided CPU tensor are in memory: kUnsupported for a tensor that
// has none (a zero tensor, a functional one, a wrapper), kInvalidArgument for one whose storage was
// freed or is too small for it.
void require_memory(const at::Tensor& tensor);

// Memory of a storage in this process. Asked once for each strided part that is not empty; views of
// one storage stay views of one if it answers alike for equal locations.
using StorageResolver =
    std::function<c10::Storage(const shm::Location& location, std::uint64_t bytes)>;

// The tensor of a handle; requires_grad as it was. Throws what `resolve` throws, and c10::Error for
// a sparse tensor whose parts do not fit together.
at::Tensor tensor_of(const TensorHandle& handle, const StorageResolver& resolve);

// As bytes, little-endian, with magic and version; handle_codec.h has the table.
std::string encode(const TensorHandle& handle);
// kInvalidArgument for bytes that are no handle, and for a handle whose elements are not all inside
// of its storage: what it returns may be trusted as far as the storage may.
TensorHandle decode_handle(std::string_view bytes);

}  // namespace convoy
