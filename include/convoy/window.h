#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "convoy/deadline.h"
#include "convoy/group.h"

namespace convoy {

// A tensor of every rank that all ranks of the host read and write in place, when they like: made
// by ProcessGroup::window(). Copies share the window. This rank leaves it when the last copy and
// the last tensor from at() are gone. Thread-safe.
//
//   const auto window = group.window(group.allocate({1024}));
//   window.put(right, border);            // into its memory; it does nothing for that
//   window.signal(right);
//   window.wait_signal(left, Deadline::after(10s));   // what it put before is there
//
// Only fence() and signal() order accesses: concurrent writes to the same place are a race. Writes
// of a forked child are visible to all ranks, too.
class Window {
 public:
  Window() = default;  // no window
  explicit operator bool() const { return impl_ != nullptr; }

  int rank() const;
  int size() const;

  // A rank's tensor: no copy. kPeerLost if it has died or left; what was handed out before stays
  // mapped, and nobody sees what is written there.
  at::Tensor at(int rank) const;
  // Copies elements into a rank's tensor, from element `offset` of it. kInvalidArgument for another
  // type or too many of them; kPeerLost.
  void put(int rank, const at::Tensor& tensor, std::int64_t offset = 0) const;

  // Collective: what any rank wrote before is seen by all ranks after it. As ProcessGroup::barrier.
  void fence(const CallOptions& options = {}) const;
  // One signal to a rank; signals are counted. kPeerLost.
  void signal(int rank) const;
  // Takes one signal of a rank's, waiting for it: what that rank wrote before it is seen. kTimeout;
  // kPeerLost if the rank is gone and has sent no more, and once for each other rank that dies.
  void wait_signal(int rank, const Deadline& deadline) const;

 private:
  friend class ProcessGroup;
  struct Impl;
  explicit Window(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  Impl& impl() const;

  std::shared_ptr<Impl> impl_;
};

}  // namespace convoy
