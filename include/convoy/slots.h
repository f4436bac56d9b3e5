#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/values.h"

namespace convoy::share {

// Name, shape and type of a tensor: in each slot, or in each version of a Published.
struct TensorSpec {
  std::string name;
  std::vector<std::int64_t> sizes;
  at::ScalarType type = at::kFloat;

  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

// A slot that this process fills or reads. Movable. A slot that is filled but not committed, or
// that was read, becomes free when this object and all tensors from it are destroyed, or by
// release(). Not thread-safe. Methods of an empty Slot throw kInvalidArgument.
class Slot {
 public:
  Slot() = default;  // empty
  explicit operator bool() const { return held_ != nullptr; }

  std::size_t size() const;
  // A tensor of the slot: the shared memory itself. Throws kInvalidArgument if there is no such
  // tensor.
  at::Tensor operator[](std::size_t i) const;
  at::Tensor operator[](std::string_view name) const;
  // For a slot that is read: 1 for the first one that was committed, and so on.
  std::uint64_t number() const;

  // Makes the filled slot ready for readers. Do not use its tensors afterwards. Throws
  // kInvalidArgument in a forked child, if the parent holds the slot.
  void commit();
  // Frees the slot now. Do not use its tensors afterwards.
  void release();

 private:
  friend class Slots;
  struct Held;
  explicit Slot(std::shared_ptr<Held> held) : held_(std::move(held)) {}
  Held& held() const;

  std::shared_ptr<Held> held_;
};

// Slots of tensors in shared memory, allocated once, which actors fill and a learner reads:
//
//   const convoy::share::Slots slots(16, {{"states", {64, 4}}, {"rewards", {64}}});
//   while (auto slot = slots.fill(deadline)) {               // in an actor
//     slot["states"].copy_(states);
//     slot.commit();
//   }
//   while (auto slot = slots.next(deadline)) train(slot["states"], slot["rewards"]);
//
// Copies are the same slots, and so are objects that other processes get as an argument or in a
// message. Several processes may fill, several may read, in the order of commits. If a process
// dies, the slot that it was filling becomes free, and the slot that it was reading becomes ready
// again (both logged, and counted in counts()). Thread-safe, except for constructors and
// assignment.
class Slots {
 public:
  Slots() = default;  // empty
  // Throws kInvalidArgument unless `count` is from 1 to 65536 and there is a tensor, kResource if
  // memory does not suffice.
  Slots(std::size_t count, const std::vector<TensorSpec>& tensors);
  explicit operator bool() const { return impl_ != nullptr; }

  // Blocks until a slot is free, and returns it to be filled. Returns an empty Slot once the slots
  // are closed. Throws kTimeout at the deadline.
  Slot fill(const Deadline& deadline) const;
  Slot try_fill() const;  // does not wait: empty if no slot is free
  // Blocks until a slot is ready, and returns it to be read. Returns an empty Slot once the slots
  // are closed and all were read. Throws kTimeout at the deadline.
  Slot next(const Deadline& deadline) const;
  Slot try_next() const;  // does not wait: empty if no slot is ready

  // From now on no slot can be filled. Waiters wake up. Committed slots can still be read.
  void close() const;
  bool closed() const;

  struct Counts {
    std::size_t free = 0, filling = 0, ready = 0, reading = 0;
    std::uint64_t committed = 0;  // total
    std::uint64_t abandoned = 0;  // slots that a process was filling when it died
    std::uint64_t returned = 0;   // slots that a process was reading when it died
  };
  Counts counts() const;
  // Takes back the slots of dead processes; returns how many. Waiters do this too, every 50 ms.
  std::size_t reclaim() const;

  std::size_t size() const;
  const std::vector<TensorSpec>& tensors() const;

  // In messages this object travels as a tensor. open() makes it from that tensor again, and throws
  // kInvalidArgument for any other tensor.
  at::Tensor handle() const;
  static Slots open(const at::Tensor& handle);
  void put_values(Message& to) const { to.add(handle()); }
  static Slots take_values(ValueReader& from) { return open(from.take<at::Tensor>()); }

 private:
  friend class Slot;
  struct Impl;
  explicit Slots(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  const std::shared_ptr<Impl>& impl() const;

  std::shared_ptr<Impl> impl_;
};

}  // namespace convoy::share
