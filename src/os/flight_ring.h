#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace convoy::flight {

// The memory of a flight record: what a rank's groups and sessions did last. It is a memfd that
// others hold too (the launcher, for one), so it outlives the process that writes it. Every word is
// atomic: the writer may be at work, or have died in the middle of a word's neighbours, while
// somebody reads.
//
//   Head      who writes, since when
//   Record    one operation each; ticket t is in records[(t - 1) % kRecords]
//   Site      places in the program and names of functions and workers: records have their numbers
//   Group     groups, and sessions of RPC, likewise
//   RecordHead...  calls of RPC, from here to the end, a power of two of them; tickets of their own
//
// All zeros is an empty one. A change of the layout changes kMagic.
using Word = std::atomic<std::uint64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 8);

inline constexpr std::uint64_t kMagic = 0x3230'7468'6769'6c66;  // "flight02"
inline constexpr std::size_t kRecords = 2048;
inline constexpr std::size_t kCalls = 2048;  // where nobody wants more
inline constexpr std::size_t kSites = 1024;
inline constexpr std::size_t kGroups = 64;
inline constexpr std::size_t kMembers = 64;  // of a group that are named

// Text in words, cut to fit and filled up with zeros.
template <std::size_t Bytes>
struct Text {
  static_assert(Bytes % 8 == 0);
  using Packed = std::array<std::uint64_t, Bytes / 8>;

  std::array<Word, Bytes / 8> words;

  static constexpr Packed pack(std::string_view text) {
    Packed packed{};
    for (std::size_t i = 0; i < text.size() && i < Bytes; ++i) {
      const auto letter = static_cast<std::uint64_t>(static_cast<unsigned char>(text[i]));
      packed[i / 8] |= letter << (i % 8 * 8);
    }
    return packed;
  }
  void store(const Packed& packed) {
    for (std::size_t i = 0; i < packed.size(); ++i) {
      words[i].store(packed[i], std::memory_order_release);
    }
  }
  // Up to the first zero; what no text has becomes '?'.
  std::string load() const {
    std::string text;
    for (const Word& word : words) {
      const std::uint64_t packed = word.load(std::memory_order_acquire);
      for (std::size_t i = 0; i < 8; ++i) {
        const auto letter = static_cast<unsigned char>(packed >> (i * 8));
        if (letter == 0) return text;
        text += letter < 0x20 || letter == 0x7f ? '?' : static_cast<char>(letter);
      }
    }
    return text;
  }
};
using OperationText = Text<24>;
using TypeText = Text<8>;

struct alignas(64) Head {
  Word magic;  // written last
  Word pid;
  Word rank;    // in the job, plus one; 0: nobody said so
  Word size;    // of the job; 0 likewise
  Word steady;  // one moment on two clocks, in nanoseconds
  Word wall;
  alignas(64) Word next;  // ticket
  alignas(64) Word next_call;
};

enum class State : std::uint64_t { kNone, kScheduled, kStarted, kCompleted, kFailed };

// One cache line, and all that there is of a call. `word` tells whose it is: 2 * ticket, and
// one more while it is written. The first three of the words behind change when the operation
// begins and ends.
struct alignas(64) RecordHead {
  Word word;
  Word state;
  Word started;  // of the steady clock, in nanoseconds; 0: not yet
  Word ended;
  Word created;
  Word group;   // the Group's `id`; 0: not known
  Word number;  // of the collective, or of the message, in its group; of the caller's calls there
  // site << 32 | peer + 1 (a message's), or root + 1, or 0. Of a call: site of the function's name
  // << 32 | kServed | kPass | rank of the other worker + 1, or 0 for all of them.
  Word place;
};
static_assert(sizeof(RecordHead) == 64);
inline constexpr std::uint64_t kServed = 0x8000'0000;  // it is another worker's call
inline constexpr std::uint64_t kPass = 0x4000'0000;    // it is no call, but a backward pass

struct Record : RecordHead {
  Word input;  // elements
  Word output;
  Word bytes;
  Word message;  // 1: one of two ranks
  OperationText operation;
  TypeText type;
};
static_assert(sizeof(Record) == 128);

struct alignas(64) Site {
  Word ready;  // 1 once the rest is there, which then stays
  Word line;
  Text<32> function;
  Text<80> file;  // its end, if it is longer
};
static_assert(sizeof(Site) == 128);

struct alignas(64) Group {
  Word id;  // slot + kGroups * times it was used; 0: none, or being written
  Word rank;
  Word size;
  Text<64> name;                           // of a session: this worker's
  std::array<Word, kMembers / 2> members;  // two pids in each; of a session: sites of names
  Word session;                            // what its workers have in common; 0: it is none
};

struct Ring {
  Head head;
  std::array<Record, kRecords> records;
  std::array<Site, kSites> sites;  // [0] is not used: 0 means none
  std::array<Group, kGroups> groups;
};

// How many calls there is room for, behind the ring, in so many bytes.
constexpr std::size_t calls_in(std::size_t bytes) {
  return bytes < sizeof(Ring) ? 0 : std::bit_floor((bytes - sizeof(Ring)) / sizeof(RecordHead));
}
inline RecordHead* calls_of(Ring& ring) { return reinterpret_cast<RecordHead*>(&ring + 1); }
inline const RecordHead* calls_of(const Ring& ring) {
  return reinterpret_cast<const RecordHead*>(&ring + 1);
}

}  // namespace convoy::flight
