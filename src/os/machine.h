#pragma once

#include <sched.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace convoy {

// Where the kernel's files are found; tests put other trees there.
struct SystemRoot {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

// A set of cores of this host, of any number: cpu_set_t ends at 1024.
class CoreSet {
 public:
  CoreSet() = default;
  // The affinity mask of the calling thread; empty if it cannot be read.
  static CoreSet of_thread();
  static CoreSet of_core(int core);

  int count() const;
  // The n-th core, the last one if there are fewer; -1 if the set is empty.
  int nth(int n) const;
  void add(const CoreSet& other);
  // Best effort: where it is not allowed nothing changes.
  void pin_thread() const;

  // Hexadecimal digits, core 0 first.
  std::string to_string() const;
  static CoreSet parse(std::string_view text);  // throws kInvalidArgument

 private:
  static constexpr std::size_t kBits = 8 * sizeof(unsigned long);

  explicit CoreSet(std::size_t words) : words_(words) {}
  std::size_t bytes() const { return words_.size() * sizeof(unsigned long); }
  cpu_set_t* mask() { return reinterpret_cast<cpu_set_t*>(words_.data()); }
  const cpu_set_t* mask() const { return reinterpret_cast<const cpu_set_t*>(words_.data()); }

  std::vector<unsigned long> words_;
};

// How many of the cores can be used at once: a cgroup's CPU quota may be smaller. At least one.
int usable_cores(const CoreSet& set);
// Of those that the calling thread may run on.
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
// Two threads pass a line back and forth, on the first two of the cores; takes about a millisecond,
// on a busy machine up to fifty. A busy machine shows a longer trip than there is: the
// best of several rounds counts. With one core it returns the cost of a context switch. Throws
// kResource if no thread can be made.
CoreDistance measure_core_distance(const CoreSet& cores = CoreSet::of_thread());

std::string host_name();
// Names a running system: equal in all processes of one boot of one host, containers included.
// kResource, kUnsupported if it cannot be read: never an empty name.
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
