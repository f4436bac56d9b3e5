#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "coll/tuner.h"
#include "coll/types.h"
#include "os/wait.h"
#include "transport/shm/arena.h"

namespace convoy::coll {

// Values are part of the fingerprint that ranks compare.
enum class OpKind : std::uint8_t {
  kNone,
  kBarrier,
  kMonitoredBarrier,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  // Counts differ by rank, and are compared in a table beside the fingerprint.
  kReduceScatterV,
  kAllGatherV,
  kGatherV,
  kScatterV,
  kAllToAllV,
};
std::string_view to_string(OpKind kind);
bool has_root(OpKind kind);
constexpr bool has_table(OpKind kind) { return kind >= OpKind::kReduceScatterV; }

// What all ranks must agree on for one operation: the fingerprint that every rank writes beside its
// arrival and compares with every other rank's before any data is touched.
struct Signature {
  OpKind op = OpKind::kNone;
  DataType type = DataType::kU8;
  ReduceOp reduce = ReduceOp::kSum;
  Rounding rounding = Rounding::kNone;
  std::uint16_t root = 0;
  std::uint16_t pieces = 0;  // of a coalesced operation
  std::uint64_t count = 0;   // elements: of the buffer, or of each rank's part of it
  // The caller's own, such as a hash of a layout; with kHashed, a hash of that and of shapes.
  std::uint64_t tag = 0;
  std::uint64_t factor = 0;  // bits of the factor of premul_sum

  static constexpr std::uint64_t kHashed = std::uint64_t{1} << 63;

  friend bool operator==(const Signature&, const Signature&) = default;
  std::string to_string() const;
};
static_assert(sizeof(Signature) == 32);

// The layout of the memory that all ranks of a group share. Written in units of cache lines; each
// word says who writes it. Everything up to Layout::cleared_bytes() starts as zeros.
inline constexpr std::size_t kLine = 64;
inline constexpr int kMaxRanks = 64;
inline constexpr std::size_t kInlineBytes = 24;
inline constexpr std::size_t kCauseBytes = 8176;

// Why the group is broken. The first rank that finds a reason claims `state` (0 -> 1, acq_rel),
// writes, and sets 2 (release). A rank that dies while writing leaves 1: readers then say less.
struct Cause {
  std::atomic<std::uint32_t> state{0};
  std::uint32_t kind = 0;
  std::int32_t reporter = 0;
  std::uint32_t length = 0;
  std::array<char, kCauseBytes> text{};
};

struct alignas(kLine) GroupHead {
  // Sleepers wait here, whatever they wait for; who makes a wait succeed rings it.
  alignas(kLine) WaitWord bell;
  // The first operation that failed for good; 0: the group is sound. Lowered only (CAS), by any
  // rank.
  alignas(kLine) std::atomic<std::uint64_t> failed{0};
  // An operation in which a rank died after it had done its part, so that it may still complete.
  // Raised only (CAS), by a rank that waits for another one and does not want to go on waiting;
  // whoever completes an operation looks here (see Engine::give_up_together).
  std::atomic<std::uint64_t> doubted{0};
  // What became of the last doubted operation: number << 1 | 1 if it failed, number << 1 if it is
  // complete. Raised only (CAS), by any rank; the first one decides for all.
  std::atomic<std::uint64_t> decided{0};
  // Ranks that have left (fetch_add after `left` is set, before the bell rings).
  std::atomic<std::uint32_t> departures{0};
  // (operation number mod 2^32) << 32 | chunks claimed, or finished, of that operation. CAS and
  // fetch_add (acq_rel) by every rank that works on it.
  alignas(kLine) std::atomic<std::uint64_t> claimed{0};
  alignas(kLine) std::atomic<std::uint64_t> finished{0};
  alignas(kLine) Cause cause;
};

// Where the ranks that read a rank's data find it.
enum class Carrier : std::uint8_t {
  kNone,     // it sends nothing
  kInline,   // in the slot
  kPayload,  // in the slot's payload
  kShared,   // in its own shared memory
  kPrivate,  // nowhere yet: it must be staged, or read out of the process
};

// What a rank expects of every other one, in elements, and hashes of the shapes (0: not given).
// Written with the slot.
struct CountTable {
  std::array<std::uint64_t, kMaxRanks> send;
  std::array<std::uint64_t, kMaxRanks> receive;
  std::array<std::uint64_t, kMaxRanks> send_shape;
  std::array<std::uint64_t, kMaxRanks> receive_shape;
};

// Where a rank's data is for one operation. Two of them alternate: an operation's slot is written
// again two operations later, and a rank gets there only after every other rank has arrived at the
// operation between, that is, has done with this one.
struct alignas(kLine) Slot {
  std::atomic<std::uint64_t> arrived{0};  // operation number; release by the owner, written last
  Signature signature;
  std::array<std::byte, kInlineBytes> small{};  // the data itself if it fits
  // Second line: only read for large operations.
  // Segment 0: private memory at the address `offset`. Where the input has several stretches, their
  // locations stand in the payload, those of the outputs after them.
  alignas(kLine) shm::Location input;
  shm::Location output;
  std::uint16_t stretches = 0;  // of the input
  Carrier carrier = Carrier::kNone;
  std::uint8_t shared_output = 0;   // 1: where the ranks that write it reach it
  std::array<Way, kRoutes> ways{};  // rank 0's choice for all
};
static_assert(sizeof(Slot) == 2 * kLine);

struct alignas(kLine) RankHead {
  std::array<Slot, 2> slots;
  // Counts the steps inside operations; never falls. Release by the owner.
  alignas(kLine) std::atomic<std::uint64_t> step{0};
  // Of the operation whose chunks the owner is taking, from before its first claim until after its
  // last: (number << 1) | 1 while it takes, number << 1 afterwards. Release by the owner.
  std::atomic<std::uint64_t> taking{0};
  // The owner has left the group (1 + last completed operation); 0: it is a member.
  alignas(kLine) std::atomic<std::uint64_t> left{0};
  // The owner touches the shared memory no more: its last write to it.
  std::atomic<std::uint64_t> departed{0};
  // The owner has noticed that the group is broken and touches no peer's memory any more.
  std::atomic<std::uint64_t> gave_up{0};
  // Whether the owner can read the others' private memory: 0 not known, 1 yes, 2 no. Release by the
  // owner, before a step that says so.
  std::atomic<std::uint64_t> reads_private{0};
  // Sleepers of the owner that wait for messages; rung by whoever sends it one.
  alignas(kLine) WaitWord mail;
  // The owner has used messages; and, once the group is broken, touches no peer's memory for their
  // sake any more. Release by the owner.
  std::atomic<std::uint32_t> mail_used{0};
  std::atomic<std::uint32_t> mail_stopped{0};
  // An address in the owner's private memory, to try it. Relaxed, before the first arrival.
  std::atomic<std::uint64_t> probe{0};
  // Where others find the owner's flight record: a descriptor of its process (plus one; 0: there is
  // none), and what it must be. Relaxed, likewise.
  std::atomic<std::uint64_t> flight{0};
  std::atomic<std::uint64_t> flight_inode{0};
};

// A message from one rank to another, or what tells about it. 64 bytes: a small one costs one line.
struct alignas(kLine) Letter {
  enum class Kind : std::uint8_t {
    kInline,   // the data is in the body
    kPayload,  // beside the ring
    kShared,   // in the sender's shared memory, at the Location in the body
    kBounce,   // private: comes through the Bounce at that Location
    kAnswer,   // the letter whose number is in the body has been received
    kRefusal,  // it does not fit: bytes and type are what the receiver expects
  };
  struct Header {
    std::uint64_t tag = 0;
    std::uint64_t bytes = 0;
    DataType type = DataType::kU8;
    Kind kind = Kind::kInline;
  };
  static constexpr std::size_t kBodyBytes = 32;

  // What a letter of this header may be: `beside` bytes fit beside it. False: whoever wrote it is
  // not a sound rank of this group, and nothing of it may be believed.
  static bool is_sound(const Header& header, std::size_t beside);

  // Of the letter in its channel, from 1; release by the sender, written last.
  std::atomic<std::uint64_t> number{0};
  Header header;
  std::array<std::byte, kBodyBytes> body{};
};
static_assert(sizeof(Letter) == kLine);

// The letters from one rank to another.
struct Channel {
  static constexpr std::size_t kLetters = 16;

  // Letters that the receiver has taken out. Release by the receiver.
  alignas(kLine) std::atomic<std::uint64_t> taken{0};
  // The sender waits for room: set by it, cleared by the receiver that then rings.
  SleepFlag blocked;
  std::array<Letter, kLetters> letters;

  Letter& letter(std::uint64_t number) { return letters[number % kLetters]; }
};

// How private data gets from one rank to another: a block of the sender's shared memory that begins
// with this, and with its chunks one page later.
struct Bounce {
  static constexpr std::size_t kChunk = std::size_t{256} << 10;
  static constexpr std::size_t kChunks = 4;
  static constexpr std::size_t kData = 4096;

  alignas(kLine) std::atomic<std::uint64_t> filled{0};   // bytes; release by the sender
  alignas(kLine) std::atomic<std::uint64_t> emptied{0};  // bytes; release by the receiver
};
static_assert(sizeof(Bounce) <= Bounce::kData);

// Sizes and places, computed alike by every rank.
class Layout {
 public:
  explicit Layout(int ranks);

  int ranks() const { return ranks_; }
  std::size_t eager_bytes() const { return eager_; }  // of one slot's payload
  std::size_t slice_bytes() const { return slice_; }  // of one rank's part of a staged round
  std::size_t stage_bytes() const { return stage_; }  // of one staging buffer
  std::size_t cleared_bytes() const { return heads_end(); }
  std::size_t total_bytes() const;

  GroupHead& group(std::byte* base) const { return *reinterpret_cast<GroupHead*>(base); }
  RankHead& rank(std::byte* base, int rank) const {
    return reinterpret_cast<RankHead*>(base + sizeof(GroupHead))[rank];
  }
  std::size_t letter_bytes() const { return letter_; }  // beside a letter
  Channel& channel(std::byte* base, int from, int to) const;
  std::byte* letter_payload(std::byte* base, int from, int to, std::uint64_t number) const;
  std::byte* payload(std::byte* base, int rank, std::uint64_t number) const;
  CountTable& table(std::byte* base, int rank, std::uint64_t number) const;
  // Data of `rank` on its way to the ranks that reduce it; `round` picks one of kDepth buffers.
  std::byte* stage(std::byte* base, int rank, std::uint64_t round) const;
  // What `rank` has reduced, on its way to the others.
  std::byte* result(std::byte* base, int rank, std::uint64_t round) const;

 private:
  static constexpr std::size_t kDepth = 3;  // buffers of each kind: combine_staged says why
  static constexpr std::size_t kTables = 4096;
  static_assert(2 * sizeof(CountTable) <= kTables);

  std::size_t heads_end() const;
  std::size_t rank_bytes() const { return 2 * eager_ + kDepth * (stage_ + slice_) + kTables; }
  std::byte* data(std::byte* base, int rank) const;

  std::size_t channels_at() const;

  int ranks_;
  std::size_t eager_;
  std::size_t letter_;
  std::size_t slice_;
  std::size_t stage_;
};

}  // namespace convoy::coll
