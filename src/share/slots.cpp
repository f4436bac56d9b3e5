#include "convoy/slots.h"

#include "base/error.h"
#include "os/fork_guard.h"
#include "share/layout.h"
#include "share/slot_ring.h"

namespace convoy::share {

struct Slots::Impl {
  Impl(at::Tensor bytes, SlotRing slots)
      : memory(std::move(bytes)), ring(slots), layout(TensorLayout::parse(ring.layout())) {
    if (layout.bytes() > ring.slot_bytes()) {
      fail(ErrorKind::kInvalidArgument, "Slots: the tensors do not fit their slots: refused");
    }
  }

  const at::Tensor memory;  // keeps it
  const SlotRing ring;
  const TensorLayout layout;
};

struct Slot::Held {
  Held(std::shared_ptr<Slots::Impl> slots, std::size_t index)
      : owner(std::move(slots)), slot(index) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { give_back(); }

  void give_back() noexcept {
    // In a forked child it is its parent's.
    if (!finished && generation == fork_generation()) owner->ring.release(slot);
    finished = true;
  }

  const std::shared_ptr<Slots::Impl> owner;
  const std::size_t slot;
  const unsigned generation = fork_generation();
  bool finished = false;
};

Slot::Held& Slot::held() const {
  if (!held_) fail(ErrorKind::kInvalidArgument, "this Slot is empty; fill() or next() gives one");
  return *held_;
}

std::size_t Slot::size() const { return held().owner->layout.tensors().size(); }

at::Tensor Slot::operator[](std::size_t i) const {
  Held& slot = held();
  if (slot.finished) fail(ErrorKind::kInvalidArgument, "this slot was given back");
  if (i >= size()) {
    fail(ErrorKind::kInvalidArgument, "tensor ", i, " does not exist: the slot has ", size(),
         " tensors");
  }
  return slot.owner->layout.view(i, slot.owner->ring.data(slot.slot), held_);
}

at::Tensor Slot::operator[](std::string_view name) const {
  return (*this)[held().owner->layout.index_of(name)];
}

std::uint64_t Slot::number() const { return held().owner->ring.number(held().slot); }

void Slot::commit() {
  Held& slot = held();
  if (slot.finished) fail(ErrorKind::kInvalidArgument, "this slot was committed or given back");
  if (slot.generation != fork_generation()) {
    fail(ErrorKind::kInvalidArgument, "this slot belongs to the parent of this forked process");
  }
  slot.finished = true;
  slot.owner->ring.commit(slot.slot);
  held_.reset();
}

void Slot::release() {
  held().give_back();
  held_.reset();
}

Slots::Slots(std::size_t count, const std::vector<TensorSpec>& tensors) {
  if (tensors.empty()) fail(ErrorKind::kInvalidArgument, "Slots: no tensors to be in a slot");
  const TensorLayout layout(tensors);
  const std::string encoded = layout.encode();
  auto memory = shared_bytes(SlotRing::bytes_for(count, layout.bytes(), encoded.size()));
  const auto ring = SlotRing::create(bytes_of(memory), count, layout.bytes(), encoded);
  impl_ = std::make_shared<Impl>(std::move(memory), ring);
}

const std::shared_ptr<Slots::Impl>& Slots::impl() const {
  if (!impl_)
    fail(ErrorKind::kInvalidArgument, "this Slots object is empty; construct or open one");
  return impl_;
}

namespace {

template <class Held, class Owner>
std::shared_ptr<Held> hold(const Owner& owner, std::optional<std::size_t> slot) {
  return slot ? std::make_shared<Held>(owner, *slot) : nullptr;
}

}  // namespace

Slot Slots::fill(const Deadline& deadline) const {
  return Slot(hold<Slot::Held>(impl(), impl()->ring.fill(deadline)));
}

Slot Slots::try_fill() const {
  return Slot(hold<Slot::Held>(impl(), closed() ? std::nullopt : impl()->ring.try_fill()));
}

Slot Slots::next(const Deadline& deadline) const {
  return Slot(hold<Slot::Held>(impl(), impl()->ring.read(deadline)));
}

Slot Slots::try_next() const { return Slot(hold<Slot::Held>(impl(), impl()->ring.try_read())); }

void Slots::close() const { impl()->ring.close(); }
bool Slots::closed() const { return impl()->ring.closed(); }

Slots::Counts Slots::counts() const {
  const auto c = impl()->ring.counts();
  return {.free = c.free,
          .filling = c.filling,
          .ready = c.ready,
          .reading = c.reading,
          .committed = c.committed,
          .abandoned = c.abandoned,
          .returned = c.returned};
}

std::size_t Slots::reclaim() const { return impl()->ring.reclaim(); }
std::size_t Slots::size() const { return impl()->ring.slots(); }
const std::vector<TensorSpec>& Slots::tensors() const { return impl()->layout.tensors(); }
at::Tensor Slots::handle() const { return impl()->memory; }

Slots Slots::open(const at::Tensor& handle) {
  const auto ring = SlotRing::open(bytes_of(handle));
  return Slots(std::make_shared<Impl>(handle, ring));
}

}  // namespace convoy::share
