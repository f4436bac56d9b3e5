#pragma once

#include <sys/resource.h>

#include <optional>
#include <string>
#include <vector>

#include "launch/doctor_checks.h"

namespace convoy::launch {

// The facts about this machine that doctor_checks.h judges. Errors are errno values, 0 for none.
int probe_pidfd();
int probe_memfd();
int probe_noexec_seal();
int probe_futex();
int probe_subreaper();
bool probe_proc();
PeerMemoryFacts probe_peer_memory();
CoreFacts probe_cores();
std::optional<std::string> probe_huge_pages();
Limit probe_limit(__rlimit_resource resource);
Limit probe_hard_limit(__rlimit_resource resource);
std::optional<std::uint64_t> probe_shm();
TempFacts probe_temp();
UnixSocketFacts probe_unix_socket();
int probe_loopback();
// Serves a store while it looks.
std::vector<int> probe_ports();

}  // namespace convoy::launch
