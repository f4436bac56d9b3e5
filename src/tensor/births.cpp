#include "tensor/births.h"

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/guarded.h"
#include "os/fork_guard.h"
#include "transport/shm/fabric.h"

namespace convoy {

// Shared by the object and the thread that entered, either of which may end first.
struct SharedBirths::Visit {
  explicit Visit(const std::vector<std::size_t>& wanted) : sizes(wanted) {}

  const std::vector<std::size_t> sizes;
  const unsigned generation = fork_generation();
  // Cleared by leave(), on whatever thread a backward ends. Relaxed: nothing else depends on it.
  std::atomic<bool> open{true};
};

namespace {

thread_local std::shared_ptr<void> visit_here;

// Those that live; the pointer is the tensor's. Locked in a ForkPause: a forked child frees
// tensors.
Guarded<std::unordered_map<void*, shm::Block>>& blocks() {
  static auto* const all = new Guarded<std::unordered_map<void*, shm::Block>>;
  return *all;
}

}  // namespace

SharedBirths::SharedBirths(std::vector<std::size_t> sizes)
    : sizes_([&] {
        std::sort(sizes.begin(), sizes.end());
        sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
        return std::move(sizes);
      }()) {}

void SharedBirths::enter() {
  if (sizes_.empty()) return;
  leave();
  visit_ = std::make_shared<Visit>(sizes_);
  visit_here = visit_;
}

void SharedBirths::leave() noexcept {
  if (!visit_) return;
  visit_->open.store(false, std::memory_order_relaxed);
  if (visit_here == visit_) visit_here = nullptr;
  visit_ = nullptr;
}

void* SharedBirths::allocate(std::size_t bytes) {
  if (!visit_here) [[likely]]
    return nullptr;
  const auto& visit = *static_cast<const Visit*>(visit_here.get());
  if (!visit.open.load(std::memory_order_relaxed) || visit.generation != fork_generation()) {
    visit_here = nullptr;
    return nullptr;
  }
  if (!std::binary_search(visit.sizes.begin(), visit.sizes.end(), bytes)) return nullptr;
  try {
    shm::Block block = shm::Fabric::instance().allocate(bytes);
    void* const data = block.data();
    const ForkPause pause;
    blocks().lock()->emplace(data, std::move(block));
    return data;
  } catch (const Error&) {
    return nullptr;
  }
}

bool SharedBirths::free(void* data) noexcept {
  shm::Block block;
  {
    const ForkPause pause;
    auto all = blocks().lock();
    const auto found = all->find(data);
    if (found == all->end()) return false;
    block = std::move(found->second);
    all->erase(found);
  }
  return true;
}

}  // namespace convoy
