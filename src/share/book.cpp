#include "share/book.h"

#include <unistd.h>

#include <algorithm>
#include <new>

#include "base/error.h"
#include "os/fork_guard.h"
#include "os/process.h"

namespace convoy::share {
namespace {

constexpr int kPidBits = 22;  // PID_MAX_LIMIT
constexpr std::size_t kSlotsBytes = kMostHolders * sizeof(ProcessWord);

// A number of this process, found out again in a forked child. Two threads that find it old write
// the same. 0 is not kept.
class OncePerProcess {
 public:
  template <class Find>
  std::uint64_t get(Find find) {
    const unsigned generation = fork_generation();
    // In this order: of another generation the number may be old or new.
    const bool current = generation_.load(std::memory_order_acquire) == generation;
    const std::uint64_t known = number_.load(std::memory_order_acquire);
    if (current && known != 0) return known;
    const std::uint64_t found = find();
    number_.store(found, std::memory_order_release);
    generation_.store(generation, std::memory_order_release);
    return found;
  }

 private:
  std::atomic<std::uint64_t> number_{0};
  std::atomic<unsigned> generation_{0};
};

// As many as there can be blocks, and more, as a block can have several.
std::size_t tickets_of(std::size_t region_bytes) {
  constexpr std::size_t kSmallRegion = std::size_t{1} << 20;  // such as a file of one tensor
  if (region_bytes < kSmallRegion) return 512;
  return std::max<std::size_t>(8192, region_bytes / kBookPage);
}

constexpr std::uint64_t live(std::uint32_t generation) {
  return (std::uint64_t{generation} << 1) | 1;
}

}  // namespace

ProcessWord process_word(pid_t pid, std::uint64_t start_time) {
  return (start_time << kPidBits) | static_cast<std::uint64_t>(pid);
}

pid_t pid_of(ProcessWord word) {
  return static_cast<pid_t>(word & ((std::uint64_t{1} << kPidBits) - 1));
}

ProcessWord own_process_word() {
  static OncePerProcess known;
  return known.get([] { return process_word(getpid(), own_start_time()); });
}

namespace {

// 0: it is not known.
std::uint64_t known_domain() {
  static OncePerProcess known;
  return known.get([] { return process_domain(); });
}

}  // namespace

std::uint64_t own_domain() {
  const std::uint64_t domain = known_domain();
  if (domain == 0) {
    fail(ErrorKind::kUnsupported,
         "/proc/self/ns cannot be read, so that no process can tell whether another one runs: "
         "memory and queues cannot be shared; mount /proc");
  }
  return domain;
}

Liveness word_liveness(ProcessWord word, std::uint64_t domain) {
  if (word == 0) return Liveness::kDead;
  if (domain == 0 || domain != known_domain()) return Liveness::kUnknown;
  return liveness_of(pid_of(word), word >> kPidBits);
}

void require_own_domain(std::uint64_t domain, const char* what) {
  const std::uint64_t own = own_domain();
  if (domain == own) return;
  fail(ErrorKind::kUnsupported, what, " is used by processes of another pid namespace (",
       domain >> 32, ", this one is in ", own >> 32,
       ") or time namespace: neither side could tell whether the other runs, and memory in use "
       "would "
       "be handed out; run both in one pid namespace (docker run --pid=container:<name>, "
       "shareProcessNamespace: true), or pass tensors by to_bytes with strategy kFile");
}

std::size_t Book::head_bytes(std::size_t region_bytes) {
  const std::size_t pages = region_bytes / kBookPage;
  const std::size_t bytes = sizeof(BookHead) + kSlotsBytes +
                            tickets_of(region_bytes) * sizeof(std::uint64_t) +
                            pages * sizeof(BookEntry);
  return (bytes + kBookPage - 1) / kBookPage * kBookPage;
}

Book Book::create(std::byte* base, std::size_t region_bytes, BookHead::Kind kind,
                  ProcessWord owner) {
  auto* const head = new (base) BookHead;
  head->bytes = region_bytes;  // says where entries begin
  const Book book(base);
  for (int i = 0; i < kMostHolders; ++i) new (&book.slots()[i]) std::atomic<ProcessWord>(0);
  for (std::size_t i = 0; i < region_bytes / kBookPage; ++i) new (&book.entries()[i]) BookEntry;
  for (std::size_t i = 0; i < tickets_of(region_bytes); ++i) {
    new (&book.tickets()[i]) std::atomic<std::uint64_t>(0);
  }
  head->kind = kind;
  head->first = head_bytes(region_bytes);
  head->owner = owner;
  head->domain = own_domain();
  std::atomic_ref(head->magic).store(BookHead::kMagic, std::memory_order_release);
  return book;
}

Book Book::open(std::byte* base, std::size_t region_bytes) {
  const Book book(base);
  BookHead& head = book.head();
  if (region_bytes < head_bytes(region_bytes) + kBookPage ||
      std::atomic_ref(head.magic).load(std::memory_order_acquire) != BookHead::kMagic ||
      (head.kind != BookHead::kOwned && head.kind != BookHead::kNamed) ||
      head.bytes != region_bytes || head.first != head_bytes(region_bytes)) {
    fail(ErrorKind::kInvalidArgument, "memory of ", region_bytes,
         " bytes from another process is not a region of shared tensors of this version: refused");
  }
  // Users of a file know each other by locks, which hold in all namespaces.
  if (head.kind == BookHead::kOwned) require_own_domain(head.domain, "memory of shared tensors");
  return book;
}

std::atomic<std::uint64_t>* Book::tickets() const {
  return reinterpret_cast<std::atomic<std::uint64_t>*>(base_ + sizeof(BookHead) + kSlotsBytes);
}

BookEntry* Book::entries() const {
  return reinterpret_cast<BookEntry*>(tickets() + tickets_of(head().bytes));
}

// A ticket lies at the place that its number says. Numbers whose place is taken are left out.
std::uint64_t Book::issue_ticket() const {
  const std::size_t count = tickets_of(head().bytes);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t ticket = head().last_ticket.fetch_add(1, std::memory_order_relaxed) + 1;
    std::uint64_t nothing = 0;
    if (tickets()[ticket % count].compare_exchange_strong(nothing, ticket)) return ticket;
  }
  fail(ErrorKind::kResource, "to_bytes: ", count, " handles as bytes of the memory of pid ",
       pid_of(head().owner), " have not been turned into tensors yet, which is the limit");
}

bool Book::redeem_ticket(std::uint64_t ticket) const {
  const std::size_t count = tickets_of(head().bytes);
  return ticket != 0 && tickets()[ticket % count].compare_exchange_strong(ticket, 0);
}

BookEntry& Book::entry(std::uint64_t offset) const { return entries()[offset / kBookPage]; }

bool Book::is_block(std::uint64_t offset, std::uint64_t bytes) const {
  const BookHead& h = head();
  return offset % kBookPage == 0 && offset >= h.first && offset < h.bytes &&
         bytes <= h.bytes - offset;
}

int Book::claim_slot(ProcessWord process, const IsDead& is_dead) const {
  // Also a forked child may be in another namespace than its parent.
  if (head().kind == BookHead::kOwned) {
    require_own_domain(head().domain, "memory of shared tensors");
  }
  for (int i = 0; i < kMostHolders; ++i) {
    if (slots()[i].load(std::memory_order_acquire) == process) return i;
  }
  for (int i = 0; i < kMostHolders; ++i) {
    ProcessWord nobody = 0;
    if (slots()[i].compare_exchange_strong(nobody, process)) return i;
  }
  // Those that are dropped by others meanwhile are free, or somebody else's.
  for (int i = 0; i < kMostHolders; ++i) {
    ProcessWord seen = slot(i);
    if (seen == 0 && slots()[i].compare_exchange_strong(seen, process)) return i;
    if (seen == 0 || seen == process || !is_dead(seen) || !take_over(i, seen, process)) continue;
    slots()[i].store(process);
    return i;
  }
  fail(ErrorKind::kResource, "the memory of pid ", pid_of(head().owner), " is used by ",
       kMostHolders, " processes already, which is the limit; send a copy to this one");
}

// True: the slot is this process's to clear, and is cleared. The caller says what becomes of it.
bool Book::take_over(int index, ProcessWord gone, ProcessWord self) const {
  ProcessWord seen = slots()[index].load();
  if ((seen & ~kTakingOver) != gone ||
      !slots()[index].compare_exchange_strong(seen, self | kTakingOver)) {
    return false;
  }
  const std::size_t word = static_cast<std::size_t>(index) / 64;
  const std::uint64_t mask = ~(std::uint64_t{1} << (index % 64));
  for (std::size_t i = 0; i < head().bytes / kBookPage; ++i) {
    auto& holders = entries()[i].holders[word];
    if ((holders.load(std::memory_order_relaxed) & ~mask) != 0) holders.fetch_and(mask);
  }
  return true;
}

void Book::drop_slot(int index, ProcessWord gone, ProcessWord self) const {
  if (take_over(index, gone, self)) slots()[index].store(0);
}

std::uint32_t Book::begin(std::uint64_t offset, std::uint64_t bytes) const {
  BookEntry& e = entry(offset);
  const auto generation = static_cast<std::uint32_t>(e.state.load() >> 1) + 1;
  e.bytes = bytes;
  e.transit.store(0);
  e.state.store(live(generation));
  return generation;
}

// See the comment of the header.
bool Book::unheld(const BookEntry& e) const {
  const std::uint32_t before = e.acquires.load();
  for (const auto& word : e.holders) {
    if (word.load() != 0) return false;
  }
  return e.transit.load() == 0 && e.acquires.load() == before;
}

bool Book::try_end(std::uint64_t offset) const {
  BookEntry& e = entry(offset);
  if (!unheld(e)) return false;
  const std::uint64_t was = e.state.load();
  e.state.store(was & ~std::uint64_t{1});
  // Nobody has a right to it any more; a handle whose sender died under way may still come. It
  // either finds the block ended, or has set its bit before.
  if (unheld(e)) return true;
  e.state.store(was);
  return false;
}

bool Book::try_end_shared(std::uint64_t offset) const {
  BookEntry& e = entry(offset);
  if (!unheld(e)) return false;
  std::uint64_t was = e.state.load();
  if ((was & 1) == 0 || !e.state.compare_exchange_strong(was, was & ~std::uint64_t{1})) {
    return false;
  }
  if (unheld(e)) return true;
  e.state.store(was);
  return false;
}

bool Book::acquire(std::uint64_t offset, std::uint32_t generation, int slot) const {
  BookEntry& e = entry(offset);
  const std::uint64_t bit = std::uint64_t{1} << (slot % 64);
  auto& word = e.holders[static_cast<std::size_t>(slot) / 64];
  const bool had = (word.fetch_or(bit) & bit) != 0;
  e.acquires.fetch_add(1);
  if (e.state.load() == live(generation)) return true;
  if (!had) word.fetch_and(~bit);
  return false;
}

void Book::release(std::uint64_t offset, int slot) const noexcept {
  const std::uint64_t bit = std::uint64_t{1} << (slot % 64);
  entry(offset).holders[static_cast<std::size_t>(slot) / 64].fetch_and(~bit);
}

bool Book::leave_transit(std::uint64_t offset) const {
  auto& transit = entry(offset).transit;
  std::uint32_t seen = transit.load();
  while (seen != 0) {
    if (transit.compare_exchange_weak(seen, seen - 1)) return true;
  }
  return false;
}

std::optional<std::uint32_t> Book::generation(std::uint64_t offset) const {
  const std::uint64_t state = entry(offset).state.load();
  if ((state & 1) == 0) return std::nullopt;
  return static_cast<std::uint32_t>(state >> 1);
}

}  // namespace convoy::share
