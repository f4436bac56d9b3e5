#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "base/id.h"
#include "os/process.h"

namespace convoy::share {

// The book of a region of shared memory, at its beginning: who uses which block of it. It lies in
// the memory itself, so that every process that can use a block can also say so, with no message
// and no help from its owner; and so that it is gone when the memory is.
//
//   Head       one; what the region is
//   slots      which process has which bit
//   tickets    handles as bytes that nobody has turned into a tensor yet
//   entries    one for each page of the region, used for the page at which a block begins
//   blocks     the memory itself, from `first` on
//
// A process counts its own references by itself (Depot); the book knows whether it has any: a
// bit. Whoever hands a block to another process keeps its own bit until the other one has set its
// own: while a handle is under way the block has at least one holder.
//
// Bits of dead processes are cleared by the owner, who learns of deaths by pidfd, and by whoever
// needs a slot and finds none free: so memory whose owner has died can be used by any number of
// processes, one after another. A slot of a dead process is taken over by one at a time: it puts
// its own word with kTakingOver there, clears the bits, and then is the slot's process, or leaves
// it free. If it dies on the way, its word says so, and the next one does all of it again. Nobody
// else sets these bits meanwhile: their process is dead. A process that is dead never lives again;
// words are not used twice.
//
// The owner gives a block back when nobody holds it. Bits are spread over several words that cannot
// be read at once, so a reader that sees no bit may have been overtaken: a bit set behind it and
// another, the giver's, cleared before it. So takers count themselves in `acquires` after setting
// their bit, and the owner looks at that number before and after.
inline constexpr std::size_t kBookPage = 4096;
inline constexpr std::size_t kHolderWords = 4;
inline constexpr int kMostHolders = static_cast<int>(kHolderWords) * 64;

struct BookHead {
  static constexpr std::uint64_t kMagic = 0x334b4f4f42565643;  // "CVVBOOK3"
  enum Kind : std::uint32_t {
    kOwned = 1,  // memory of one process, which hands out blocks; slots hold pids
    kNamed = 2,  // one block in a file that its users own together; slots hold process numbers
  };

  std::uint64_t magic = 0;  // written last
  std::uint32_t kind = 0;
  std::uint32_t unused = 0;
  std::uint64_t bytes = 0;                // of the region
  std::uint64_t first = 0;                // where blocks begin
  std::uint64_t owner = 0;                // ProcessWord of who made it
  std::atomic<std::uint32_t> retired{0};  // 1: no block is in use or will be: unmap it
  std::uint32_t padding = 0;
  std::uint64_t domain = 0;  // process_domain() of the owner, in which pids of slots are meant
  // Of the ticket that was given out last; counted up by whoever wants one, relaxed.
  std::atomic<std::uint64_t> last_ticket{0};
};
static_assert(sizeof(BookHead) == 64);

struct BookEntry {
  std::atomic<std::uint64_t> state{0};  // generation << 1 | live
  std::atomic<std::uint32_t> acquires{0};
  std::atomic<std::uint32_t> transit{0};  // handles as bytes that nobody has read yet
  std::array<std::atomic<std::uint64_t>, kHolderWords> holders{};
  std::uint64_t bytes = 0;  // of the block
  std::uint64_t unused = 0;
};
static_assert(sizeof(BookEntry) == 64);

// A process in 63 bits: pid (22) and start time in ticks (41). 0: none.
using ProcessWord = std::uint64_t;
ProcessWord process_word(pid_t pid, std::uint64_t start_time);
pid_t pid_of(ProcessWord word);
// Of this process. Correct in a forked child. kResource where descriptors have run out before it
// was asked for the first time, kUnsupported without /proc.
ProcessWord own_process_word();
// How often who waits looks whether somebody has died, where no event tells.
inline constexpr std::chrono::milliseconds kLookAtDeaths{50};
// Whether the process that the word names runs. The word was written in this `domain`
// (process_domain()); from another one nothing can be said: kUnknown.
Liveness word_liveness(ProcessWord word, std::uint64_t domain);
inline bool is_dead(ProcessWord word, std::uint64_t domain) {
  return word_liveness(word, domain) == Liveness::kDead;
}
// process_domain(), looked up once in each process. kUnsupported if it is not known: nothing that
// is shared may say so.
std::uint64_t own_domain();
// Before a process uses what others with words of `domain` use: throws kUnsupported if they could
// not find out whether it runs, nor it whether they do.
void require_own_domain(std::uint64_t domain, const char* what);

// A view of a book in mapped memory. A value; all methods may be called from any thread of any
// process that has the memory mapped, except where the owner is named.
class Book {
 public:
  Book() = default;
  explicit Book(std::byte* base) : base_(base) {}

  // Bytes before the first block of a region of so many pages.
  static std::size_t head_bytes(std::size_t region_bytes);
  // Lays out a new book in cleared memory. Owner.
  static Book create(std::byte* base, std::size_t region_bytes, BookHead::Kind kind,
                     ProcessWord owner);
  // The book in memory that another process laid out. Throws kInvalidArgument if there is none that
  // fits the region.
  static Book open(std::byte* base, std::size_t region_bytes);

  explicit operator bool() const { return base_ != nullptr; }
  BookHead& head() const { return *reinterpret_cast<BookHead*>(base_); }
  BookEntry& entry(std::uint64_t offset) const;  // of the block that begins there

  // True: a block may begin there and have so many bytes.
  bool is_block(std::uint64_t offset, std::uint64_t bytes) const;

  using IsDead = std::function<bool(ProcessWord)>;
  // In a slot: the process clears what another one has left there.
  static constexpr ProcessWord kTakingOver = ProcessWord{1} << 63;

  // This process's bit, the same every time. One of a dead process if none is free. Throws
  // kResource when kMostHolders processes that are not known to be dead have one.
  int claim_slot(ProcessWord process, const IsDead& is_dead) const;
  // 0: nobody's.
  ProcessWord slot(int index) const { return slots()[index].load() & ~kTakingOver; }
  // Clears every bit of a process that is gone, and frees its slot; does nothing if the slot is not
  // its any more. Any process, `self`.
  void drop_slot(int index, ProcessWord gone, ProcessWord self) const;

  // Owner: a block begins; returns its generation.
  std::uint32_t begin(std::uint64_t offset, std::uint64_t bytes) const;
  // Owner: ends it if nobody else holds it. False: somebody does.
  bool try_end(std::uint64_t offset) const;

  // Sets the bit. False: that block is no more, and nothing was done.
  bool acquire(std::uint64_t offset, std::uint32_t generation, int slot) const;
  void release(std::uint64_t offset, int slot) const noexcept;
  // As try_end, for regions without an owner: true for the one caller that ended it.
  bool try_end_shared(std::uint64_t offset) const;

  // Nobody but the owner has it, and no handle of it is under way.
  bool unheld(std::uint64_t offset) const { return unheld(entry(offset)); }
  void enter_transit(std::uint64_t offset) const { entry(offset).transit.fetch_add(1); }
  // After acquire. False: there was nothing under way.
  bool leave_transit(std::uint64_t offset) const;

  std::optional<std::uint32_t> generation(std::uint64_t offset) const;  // nullopt: no block there

  // The right to leave_transit() once, for who is not known beforehand: no two of a region are ever
  // equal. kResource when too many are under way.
  std::uint64_t issue_ticket() const;
  // False: it was redeemed before, or is none.
  bool redeem_ticket(std::uint64_t ticket) const;

 private:
  std::atomic<ProcessWord>* slots() const {
    return reinterpret_cast<std::atomic<ProcessWord>*>(base_ + sizeof(BookHead));
  }
  std::atomic<std::uint64_t>* tickets() const;
  BookEntry* entries() const;
  bool take_over(int index, ProcessWord gone, ProcessWord self) const;
  bool unheld(const BookEntry& entry) const;

  std::byte* base_ = nullptr;
};

}  // namespace convoy::share
