#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "share/book.h"

namespace convoy::share {

// A process that uses something that processes share. Words without a note are changed only by who
// holds the lock of that thing, and read by it.
struct Member {
  std::atomic<ProcessWord> process{0};  // 0: free. Read without the lock too
  // Low half: items that its threads are about to put; changed without the lock too. High half: the
  // number of the latest that came in (its low half). One word, so that whoever dies leaves an item
  // counted, or not. Read-modify-write, relaxed.
  std::atomic<std::uint64_t> hands{0};
  std::uint32_t passive = 0;              // 1: has let go of it, and stays for what it left there
  std::array<std::uint32_t, 2> asleep{};  // threads, by what they wait for
  std::uint32_t unused = 0;

  std::uint32_t puts() const {
    return static_cast<std::uint32_t>(hands.load(std::memory_order_relaxed));
  }
  // Under the lock: this item came in. Once more makes no difference.
  void count_put(std::uint64_t number);
};
static_assert(sizeof(Member) == 32);

inline constexpr std::size_t kMostMembers = 256;

// A view of a table of them in shared memory. A value.
class Members {
 public:
  // `domain`: process_domain() of who made the table.
  Members(Member* first, std::uint64_t domain) : first_(first), domain_(domain) {}
  static constexpr std::size_t bytes() { return kMostMembers * sizeof(Member); }

  Member& operator[](std::size_t index) const { return first_[index]; }

  // Under the lock. This process's, the same every time. kResource when all are taken by processes
  // that run, kUnsupported in another domain.
  std::size_t claim(ProcessWord process) const;
  // Under the lock, by the member itself or after its end.
  void drop(std::size_t index) const;

  struct Dead {
    std::size_t index;
    ProcessWord process;
  };
  // Those that are known to have ended. Without the lock: it asks the system for each. What it
  // finds must be compared under the lock.
  std::vector<Dead> find_dead() const;

 private:
  Member* first_;
  std::uint64_t domain_;
};

}  // namespace convoy::share
