// Tensors of CUDA devices between processes, by CUDA IPC.
//
// UNTESTED: written against the interfaces of CUDA 12 and of libtorch's caching allocator, and
// compiled only where libtorch is built with CUDA. The machines of this project have none.
//
// A storage lies in a block of cudaMalloc that the caching allocator owns: the receiver opens the
// whole block by its IPC handle (the allocator's cache opens each once) and looks at an offset in
// it. Three things are said about it in shared memory of the CPU, by means that are tested:
//
//   ticket   one shared byte goes along with each tensor. The receiver's storage keeps it; while
//            anybody but the sender has it, the sender keeps the memory in its limbo list, which is
//            looked through at each later send.
//   event    recorded on the sender's stream at each send; the receiver's stream waits for it.
//   memory   of a process that ended is gone: as with torch, the sender must outlive the receivers.
#include "base/config.h"
#include "share/device.h"

#if CONVOY_WITH_CUDA

#include <ATen/Functions.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "convoy/share.h"
#include "share/cache.h"
#include "share/depot.h"
#include "tensor/handle.h"

namespace convoy::share {
namespace {

struct Wire {
  static constexpr std::uint64_t kMagic = 0x3143554456434e;

  std::uint64_t magic = kMagic;
  std::int32_t device = 0;
  std::uint32_t handle_bytes = 0;
  std::uint32_t ticket_bytes = 0;
  std::uint32_t tensor_bytes = 0;
  std::uint64_t block_offset = 0;  // of the storage in its block
  std::uint64_t storage_bytes = 0;
  cudaIpcEventHandle_t event{};
};

// In the place of a storage's memory at the receiver.
struct Received {
  std::shared_ptr<void> block;  // opened by the allocator's cache
  at::Tensor ticket;
  int device;
};

void release_received(void* context) {
  auto* const received = static_cast<Received*>(context);
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(received->device));
  // What still runs here may read the memory; only then the sender may use it again.
  cudaStreamSynchronize(at::cuda::getCurrentCUDAStream());
  delete received;
}

class CudaSharing final : public DeviceSharing {
 public:
  c10::DeviceType device() const override { return c10::DeviceType::CUDA; }

  std::string reduce(const at::Tensor& tensor) override {
    if (tensor.layout() != c10::kStrided || tensor.is_nested()) {
      fail(ErrorKind::kUnsupported, "of CUDA's tensors only strided ones can be sent");
    }
    const auto& storage = tensor.storage();
    if (storage.data_ptr().get_deleter() == &release_received) {
      fail(ErrorKind::kUnsupported,
           "a tensor that came from another process cannot be sent on: send a clone of it");
    }
    const c10::cuda::CUDAGuard guard(tensor.device());
    collect();
    Wire wire{.device = tensor.device().index(), .storage_bytes = storage.nbytes()};
    std::string handle, ticket_bytes;
    if (storage.nbytes() > 0) {
      const auto shared =
          c10::cuda::CUDACachingAllocator::shareIpcHandle(const_cast<void*>(storage.data()));
      handle = shared.handle;
      wire.block_offset = static_cast<std::uint64_t>(shared.offset);
      cudaEvent_t event{};
      C10_CUDA_CHECK(cudaEventCreateWithFlags(
          &event, cudaEventDisableTiming | cudaEventInterprocess | cudaEventBlockingSync));
      C10_CUDA_CHECK(cudaEventRecord(event, at::cuda::getCurrentCUDAStream()));
      C10_CUDA_CHECK(cudaIpcGetEventHandle(&wire.event, event));
      const auto ticket = share::empty({1}, at::kByte);
      ticket_bytes = to_bytes(ticket);
      const std::scoped_lock lock(mutex_);
      limbo_.push_back({storage, ticket, event});
    }
    const std::string described = convoy::encode(handle_of_strided(tensor));
    wire.handle_bytes = static_cast<std::uint32_t>(handle.size());
    wire.ticket_bytes = static_cast<std::uint32_t>(ticket_bytes.size());
    wire.tensor_bytes = static_cast<std::uint32_t>(described.size());
    std::string out(reinterpret_cast<const char*>(&wire), sizeof wire);
    return out + handle + ticket_bytes + described;
  }

  at::Tensor rebuild(std::string_view bytes) override {
    Wire wire;
    if (bytes.size() < sizeof wire) fail(ErrorKind::kInvalidArgument, "no tensor of CUDA's");
    std::memcpy(&wire, bytes.data(), sizeof wire);
    bytes.remove_prefix(sizeof wire);
    if (wire.magic != Wire::kMagic ||
        bytes.size() != std::uint64_t{wire.handle_bytes} + wire.ticket_bytes + wire.tensor_bytes) {
      fail(ErrorKind::kInvalidArgument, "no tensor of CUDA's");
    }
    const std::string handle(bytes.substr(0, wire.handle_bytes));
    const auto ticket_bytes = bytes.substr(wire.handle_bytes, wire.ticket_bytes);
    const auto described =
        decode_handle(bytes.substr(std::size_t{wire.handle_bytes} + wire.ticket_bytes));
    const c10::Device place(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(wire.device));
    const c10::cuda::CUDAGuard guard(place);
    auto tensor = at::empty({0}, at::TensorOptions(place).dtype(described.type));
    if (wire.storage_bytes > 0) {
      auto ticket = from_bytes(ticket_bytes);
      cudaEvent_t event{};
      C10_CUDA_CHECK(cudaIpcOpenEventHandle(&event, wire.event));
      C10_CUDA_CHECK(cudaStreamWaitEvent(at::cuda::getCurrentCUDAStream(), event, 0));
      C10_CUDA_CHECK(cudaEventDestroy(event));
      tensor.set_(storage_of(handle, wire, std::move(ticket)), described.offset, described.sizes,
                  described.strides);
    } else {
      tensor = tensor.as_strided(described.sizes, described.strides);
    }
    if (described.conjugate) tensor._set_conj(true);
    if (described.negative) tensor._set_neg(true);
    return tensor.set_requires_grad(described.requires_grad);
  }

 private:
  struct Sent {
    c10::Storage storage;
    at::Tensor ticket;
    cudaEvent_t event;
  };

  static TensorHandle handle_of_strided(const at::Tensor& tensor) {
    TensorHandle handle;
    handle.type = tensor.scalar_type();
    handle.requires_grad = tensor.requires_grad();
    handle.conjugate = tensor.is_conj();
    handle.negative = tensor.is_neg();
    handle.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    handle.strides.assign(tensor.strides().begin(), tensor.strides().end());
    handle.offset = tensor.storage_offset();
    handle.storage_bytes = tensor.storage().nbytes();
    if (handle.storage_bytes > 0) handle.storage = {1, 0};
    return handle;
  }

  // The limbo list: what receivers have let go of is let go of here.
  void collect() {
    const std::scoped_lock lock(mutex_);
    std::erase_if(limbo_, [](const Sent& sent) {
      const auto parcel =
          SharedCache::instance().share(sent.ticket.storage(), Strategy::kDescriptor);
      if (Depot::instance().held_elsewhere(*SharedCache::place_of(parcel).block)) return false;
      cudaEventDestroy(sent.event);
      return true;
    });
  }

  // One storage for one place, as on the CPU.
  c10::Storage storage_of(const std::string& handle, const Wire& wire, at::Tensor ticket) {
    const std::scoped_lock lock(mutex_);
    auto& weak = received_[{handle, wire.block_offset}];
    if (weak) {
      if (auto there = weak->lock()) return c10::Storage(std::move(there));  // the ticket goes
    }
    auto block = c10::cuda::CUDACachingAllocator::getIpcDevPtr(handle);
    void* const data = static_cast<std::byte*>(block.get()) + wire.block_offset;
    auto* const context = new Received{std::move(block), std::move(ticket), wire.device};
    c10::Storage storage(c10::Storage::use_byte_size_t(), wire.storage_bytes,
                         c10::DataPtr(data, context, &release_received,
                                      c10::Device(c10::DeviceType::CUDA,
                                                  static_cast<c10::DeviceIndex>(wire.device))),
                         nullptr, false);
    weak = storage.getWeakStorageImpl();
    return storage;
  }

  std::mutex mutex_;
  std::vector<Sent> limbo_;
  std::map<std::pair<std::string, std::uint64_t>,
           std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>>>
      received_;
};

}  // namespace

std::unique_ptr<DeviceSharing> make_cuda_sharing() { return std::make_unique<CudaSharing>(); }

}  // namespace convoy::share

#else

namespace convoy::share {

std::unique_ptr<DeviceSharing> make_cuda_sharing() { return nullptr; }

}  // namespace convoy::share

#endif
