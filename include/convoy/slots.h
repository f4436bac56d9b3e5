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

// A tensor that is to be: what lies in each slot, or in each version of what is published.
struct TensorSpec {
  std::string name;
  std::vector<std::int64_t> sizes;
  at::ScalarType type = at::kFloat;

  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

// A slot that this process fills or reads. Movable. The slot is given back (unfilled, or read)
// when this object and all tensors that were taken from it are gone, or by release(). Not
// thread-safe.
class Slot {
 public:
  Slot() = default;  // none
  explicit operator bool() const { return held_ != nullptr; }

  std::size_t size() const;
  // The slot's memory itself. kInvalidArgument if there is none of this name.
  at::Tensor operator[](std::size_t i) const;
  at::Tensor operator[](std::string_view name) const;
  // Of a slot that is read: 1 for the first that was committed, and so on.
  std::uint64_t number() const;

  // It is filled: somebody may read it from now on. Its tensors must not be used any more.
  void commit();
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
// Copies, and what another process gets as an argument or in a message, are the same slots. Several
// processes may fill, several may read. If a process dies, the slot that it was filling becomes
// free, and the slot that it was reading becomes ready again (logged, and counted in counts()).
// Slots are read in the order in which they were committed. All methods but the constructor and
// assignment may be called from any thread.
class Slots {
 public:
  Slots() = default;  // none
  // kResource if memory does not suffice.
  Slots(std::size_t count, const std::vector<TensorSpec>& tensors);
  explicit operator bool() const { return impl_ != nullptr; }

  // A free slot, to be filled; none once the slots are closed. kTimeout.
  Slot fill(const Deadline& deadline) const;
  Slot try_fill() const;  // none also if no slot is free
  // The next filled one; none once the slots are closed and all was read. kTimeout.
  Slot next(const Deadline& deadline) const;
  Slot try_next() const;

  // No more slots can be filled; processes that wait for a free slot wake up.
  void close() const;
  bool closed() const;

  struct Counts {
    std::size_t free = 0, filling = 0, ready = 0, reading = 0;
    std::uint64_t committed = 0;  // in all
    std::uint64_t abandoned = 0;  // that a process was filling when it died
    std::uint64_t returned = 0;   // that a process was reading when it died
  };
  Counts counts() const;
  // Takes back what dead processes held, as every wait does at times; how much.
  std::size_t reclaim() const;

  std::size_t size() const;
  const std::vector<TensorSpec>& tensors() const;

  // How they travel: a tensor stands for them in a message.
  at::Tensor handle() const;
  static Slots open(const at::Tensor& handle);  // kInvalidArgument
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
