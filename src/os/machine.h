#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace convoy {

// Where the kernel's files are found; tests put other trees there.
struct SystemRoot {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

// Cores that the calling thread may run on: its affinity mask, and a cgroup's CPU quota.
int usable_cores();

// The tightest CPU quota of a cgroup (v2 or v1) above this process, in cores, rounded up; nullopt
// if there is none.
std::optional<int> cgroup_cores(const SystemRoot& root = {});

struct MemoryState {
  // MemAvailable of the host; unlimited where it is not known.
  std::uint64_t available = std::numeric_limits<std::uint64_t>::max();
  // Of the cgroup (v2 or v1) above this process that has the least left: its limit, and what it
  // uses, reclaimable file cache left out.
  std::optional<std::uint64_t> limit = std::nullopt;
  std::optional<std::uint64_t> used = std::nullopt;

  // What can still be allocated before the host or the cgroup runs out.
  std::uint64_t headroom() const;
};
MemoryState memory_state(const SystemRoot& root = {});

// What it costs to pass a cache line from one core to another and back.
struct CoreDistance {
  std::chrono::nanoseconds round_trip;
  bool near() const { return round_trip < std::chrono::nanoseconds(150); }
};
// Two threads pass a line back and forth, on two cores if this one may use two; takes about a
// millisecond, on a busy machine up to fifty. A busy machine shows a longer trip than there is: the
// best of several rounds counts. With one core it returns the cost of a context switch. Throws
// kResource if no thread can be made.
CoreDistance measure_core_distance();

std::string host_name();
// Names a running system: equal in all processes of one boot of one host, containers included.
std::string boot_id();

// The parsers behind these; they take any bytes.

// The folder of a process in one hierarchy, from the text of /proc/<pid>/cgroup; nullopt if it is
// in none. `controller` is "" for the unified hierarchy (v2), else the v1 controller's name.
std::optional<std::string> parse_cgroup_path(std::string_view text, std::string_view controller);
// A decimal number at the beginning; nullopt for "max", -1, garbage and what does not fit.
std::optional<std::uint64_t> parse_number(std::string_view text);
// The number behind `key` in a text of "key value" lines (memory.stat, meminfo).
std::optional<std::uint64_t> parse_field(std::string_view text, std::string_view key);
// "quota period" of cpu.max, in cores rounded up; nullopt for "max" and garbage.
std::optional<int> parse_cpu_max(std::string_view text);

}  // namespace convoy
