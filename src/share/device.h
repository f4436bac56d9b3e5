#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <memory>
#include <string>
#include <string_view>

namespace convoy::share {

// How tensors of a device go to another process of the host. Thread-safe.
class DeviceSharing {
 public:
  virtual ~DeviceSharing() = default;
  virtual c10::DeviceType device() const = 0;

  // Bytes that rebuild() turns into the tensor in another process, once. Until then, and while that
  // process has the tensor, its memory stays. Throws as Channel::send.
  virtual std::string reduce(const at::Tensor& tensor) = 0;
  virtual at::Tensor rebuild(std::string_view bytes) = 0;
};

// Of the CPU always, of CUDA where libtorch is built with it, of others when they are registered.
// kUnsupported otherwise.
DeviceSharing& device_sharing(c10::DeviceType device);
// In place of the one that is there; what was asked for before stays valid.
void register_device_sharing(std::unique_ptr<DeviceSharing> sharing);

// nullptr where this libtorch has no CUDA.
std::unique_ptr<DeviceSharing> make_cuda_sharing();

}  // namespace convoy::share
