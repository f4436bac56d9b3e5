#pragma once

#include <atomic>
#include <cstdint>

#include "base/unique_fd.h"
#include "os/wait.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/mapping.h"
#include "transport/shm/quick_mutex.h"

namespace convoy::shm {

// This thread has woken one of another endpoint: see ShmEndpoint::wait().
void note_wake_up() noexcept;

// The doorbell of another endpoint. Set once; kept by loans, which outlive remotes.
struct RemoteBell {
  std::atomic<Doorbell*> bell{nullptr};
  std::uint32_t number = 0;  // ours there
  Mapping mapping;
  UniqueFd waker;
  Doorbell::Rung rung;

  // Before it is known nothing is lost: whoever learns of it knocks. The letter was written under a
  // QuickMutex, which is free again.
  void announce_letter(bool reply) noexcept {
    fence_after_update();
    Doorbell* const known = bell.load(std::memory_order_acquire);
    if (known && known->announce_letter(number, reply, rung)) note_wake_up();
  }
  void knock(bool reply) noexcept {
    full_fence();
    if (Doorbell* const known = bell.load(std::memory_order_acquire))
      known->knock(number, reply, rung);
  }
};

}  // namespace convoy::shm
