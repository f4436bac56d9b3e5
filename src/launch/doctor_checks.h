#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/environment.h"
#include "os/machine.h"

namespace convoy::launch {

// What one check of the doctor found. Checks are pure: they judge facts that doctor_probes.h
// gathers, so that tests can show them a broken machine.
enum class Level { kOk, kWarn, kFail };

struct Finding {
  Level level = Level::kOk;
  std::string name;
  std::string text;  // what was found and what it means
  std::string fix;   // empty for kOk
};

// --- kernel: `error` is the errno of the probe, 0 if it worked ---
Finding check_pidfd(int error);
Finding check_memfd(int error);
Finding check_noexec_seal(int error);
Finding check_futex(int error);
Finding check_subreaper(int error);
// Whether /proc shows this process's own children.
Finding check_proc(bool usable);

struct PeerMemoryFacts {
  int error = 0;                    // of reading a process that is not our child
  std::optional<int> ptrace_scope;  // nullopt: no Yama in this kernel
};
Finding check_peer_memory(const PeerMemoryFacts& facts);

// --- machine ---
struct CoreFacts {
  int online = 1;
  int usable = 1;  // affinity and cgroup quota
};
Finding check_cores(const CoreFacts& facts);
Finding check_memory(const MemoryState& memory);
Finding check_core_distance(const CoreDistance& distance, int usable_cores);
// Text of transparent_hugepage/enabled, "always [madvise] never"; nullopt: there is none.
Finding check_huge_pages(const std::optional<std::string>& enabled);

// --- limits; nullopt: unlimited ---
using Limit = std::optional<std::uint64_t>;
Finding check_open_files(Limit soft, Limit hard);
Finding check_locked_memory(Limit soft);
Finding check_file_size(Limit soft);
Finding check_address_space(Limit soft);

// --- places ---
// Size of /dev/shm; nullopt: there is none.
Finding check_shm(const std::optional<std::uint64_t>& bytes);
struct TempFacts {
  std::string folder;
  int error = 0;  // of making a folder in it
};
Finding check_temp(const TempFacts& facts);

// --- connections ---
struct UnixSocketFacts {
  int error = 0;
  uid_t ours = 0;
  uid_t peer = 0;
};
Finding check_unix_socket(const UnixSocketFacts& facts);
// Binding a TCP socket to 127.0.0.1.
Finding check_loopback(int error);
// TCP ports this process listens on while it serves a store.
Finding check_ports(const std::vector<int>& listening);

// --- variables of launchers ---
Finding check_environment(const Environment& environment);

}  // namespace convoy::launch
