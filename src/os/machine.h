#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace convoy {

// Cores that this process may run on: its affinity mask, and a cgroup's CPU quota (rounded up).
int usable_cores();

struct MemoryState {
  std::uint64_t available;             // MemAvailable of the host
  std::optional<std::uint64_t> limit;  // the tightest cgroup memory limit above this process
  std::optional<std::uint64_t> used;   // what that cgroup uses, reclaimable file cache left out

  // What can still be allocated before the host or the cgroup runs out.
  std::uint64_t headroom() const;
};
MemoryState memory_state();

// What it costs to pass a cache line from one core to another and back.
struct CoreDistance {
  std::chrono::nanoseconds round_trip;
  bool near() const { return round_trip < std::chrono::nanoseconds(150); }
};
// Two threads pass a line back and forth, on two cores if this process has two; takes about a
// millisecond. A busy machine shows a longer trip than there is: the best of several rounds counts.
// With one core it returns the cost of a context switch.
CoreDistance measure_core_distance();

std::string host_name();
// Names a running system: equal in all processes of one boot of one host, containers included.
std::string boot_id();

}  // namespace convoy
