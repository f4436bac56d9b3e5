#include "share/device.h"

#include <vector>

#include "base/error.h"
#include "base/guarded.h"
#include "convoy/share.h"

namespace convoy::share {
namespace {

class CpuSharing final : public DeviceSharing {
 public:
  c10::DeviceType device() const override { return c10::DeviceType::CPU; }
  std::string reduce(const at::Tensor& tensor) override { return to_bytes(tensor); }
  at::Tensor rebuild(std::string_view bytes) override { return from_bytes(bytes); }
};

using Registry = std::vector<std::unique_ptr<DeviceSharing>>;  // the last of a device counts

Guarded<Registry>& registry() {
  static auto* const all = [] {
    auto* const made = new Guarded<Registry>;
    made->lock()->push_back(std::make_unique<CpuSharing>());
    if (auto cuda = make_cuda_sharing()) made->lock()->push_back(std::move(cuda));
    return made;
  }();
  return *all;
}

}  // namespace

DeviceSharing& device_sharing(c10::DeviceType device) {
  auto all = registry().lock();
  for (auto i = all->rbegin(); i != all->rend(); ++i) {
    if ((*i)->device() == device) return **i;
  }
  fail(ErrorKind::kUnsupported, "tensors on ", c10::DeviceTypeName(device, /*lower_case=*/true),
       " cannot be passed to another process here",
       device == c10::DeviceType::CUDA ? ": this libtorch is built without CUDA" : "",
       "; copy them to the CPU first");
}

void register_device_sharing(std::unique_ptr<DeviceSharing> sharing) {
  if (!sharing) fail(ErrorKind::kInvalidArgument, "register_device_sharing: nothing was given");
  registry().lock()->push_back(std::move(sharing));
}

}  // namespace convoy::share
