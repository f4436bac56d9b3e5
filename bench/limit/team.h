#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace limit {

constexpr int kMaxRanks = 8;
constexpr std::size_t kSlot = std::size_t{16} << 20;  // staging memory of one rank, in and out each
constexpr std::size_t kSmall = 48;

// One cache line that carries a small message with its sequence number.
struct alignas(64) Line {
  std::atomic<std::uint64_t> sequence{0};
  std::byte payload[kSmall];
};

struct alignas(64) Counter {
  std::atomic<std::uint64_t> value{0};
};

// What the ranks share. Double-buffered lines: a rank that is one operation ahead does not
// overwrite what another still reads.
struct Shared {
  Counter barrier[kMaxRanks];
  Counter staged[kMaxRanks];   // chunks whose input is in the slot
  Counter reduced[kMaxRanks];  // chunks whose result is in the slot
  Counter flat[kMaxRanks];     // whole messages in the slot
  Line lines[2][kMaxRanks];
  alignas(64) double seconds[kMaxRanks];
  alignas(64) pid_t pids[kMaxRanks];
  void* private_buffers[kMaxRanks];
};

// One rank's view. Ranks are processes forked before anything else runs; the mapping has the same
// address in all.
struct Rank {
  int id = 0;
  int ranks = 0;
  Shared* shared = nullptr;
  std::vector<std::byte*> group;    // every rank's buffer in the shared mapping
  std::vector<std::byte*> slot_in;  // every rank's staging memory
  std::vector<std::byte*> slot_out;
  std::byte* mine = nullptr;  // private buffer, of the body's making
  std::byte* out = nullptr;   // private too, for what is not done in place
  bool crowded = false;       // more ranks than cores: do not spin for long

  std::uint64_t barriers = 0;  // operations so far, each equal on all ranks
  std::uint64_t messages = 0;
  std::uint64_t chunks = 0;

  // Spins until `counter` has reached `value`.
  void await(const std::atomic<std::uint64_t>& counter, std::uint64_t value) const;
  void await_all(const Counter (&counters)[kMaxRanks], std::uint64_t value) const;
  void barrier();
};

// Runs `body` in `ranks` processes, pinned to cores in turn; `group` holds `bytes` each. Returns
// true if all exited with 0.
bool run_ranks(int ranks, std::size_t bytes, const std::function<void(Rank&)>& body);

}  // namespace limit
