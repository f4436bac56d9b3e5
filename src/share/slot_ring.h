#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "convoy/deadline.h"
#include "os/wait.h"
#include "share/book.h"

namespace convoy::share {

// Slots of equal size in shared memory, which some processes fill and others read.
//
//   free -> filling (a process) -> ready (a number) -> reading (a process) -> free
//
// A slot's state is one word, and each step is one compare-and-swap of it, so a process that dies
// leaves every slot in one of these states, and everybody can see in which, and whose: who waits
// looks for slots of the dead at times, and takes back what they were filling (it is free) or
// reading (it is ready, again). Ready slots are read in the order of their numbers, which are given
// out when they become ready.
inline constexpr std::size_t kMostSlots = 65536;

struct SlotHead {
  static constexpr std::uint64_t kMagic = 0x32544f4c53565643;  // "CVVSLOT2"

  std::uint64_t magic = 0;  // written last, by who made it, as all up to `domain`
  std::uint64_t slots = 0;
  std::uint64_t slot_bytes = 0;
  std::uint64_t layout_bytes = 0;
  std::uint64_t layout_offset = 0;
  std::uint64_t data_offset = 0;
  std::uint64_t domain = 0;                 // process_domain() of all users
  std::atomic<std::uint64_t> numbers{0};    // given out; read-modify-write by who commits
  std::atomic<std::uint64_t> abandoned{0};  // slots of dead fillers; by who takes them back
  std::atomic<std::uint64_t> returned{0};   // slots of dead readers; the same
  std::atomic<std::uint32_t> closed{0};     // 0 to 1, by anybody
  std::uint32_t unused = 0;
  // Counted up by whoever makes a slot free, or ready, after that; who finds none sleeps on it.
  WaitWord freed;
  WaitWord filled;
};
static_assert(sizeof(SlotHead) <= 128);

struct SlotEntry {
  // kind << 62 | process, or number. Sequentially consistent: the contents go with it.
  std::atomic<std::uint64_t> state{0};
  // Of a slot that was ready; by its filler before it is, read by who takes it back from a reader.
  std::atomic<std::uint64_t> number{0};
};

// A view of the slots in mapped memory. A value; all methods may be called from any thread of any
// process.
class SlotRing {
 public:
  SlotRing() = default;
  static std::size_t bytes_for(std::size_t slots, std::size_t slot_bytes, std::size_t layout_bytes);
  // Lays out free slots in memory of bytes_for(); clears all of it, so that its pages are there.
  static SlotRing create(std::span<std::byte> memory, std::size_t slots, std::size_t slot_bytes,
                         std::string_view layout);
  // What another process laid out. Throws kInvalidArgument.
  static SlotRing open(std::span<std::byte> memory);

  std::size_t slots() const { return slots_; }
  std::size_t slot_bytes() const { return slot_bytes_; }
  std::string_view layout() const { return layout_; }
  std::byte* data(std::size_t slot) const { return data_ + slot * stride_; }

  // A free slot to fill. nullopt: closed. kTimeout.
  std::optional<std::size_t> fill(const Deadline& deadline) const;
  // It is ready; its number.
  std::uint64_t commit(std::size_t slot) const;
  // The ready slot with the lowest number. nullopt: closed, and all was read. kTimeout.
  std::optional<std::size_t> read(const Deadline& deadline) const;
  std::optional<std::size_t> try_fill() const;
  std::optional<std::size_t> try_read() const;
  std::uint64_t number(std::size_t slot) const;
  // It is free: it was read, or shall not be filled.
  void release(std::size_t slot) const noexcept;

  void close() const noexcept;
  bool closed() const { return head_->closed.load() != 0; }

  // Takes back what processes held that are known to be dead; how much. Writes a line for each into
  // the log.
  std::size_t reclaim() const;

  struct Counts {
    std::size_t free = 0, filling = 0, ready = 0, reading = 0;
    std::uint64_t committed = 0, abandoned = 0, returned = 0;
  };
  Counts counts() const;

 private:
  template <class Take>
  std::optional<std::size_t> wait(WaitWord& word, const char* what, const Deadline& deadline,
                                  Take take) const;
  std::uint64_t self() const;  // this process in a slot's state

  SlotHead* head_ = nullptr;
  SlotEntry* entries_ = nullptr;
  std::byte* data_ = nullptr;
  // Copies of what the head says: it could be changed by a process that went wrong.
  std::size_t slots_ = 0;
  std::size_t slot_bytes_ = 0;
  std::size_t stride_ = 0;
  std::uint64_t domain_ = 0;
  std::string_view layout_;
};

}  // namespace convoy::share
