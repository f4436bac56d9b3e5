#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "transport/endpoint.h"
#include "transport/shm/mapping.h"

namespace convoy::shm {

// One direction between two endpoints: a ring of letters in shared memory, with one writer and one
// reader, and what the reader has given back. Does not wait. Each side trusts only its own
// position; what the other's memory says is checked.
//
//      0    8  magic "CVLR2"
//      8   16  an address in the writer's memory and the number that is there: by reading it the
//      reader
//              finds out whether it may read the writer's memory (process_vm_readv)
//     64    8  bytes written, since ever                            (writer)
//    128    8  bytes read, since ever                               (reader)
//    136    4  reading the writer's memory: 0 not known, 1 allowed, 2 not
//    192    4  the writer waits for room or for loans: knock        (writer)
//    196    4  the writer has given up: its own memory is not to be read any more, and what was
//    read
//              of it since is worth nothing                         (writer)
//    256   32  one bit for each loan that was given back            (reader sets, writer clears)
//    512    n  letters, each as a whole (LetterEntry); one that does not fit before the end begins
//    at
//              the beginning, and the rest is skipped: length 0xffffffff
struct RingLayout {
  static constexpr std::uint64_t kMagic = 0x32524c5643;
  static constexpr std::size_t kData = 512;
  static constexpr std::size_t kCapacity = std::size_t{1} << 16;
  static constexpr std::size_t kBytes = kData + kCapacity;
  static constexpr std::size_t kLoans = 256;
  static constexpr std::size_t kMostEntry = kCapacity / 2;
  enum Direct : std::uint32_t { kUnknown = 0, kAllowed = 1, kRefused = 2 };

  std::uint64_t magic;
  std::uint64_t probe_address;
  std::uint64_t probe_value;
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  std::atomic<std::uint32_t> direct;
  alignas(64) std::atomic<std::uint32_t> blocked;
  std::atomic<std::uint32_t> revoked;
  alignas(64) std::array<std::atomic<std::uint64_t>, kLoans / 64> released;
};
static_assert(sizeof(RingLayout) <= RingLayout::kData);

// A letter in the ring.
//
//    0  4  bytes of all this, a multiple of 8
//    4  2  kind
//    6  1  1: a reply; 2: it comes before its lent pieces are complete (StreamHead)
//    7  1  0
//    8  4  bytes of the head
//   12  2  pieces
//   14  2  0, or the loan's number and 1: of memory that was lent and that the reader gives back
//   16  h  head, and zeros up to 8
//       n  of each piece a PieceEntry
//       m  the bytes of inline pieces, each with zeros up to 8
struct LetterEntry {
  enum Flags : std::uint8_t { kReply = 1, kStreams = 2 };
  static constexpr std::uint32_t kSkip = 0xffffffff;

  std::uint32_t bytes;
  std::uint16_t kind;
  std::uint8_t flags;
  std::uint8_t zero;
  std::uint32_t head_bytes;
  std::uint16_t pieces;
  std::uint16_t loan;
};
static_assert(sizeof(LetterEntry) == 16);

struct PieceEntry {
  enum How : std::uint32_t {
    kInline = 0,
    kLent = 1,    // at `place` in the writer's segment `segment`
    kDirect = 2,  // at the address `place` in the writer's memory; `segment` is the number and 1 of
                  // a loan of its own, the same for all of a letter: given back when they were
                  // read, with a knock
  };

  std::uint64_t bytes;
  std::uint32_t how;
  std::uint32_t zero;
  std::uint64_t segment;
  std::uint64_t place;
};
static_assert(sizeof(PieceEntry) == 32);

// What lies before the first lent piece of a letter that streams: the writer copies while the
// reader does. The pieces of such a letter follow each other in one segment, none is read directly,
// and the writer knocks when all is there.
struct StreamHead {
  static constexpr std::size_t kBytes = 64;

  std::atomic<std::uint64_t> ready{0};  // bytes behind this head that are there
};
static_assert(sizeof(StreamHead) <= StreamHead::kBytes);

constexpr std::size_t padded(std::size_t bytes) { return (bytes + 7) / 8 * 8; }

// A letter that was copied out of a ring, checked; refers to those bytes.
struct ParsedLetter {
  struct Piece {
    PieceEntry entry;
    std::span<const std::byte> bytes;  // of an inline one
  };

  transport::LetterKind kind = 0;
  bool reply = false;
  std::uint16_t loan = 0;         // number and 1
  std::uint16_t direct_loan = 0;  // the same
  std::span<const std::byte> head;
  std::vector<Piece> pieces;
  bool large = false;    // some piece is not inline
  bool streams = false;  // before its lent pieces is a StreamHead
};
// `entry` is one letter. Throws kInvalidArgument for anything else.
ParsedLetter parse_letter(std::span<const std::byte> entry);
// The same of a letter without pieces; false if it has some.
struct PlainLetter {
  transport::LetterKind kind;
  bool reply;
  std::uint32_t bytes;
  const std::byte* data;

  std::span<const std::byte> head() const { return {data, bytes}; }
};
bool parse_plain(std::span<const std::byte> entry, PlainLetter& letter);

// The writer's side. Not thread-safe: the owner locks.
class RingWriter {
 public:
  // `probe` stays as it is as long as this.
  static RingWriter create(const std::uint64_t& probe);

  explicit operator bool() const { return mapping_ != nullptr; }
  const Mapping& mapping() const { return mapping_; }
  // To be passed to the reader; gone after that.
  int fd() const { return fd_.get(); }
  void close_descriptor() { fd_.reset(); }
  // Room for an entry in one piece, or an empty span. It goes with commit().
  std::span<std::byte> begin(std::size_t entry_bytes);
  void commit();
  std::size_t free_bytes();
  RingLayout& layout() const { return *reinterpret_cast<RingLayout*>(mapping_->data()); }

 private:
  bool fits(std::size_t bytes);

  Mapping mapping_;
  UniqueFd fd_;
  std::uint64_t position_ = 0;
  std::uint64_t begun_ = 0;      // what the entry under way takes, with what is skipped
  std::uint64_t seen_read_ = 0;  // of the reader's position, when last looked at
};

// The reader's side. take() is not thread-safe; release() is.
class RingReader {
 public:
  // Throws kInvalidArgument if it is no ring.
  explicit RingReader(Mapping mapping);

  // The next letter, copied to `small` if it fits, else to `large`; empty if there is none. Throws
  // kInvalidArgument if the ring holds what cannot be.
  std::span<const std::byte> take(std::span<std::byte> small, std::vector<std::byte>& large);
  // The next letter, of those that were seen already, has no pieces, is as short and is a reply or
  // not. What the ring says is not checked here: take() and parse_plain() do that.
  bool next_is_plain(std::size_t most_bytes, bool reply) const noexcept;
  // There is a letter. Without a lock, and sequentially consistent: for those who watch the ring.
  // The writer's line is not touched while there is more of what was seen before.
  bool has_letter() const noexcept {
    if (!drained()) return true;
    const std::uint64_t position = position_.load(std::memory_order_relaxed);
    if (layout().written.load() == position) return false;
    // It will be read in a moment, and comes from another core meanwhile.
    __builtin_prefetch(mapping_->data() + RingLayout::kData + position % RingLayout::kCapacity);
    return true;
  }
  // All letters before this position were taken.
  bool has_taken(std::uint64_t position) const noexcept {
    return position_.load(std::memory_order_relaxed) >= position;
  }
  // All was taken that the last look at the writer's position has shown.
  bool drained() const noexcept {
    return position_.load(std::memory_order_relaxed) ==
           seen_written_.load(std::memory_order_relaxed);
  }
  // The writer waits. To be asked after letters were taken, and when there are no more (`drained`).
  // A writer that has not found the ring in good part full does not wait; then nothing is looked
  // at.
  bool writer_is_blocked(bool drained) noexcept;
  // Gives a loan back; true if the writer waits.
  bool release(std::uint16_t loan) noexcept;
  RingLayout& layout() const { return *reinterpret_cast<RingLayout*>(mapping_->data()); }

 private:
  // A writer waits only if so much was in the ring that two of the largest entries (one may be
  // skipped space) do not fit beside it: 14 KiB. Of those the reader has seen half at once.
  static constexpr std::size_t kMuch = RingLayout::kCapacity / 16;

  Mapping mapping_;
  std::atomic<std::uint64_t> position_{0};      // written by who has the lock
  std::atomic<std::uint64_t> seen_written_{0};  // the same
  bool was_full_ = false;                       // in good part, since it was drained
};

}  // namespace convoy::shm
