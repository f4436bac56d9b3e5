#include "convoy/allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "base/guarded.h"
#include "base/quote.h"
#include "os/memory_pool.h"
#include "tensor/births.h"

namespace convoy {
namespace {

const c10::Device kCpu(c10::DeviceType::CPU);

void report(void* data, std::ptrdiff_t change) {
  if (!c10::memoryProfilingEnabled()) return;
  const auto stats = MemoryPool::instance().stats();
  c10::reportMemoryUsageToProfiler(data, change, stats.used_bytes,
                                   stats.used_bytes + stats.cached_bytes, kCpu);
}

void release_memory(void* data) {
  auto& pool = MemoryPool::instance();
  if (data == nullptr) return;
  if (!pool.owns(data) && SharedBirths::free(data)) return;
  report(data, -static_cast<std::ptrdiff_t>(pool.size_of(data)));
  pool.free(data);
}

class StepAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (void* const shared = SharedBirths::allocate(bytes)) {
      return {shared, shared, &release_memory, kCpu};
    }
    void* const data = MemoryPool::instance().allocate(bytes);
    c10::DataPtr owned(data, data, &release_memory, kCpu);
    if (data != nullptr) {
      report(data, static_cast<std::ptrdiff_t>(MemoryPool::instance().size_of(data)));
    }
    return owned;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_memory; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

// Never destroyed: storages hold pointers to it.
StepAllocator& step_allocator() {
  static auto* const allocator = new StepAllocator;
  return *allocator;
}

// What was there before, while ours is installed.
Guarded<c10::Allocator*>& previous() {
  static auto* const allocator = new Guarded<c10::Allocator*>(nullptr);
  return *allocator;
}

}  // namespace

void install_allocator() {
  auto before = previous().lock();
  c10::Allocator* const now = c10::GetCPUAllocator();
  if (now == &step_allocator()) return;
  c10::SetCPUAllocator(&step_allocator());
  if (c10::GetCPUAllocator() != &step_allocator()) {
    fail(ErrorKind::kUnsupported,
         "install_allocator(): another library installed a CPU allocator of a higher priority");
  }
  *before = now;
}

void install_allocator_if_asked() {
  const char* const wish = std::getenv("CONVOY_ALLOCATOR");
  const std::string_view text = wish != nullptr ? wish : "";
  if (text == "1") return install_allocator();
  if (!text.empty() && text != "0") {
    fail(ErrorKind::kInvalidArgument, "CONVOY_ALLOCATOR is ", in_quotes(text), ", not 0 or 1");
  }
}

void uninstall_allocator() {
  auto before = previous().lock();
  if (c10::GetCPUAllocator() != &step_allocator()) return;
  c10::SetCPUAllocator(*before);
  *before = nullptr;
}

bool is_allocator_installed() { return c10::GetCPUAllocator() == &step_allocator(); }

AllocatorStats allocator_stats() {
  const auto stats = MemoryPool::instance().stats();
  return {.used_bytes = stats.used_bytes,
          .cached_bytes = stats.cached_bytes,
          .peak_bytes = stats.peak_bytes,
          .allocations = stats.allocations,
          .refills = stats.refills};
}

std::size_t trim_allocator() { return MemoryPool::instance().trim(); }

}  // namespace convoy
