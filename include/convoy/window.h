#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "convoy/deadline.h"
#include "convoy/group.h"

namespace convoy {

// A tensor of each rank that all ranks of the host read and write in place, without their
// cooperation. Made by ProcessGroup::window(). Copies are the same window. This rank leaves the
// window when the last copy and the last tensor from at() are destroyed. Thread-safe.
//
//   const auto window = group.window(group.allocate({1024}));
//   window.put(right, border);            // writes into the memory of rank `right`
//   window.signal(right);
//   window.wait_signal(left, Deadline::after(10s));   // then what `left` put before is visible
//
// Only fence() and signal() order accesses: concurrent writes to the same place are a data race. A
// forked child may use tensors that at() gave before the fork, and all ranks see what it writes
// there. at(), put(), signal() and wait_signal() throw kUnsupported in the child, and
// kInvalidArgument for a rank that does not exist.
class Window {
 public:
  Window() = default;  // no window
  explicit operator bool() const { return impl_ != nullptr; }

  int rank() const;
  int size() const;

  // A rank's tensor, without a copy. Throws kPeerLost if that rank has died or left. Tensors from
  // earlier calls stay mapped then, but no other rank sees writes to them.
  at::Tensor at(int rank) const;
  // Copies elements into a rank's tensor, from its element `offset` on. Does not block. Throws
  // kInvalidArgument for another type or too many elements, kPeerLost if the rank is gone.
  void put(int rank, const at::Tensor& tensor, std::int64_t offset = 0) const;

  // Collective: after it, all ranks see what any rank wrote before it. Blocks and throws as
  // ProcessGroup::barrier.
  void fence(const CallOptions& options = {}) const;
  // Sends one signal to a rank. Signals are counted. Does not block. Throws kPeerLost if the rank
  // is gone.
  void signal(int rank) const;
  // Takes one signal from a rank; blocks until there is one. Then this rank sees what that rank
  // wrote before it. Throws kTimeout at the deadline; kPeerLost if the rank is gone and sent no
  // more signals, and once for each other rank that dies.
  void wait_signal(int rank, const Deadline& deadline) const;

 private:
  friend class ProcessGroup;
  struct Impl;
  explicit Window(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  Impl& impl() const;

  std::shared_ptr<Impl> impl_;
};

}  // namespace convoy
