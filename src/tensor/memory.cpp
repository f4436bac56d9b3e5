#include "tensor/memory.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>

#include "base/error.h"
#include "os/segment.h"
#include "transport/shm/fabric.h"

namespace convoy {
namespace {

void release_block(void* block) { delete static_cast<shm::Block*>(block); }

class SharedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release_block, cpu};
    auto block = std::make_unique<shm::Block>(shm::Fabric::instance().allocate(bytes));
    void* const data = block->data();
    return {data, block.release(), &release_block, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // the context is not the data
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

}  // namespace

c10::Allocator* shared_allocator() {
  static SharedAllocator* const allocator = new SharedAllocator;  // tensors may outlive everything
  return allocator;
}

at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return empty_from(shared_allocator(), sizes, options);
}

at::Tensor empty_from(c10::Allocator* allocator, at::IntArrayRef sizes,
                      const at::TensorOptions& options) {
  if (!options.device().is_cpu()) {
    fail(ErrorKind::kUnsupported, "group memory is CPU memory; asked for ", options.device().str());
  }
  if (options.layout() != c10::kStrided) {
    fail(ErrorKind::kUnsupported, "group memory is for strided tensors; asked for ",
         c10::str(options.layout()));
  }
  const auto type = c10::typeMetaToScalarType(options.dtype());
  auto tensor = at::Tensor(at::detail::empty_generic(
      sizes, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), type, std::nullopt));
  if (options.requires_grad()) tensor.set_requires_grad(true);
  return tensor;
}

bool is_shared_memory(const at::Tensor& tensor) {
  if (!tensor.has_storage() || !tensor.device().is_cpu()) return false;
  const auto& storage = tensor.storage();
  if (storage.nbytes() == 0) return false;
  return static_cast<bool>(shm::Fabric::instance().locate(storage.data(), storage.nbytes()));
}

void give_pages_back(const at::Tensor& tensor) {
  if (tensor.nbytes() == 0 || !is_shared_memory(tensor)) return;
  auto* const data = static_cast<std::byte*>(tensor.mutable_data_ptr());
  const std::size_t page = page_size();
  const std::size_t before = (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
  if (tensor.nbytes() < before + page) return;
  // Where the kernel cannot, they stay.
  ::madvise(data + before, (tensor.nbytes() - before) / page * page, MADV_REMOVE);
}

}  // namespace convoy
