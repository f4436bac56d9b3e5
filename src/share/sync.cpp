// Events, barriers and locks as objects of this process.
#include <concepts>
#include <new>

#include "base/error.h"
#include "base/log.h"
#include "convoy/queue.h"
#include "convoy/values.h"
#include "share/shared.h"
#include "share/sync_memory.h"

namespace convoy::share {
namespace {

template <class Memory>
struct SmallImpl : Shared::Impl {
  SmallImpl(Shared::Kind is, Segment own) : Impl(is), segment(std::move(own)) {
    if constexpr (std::same_as<Memory, BarrierMemory>) memory().join();
  }
  SmallImpl(const SmallImpl&) = delete;
  SmallImpl& operator=(const SmallImpl&) = delete;
  ~SmallImpl() override {
    end_offers();
    try {
      SharedObjects::end(segment.key(), [this] { leave(); });
    } catch (const Error& error) {
      log_warn(error.what());
    }
  }
  Memory& memory() const { return *reinterpret_cast<Memory*>(segment.data()); }
  void leave() const {
    if constexpr (std::same_as<Memory, BarrierMemory>) memory().leave();
  }
  std::vector<int> descriptors() const override { return {segment.fd()}; }

  const Segment segment;
};

template <class Memory, class Init>
std::shared_ptr<Shared::Impl> make(Shared::Kind kind, Init init) {
  Segment segment = Segment::create(sizeof(Memory), "sync", Segment::Warm::kYes);
  auto* const memory = new (segment.data()) Memory;
  init(*memory);
  memory->head.kind = static_cast<std::uint32_t>(kind);
  memory->head.domain = own_domain();
  std::atomic_ref(memory->head.magic).store(SyncHead::kMagic, std::memory_order_release);
  const auto key = segment.key();
  return SharedObjects::find_or(
      key, [&] { return std::make_shared<SmallImpl<Memory>>(kind, std::move(segment)); });
}

template <class Memory>
Memory& memory_of(const Shared& object) {
  return static_cast<SmallImpl<Memory>&>(object.impl()).memory();
}

const Shared& as(Shared::Kind kind, const Shared& object) {
  require(object, kind);
  return object;
}

Lock::Taken to_public(RobustMutex::Taken taken) {
  return taken == RobustMutex::Taken::kFree ? Lock::Taken::kFree : Lock::Taken::kFromDead;
}

}  // namespace

std::shared_ptr<Shared::Impl> adopt_small(UniqueFd descriptor) {
  const auto key = Segment::key_of(descriptor.get());
  return SharedObjects::find_or(key, [&]() -> std::shared_ptr<Shared::Impl> {
    Segment segment = adopt_segment(std::move(descriptor));
    auto& head = *reinterpret_cast<SyncHead*>(segment.data());
    const auto kind = static_cast<Shared::Kind>(head.kind);
    const auto fits = [&](std::size_t bytes) {
      return std::atomic_ref(head.magic).load(std::memory_order_acquire) == SyncHead::kMagic &&
             segment.size() >= bytes;
    };
    // The kernel knows who holds a lock by its number in its namespace.
    if (kind != Shared::Kind::kEvent && fits(sizeof head)) {
      require_own_domain(head.domain, kind == Shared::Kind::kLock ? "this lock" : "this barrier");
    }
    if (kind == Shared::Kind::kEvent && fits(sizeof(EventMemory))) {
      return std::make_shared<SmallImpl<EventMemory>>(kind, std::move(segment));
    }
    if (kind == Shared::Kind::kBarrier && fits(sizeof(BarrierMemory))) {
      return std::make_shared<SmallImpl<BarrierMemory>>(kind, std::move(segment));
    }
    if (kind == Shared::Kind::kLock && fits(sizeof(LockMemory))) {
      return std::make_shared<SmallImpl<LockMemory>>(kind, std::move(segment));
    }
    fail(ErrorKind::kInvalidArgument,
         "memory from another process is not an event, barrier or lock of this version: refused");
  });
}

Event Event::create() {
  return Event(Shared(make<EventMemory>(Shared::Kind::kEvent, [](EventMemory&) {})));
}
Event::Event(const Shared& object) : Shared(as(Kind::kEvent, object)) {}
Event Event::take_values(ValueReader& from) { return Event(from.take<Shared>()); }
bool Event::is_set() const { return memory_of<EventMemory>(*this).is_set(); }
void Event::set() const { memory_of<EventMemory>(*this).set(); }
void Event::clear() const { memory_of<EventMemory>(*this).clear(); }
bool Event::wait(const Deadline& deadline) const {
  return memory_of<EventMemory>(*this).wait(deadline);
}

namespace {

std::shared_ptr<Shared::Impl> make_barrier(std::size_t parties) {
  if (parties == 0 || parties > 65535) {
    fail(ErrorKind::kInvalidArgument, "the parties of a barrier must be from 1 to 65535, got ",
         parties);
  }
  return make<BarrierMemory>(Shared::Kind::kBarrier, [&](BarrierMemory& memory) {
    memory.init(static_cast<std::uint32_t>(parties));
  });
}

}  // namespace

Barrier::Barrier(std::size_t parties) : Shared(make_barrier(parties)) {}
Barrier::Barrier(const Shared& object) : Shared(as(Kind::kBarrier, object)) {}
Barrier Barrier::take_values(ValueReader& from) { return Barrier(from.take<Shared>()); }
std::size_t Barrier::parties() const { return memory_of<BarrierMemory>(*this).parties(); }
std::size_t Barrier::waiting() const { return memory_of<BarrierMemory>(*this).waiting(); }
std::size_t Barrier::wait(const Deadline& deadline) const {
  return memory_of<BarrierMemory>(*this).wait(deadline);
}
void Barrier::reset() const { memory_of<BarrierMemory>(*this).reset(); }

Lock Lock::create() {
  return Lock(Shared(
      make<LockMemory>(Shared::Kind::kLock, [](LockMemory& memory) { memory.mutex.init(); })));
}
Lock::Lock(const Shared& object) : Shared(as(Kind::kLock, object)) {}
Lock Lock::take_values(ValueReader& from) { return Lock(from.take<Shared>()); }
Lock::Taken Lock::lock(const Deadline& deadline) const {
  const auto taken = memory_of<LockMemory>(*this).mutex.lock(deadline);
  if (!taken)
    fail(ErrorKind::kTimeout, "lock: another process or thread held it until the deadline");
  return to_public(*taken);
}
std::optional<Lock::Taken> Lock::try_lock() const {
  const auto taken = memory_of<LockMemory>(*this).mutex.try_lock();
  if (!taken) return std::nullopt;
  return to_public(*taken);
}
void Lock::unlock() const { memory_of<LockMemory>(*this).mutex.unlock(); }

}  // namespace convoy::share
