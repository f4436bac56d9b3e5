#include <ATen/Functions.h>

#include <algorithm>
#include <atomic>

#include "base/error.h"
#include "convoy/share.h"
#include "share/cache.h"
#include "share/pack.h"

namespace convoy::share {
namespace {

std::atomic<Strategy> strategy{Strategy::kDescriptor};

bool is_compressed(c10::Layout layout) {
  return layout == c10::kSparseCsr || layout == c10::kSparseCsc || layout == c10::kSparseBsr ||
         layout == c10::kSparseBsc;
}

// The strided tensors that a tensor is made of.
std::vector<at::Tensor> parts_of(const at::Tensor& whole) {
  const auto layout = whole.layout();
  if (layout == c10::kStrided && !whole.is_nested()) return {whole};
  const auto tensor = whole.detach();
  if (layout == c10::kSparse) return {tensor._indices(), tensor._values()};
  if (is_compressed(layout)) {
    const bool rows = layout == c10::kSparseCsr || layout == c10::kSparseBsr;
    return {rows ? tensor.crow_indices() : tensor.ccol_indices(),
            rows ? tensor.col_indices() : tensor.row_indices(), tensor.values()};
  }
  if (layout == c10::kStrided && tensor.is_nested()) return {tensor.values()};
  return {tensor};
}

void check(const char* operation, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    fail(ErrorKind::kInvalidArgument, operation, ": the tensor is undefined");
  }
  if (!tensor.device().is_cpu() && !tensor.is_meta()) {
    fail(
        ErrorKind::kUnsupported, operation, ": a tensor on ", tensor.device().str(),
        " cannot be moved into shared memory; sending it shares it as it is, where its device can");
  }
}

}  // namespace

Strategy get_sharing_strategy() { return strategy.load(); }
void set_sharing_strategy(Strategy chosen) { strategy.store(chosen); }

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu() || options.layout() != c10::kStrided) {
    fail(ErrorKind::kUnsupported,
         "empty: shared memory is for strided tensors of the CPU; asked for ",
         c10::str(options.layout()), " on ", options.device().str());
  }
  TensorHandle handle;
  handle.type = c10::typeMetaToScalarType(options.dtype());
  handle.requires_grad = options.requires_grad();
  handle.sizes.assign(sizes.begin(), sizes.end());
  handle.strides.resize(sizes.size());
  std::int64_t count = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    handle.strides[i] = std::max<std::int64_t>(count, 1);
    if (sizes[i] < 0 || __builtin_mul_overflow(count, sizes[i], &count)) {
      fail(ErrorKind::kInvalidArgument, "empty: sizes ", c10::str(sizes),
           " are negative or too large");
    }
  }
  const auto item = static_cast<std::int64_t>(c10::elementSize(handle.type));
  if (__builtin_mul_overflow(count, item, &count)) {
    fail(ErrorKind::kResource, "empty: sizes ", c10::str(sizes), " are too large for any memory");
  }
  handle.storage_bytes = static_cast<std::uint64_t>(count);
  if (count > 0) handle.storage = {1, 0};
  return tensor_of(handle, [](const shm::Location&, std::uint64_t bytes) {
    return SharedCache::instance().allocate(bytes, get_sharing_strategy());
  });
}

at::Tensor share_memory_(const at::Tensor& tensor) {
  check("share_memory_", tensor);
  if (tensor.is_meta()) return tensor;
  const auto parts = parts_of(tensor);
  for (const at::Tensor& part : parts) require_memory(part);
  for (const at::Tensor& part : parts) {
    if (part.storage().nbytes() == 0) continue;
    SharedCache::instance().share(part.storage(), get_sharing_strategy());
  }
  return tensor;
}

bool is_shared(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return false;
  bool any = false;
  for (const at::Tensor& part : parts_of(tensor)) {
    if (!part.has_storage()) return false;
    if (part.storage().nbytes() == 0) continue;
    if (!SharedCache::is_shared(part.storage())) return false;
    any = true;
  }
  return any;
}

std::string to_bytes(const at::Tensor& tensor) {
  return pack_self_contained(tensor, get_sharing_strategy()).bytes;
}

at::Tensor from_bytes(std::string_view bytes) { return unpack_self_contained(bytes); }

std::size_t trim() { return Depot::instance().trim(); }

Usage usage() {
  const auto stats = Depot::instance().stats();
  return {.pool_bytes = stats.pool_bytes,
          .blocks = stats.blocks,
          .elsewhere = stats.abandoned,
          .foreign = stats.foreign};
}

}  // namespace convoy::share
