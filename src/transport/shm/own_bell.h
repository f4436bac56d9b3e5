#pragma once

#include <climits>
#include <cstddef>
#include <new>
#include <tuple>

#include "base/unique_fd.h"
#include "os/wait.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/mapping.h"

namespace convoy::shm {

// The doorbell of an endpoint, at its owner: its memory, which all remotes have, and what its own
// threads need to wake each other. Any thread rings, without a lock.
class OwnBell {
 public:
  // Throws kResource.
  OwnBell() {
    std::tie(memory_, fd_) = make_mapping(sizeof(Doorbell), "doorbell");
    new (memory_->data()) Doorbell{};
  }

  Doorbell* operator->() const noexcept { return reinterpret_cast<Doorbell*>(memory_->data()); }
  Doorbell& operator*() const noexcept { return *operator->(); }

  // For those who are to ring it.
  std::size_t bytes() const { return memory_->size(); }
  int fd() const { return fd_.get(); }
  // The thread that serves will sleep on epoll. Before there are other threads.
  void wake_by(int waker) { rung_.waker = waker; }

  // After a change. The second is for rare news: it rings however often it has rung before.
  void ring_service_once() noexcept {
    full_fence();
    Doorbell::ring_once((*this)->service, rung_.service, 1, rung_.waker);
  }
  void ring_service() noexcept { (*this)->ring_service(rung_); }
  // Tells one thread to look, as a sender does.
  void rouse(bool reply) noexcept { (*this)->rouse(reply, rung_); }

  // After a change and a full fence: all that sleep in wait() and wait_aside() look again.
  void wake_after_fence() noexcept {
    Doorbell::ring_once((*this)->waiters, rung_.all_waiters, INT_MAX);
    if (aside_.sleepers.load(std::memory_order_relaxed) != 0) ring_anyway(aside_, INT_MAX);
  }
  // What threads in wait_aside() sleep on. Senders do not know of it.
  WaitWord& aside() noexcept { return aside_; }

 private:
  Mapping memory_;
  UniqueFd fd_;
  Doorbell::Rung rung_;  // by our own threads
  WaitWord aside_;
};

}  // namespace convoy::shm
