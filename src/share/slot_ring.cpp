#include "share/slot_ring.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <unordered_map>

#include "base/error.h"
#include "base/log.h"

namespace convoy::share {
namespace {

// A ProcessWord is below 2^62 for the first three hundred years of a machine's uptime.
enum Kind : std::uint64_t { kFree = 0, kFilling = 1, kReady = 2, kReading = 3 };
constexpr int kKindShift = 62;
constexpr std::uint64_t kRest = (std::uint64_t{1} << kKindShift) - 1;

constexpr std::size_t kPage = 4096;

std::uint64_t state_of(Kind kind, std::uint64_t rest) { return kind << kKindShift | rest; }
Kind kind_of(std::uint64_t state) { return static_cast<Kind>(state >> kKindShift); }
std::uint64_t rest_of(std::uint64_t state) { return state & kRest; }

struct SlotOffsets {
  std::size_t entries, layout, data, stride, end;

  SlotOffsets(std::size_t slots, std::size_t slot_bytes, std::size_t layout_bytes)
      : entries(sizeof(SlotHead)),
        layout(entries + slots * sizeof(SlotEntry)),
        data((layout + layout_bytes + kPage - 1) / kPage * kPage),
        stride((std::max<std::size_t>(slot_bytes, 1) + 63) / 64 * 64),
        end(data + slots * stride) {}
};

}  // namespace

std::size_t SlotRing::bytes_for(std::size_t slots, std::size_t slot_bytes,
                                std::size_t layout_bytes) {
  if (slots < 1 || slots > kMostSlots) {
    fail(ErrorKind::kInvalidArgument, "Slots: ", slots, " slots; there can be 1 to ", kMostSlots);
  }
  if (slot_bytes > SIZE_MAX / (4 * kMostSlots) || layout_bytes > SIZE_MAX / 4) {
    fail(ErrorKind::kResource, "Slots: slots of ", slot_bytes,
         " bytes are too large for any memory");
  }
  return SlotOffsets(slots, slot_bytes, layout_bytes).end;
}

SlotRing SlotRing::create(std::span<std::byte> memory, std::size_t slots, std::size_t slot_bytes,
                          std::string_view layout) {
  CONVOY_CHECK(memory.size() >= bytes_for(slots, slot_bytes, layout.size()));
  const SlotOffsets at(slots, slot_bytes, layout.size());
  std::memset(memory.data(), 0, at.end);
  auto* const head = new (memory.data()) SlotHead;
  for (std::size_t i = 0; i < slots; ++i) {
    new (memory.data() + at.entries + i * sizeof(SlotEntry)) SlotEntry;
  }
  std::memcpy(memory.data() + at.layout, layout.data(), layout.size());
  head->slots = slots;
  head->slot_bytes = slot_bytes;
  head->layout_bytes = layout.size();
  head->layout_offset = at.layout;
  head->data_offset = at.data;
  head->domain = own_domain();
  std::atomic_ref(head->magic).store(SlotHead::kMagic, std::memory_order_release);
  return open(memory);
}

SlotRing SlotRing::open(std::span<std::byte> memory) {
  const auto refuse = [] {
    fail(ErrorKind::kInvalidArgument, "this is not a handle of slots of this version: refused");
  };
  if (memory.size() < sizeof(SlotHead)) refuse();
  auto* const head = reinterpret_cast<SlotHead*>(memory.data());
  if (std::atomic_ref(head->magic).load(std::memory_order_acquire) != SlotHead::kMagic) refuse();
  const std::size_t slots = head->slots, bytes = head->slot_bytes;
  const std::size_t layout_bytes = head->layout_bytes;
  if (slots < 1 || slots > kMostSlots || bytes > memory.size() || layout_bytes > memory.size()) {
    refuse();
  }
  const SlotOffsets at(slots, bytes, layout_bytes);
  if (at.end > memory.size() || head->layout_offset != at.layout || head->data_offset != at.data) {
    refuse();
  }
  SlotRing ring;
  ring.domain_ = head->domain;
  require_own_domain(ring.domain_, "Slots");
  ring.head_ = head;
  ring.entries_ = reinterpret_cast<SlotEntry*>(memory.data() + at.entries);
  ring.data_ = memory.data() + at.data;
  ring.slots_ = slots;
  ring.slot_bytes_ = bytes;
  ring.stride_ = at.stride;
  ring.layout_ = {reinterpret_cast<const char*>(memory.data()) + at.layout, layout_bytes};
  return ring;
}

std::uint64_t SlotRing::self() const {
  require_own_domain(domain_, "Slots");
  return own_process_word() & kRest;
}

std::optional<std::size_t> SlotRing::try_fill() const {
  const std::uint64_t mine = state_of(kFilling, self());
  for (std::size_t i = 0; i < slots_; ++i) {
    std::uint64_t seen = entries_[i].state.load();
    if (seen == 0 && entries_[i].state.compare_exchange_strong(seen, mine)) return i;
  }
  return std::nullopt;
}

std::uint64_t SlotRing::commit(std::size_t slot) const {
  const std::uint64_t number = head_->numbers.fetch_add(1) + 1;
  entries_[slot].number.store(number);
  entries_[slot].state.store(state_of(kReady, number));
  ring(head_->filled);
  return number;
}

std::optional<std::size_t> SlotRing::try_read() const {
  const std::uint64_t mine = state_of(kReading, self());
  for (;;) {
    std::optional<std::size_t> first;
    std::uint64_t lowest = 0;
    for (std::size_t i = 0; i < slots_; ++i) {
      const std::uint64_t seen = entries_[i].state.load();
      if (kind_of(seen) == kReady && (!first || seen < lowest)) {
        first = i;
        lowest = seen;
      }
    }
    if (!first) return std::nullopt;
    if (entries_[*first].state.compare_exchange_strong(lowest, mine)) return first;
  }
}

std::uint64_t SlotRing::number(std::size_t slot) const { return entries_[slot].number.load(); }

void SlotRing::release(std::size_t slot) const noexcept {
  entries_[slot].state.store(0);
  ring(head_->freed);
}

void SlotRing::close() const noexcept {
  head_->closed.store(1);
  ring(head_->freed);
  ring(head_->filled);
}

template <class Take>
std::optional<std::size_t> SlotRing::wait(WaitWord& word, const char* what,
                                          const Deadline& deadline, Take take) const {
  std::optional<std::size_t> found;
  bool over = false;
  const auto ready = [&](std::uint32_t) {
    over = take(found);
    return over || found.has_value();
  };
  const WaitPolicy policy{.spins = 0, .yields = 0};
  for (;;) {
    const auto slice = std::min(deadline, Deadline::after(kLookAtDeaths));
    if (wait_until(word, policy, slice, ready)) return found;
    const bool expired = deadline.expired();
    if (reclaim() > 0 && ready(0)) return found;
    if (expired) {
      const Counts now = counts();
      fail(ErrorKind::kTimeout, "no slot to ", what, ": of ", slots_, " slots ", now.free,
           " are free, ", now.filling, " being filled, ", now.ready, " ready, ", now.reading,
           " being read");
    }
  }
}

std::optional<std::size_t> SlotRing::fill(const Deadline& deadline) const {
  return wait(head_->freed, "fill", deadline, [this](std::optional<std::size_t>& found) {
    if (closed()) return true;
    found = try_fill();
    return false;
  });
}

std::optional<std::size_t> SlotRing::read(const Deadline& deadline) const {
  return wait(head_->filled, "read", deadline, [this](std::optional<std::size_t>& found) {
    const bool last = closed();  // before the look: what was committed before close() is seen
    found = try_read();
    return last;
  });
}

std::size_t SlotRing::reclaim() const {
  std::unordered_map<std::uint64_t, bool> dead;
  std::size_t taken = 0;
  for (std::size_t i = 0; i < slots_; ++i) {
    std::uint64_t seen = entries_[i].state.load();
    const Kind kind = kind_of(seen);
    if (kind != kFilling && kind != kReading) continue;
    const ProcessWord holder = rest_of(seen);
    const auto [known, is_new] = dead.try_emplace(holder, false);
    if (is_new) known->second = is_dead(holder, domain_);
    if (!known->second) continue;
    const std::uint64_t next = kind == kFilling ? 0 : state_of(kReady, entries_[i].number.load());
    if (!entries_[i].state.compare_exchange_strong(seen, next)) continue;
    ++taken;
    (kind == kFilling ? head_->abandoned : head_->returned).fetch_add(1);
    log_warn("slot ", i, ": pid ", pid_of(holder), " ended while it was ",
             kind == kFilling ? "filling it; it is free again" : "reading it; it is ready again");
    ring(kind == kFilling ? head_->freed : head_->filled);
  }
  return taken;
}

SlotRing::Counts SlotRing::counts() const {
  Counts counts;
  for (std::size_t i = 0; i < slots_; ++i) {
    switch (kind_of(entries_[i].state.load())) {
      case kFree: ++counts.free; break;
      case kFilling: ++counts.filling; break;
      case kReady: ++counts.ready; break;
      case kReading: ++counts.reading; break;
    }
  }
  counts.committed = head_->numbers.load();
  counts.abandoned = head_->abandoned.load();
  counts.returned = head_->returned.load();
  return counts;
}

}  // namespace convoy::share
