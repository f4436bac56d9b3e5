#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace convoy::launch {

// How often the kernel's out-of-memory killer struck, as far as this process can see.
struct OomCounts {
  std::optional<std::uint64_t> cgroup;  // in our cgroup
  std::optional<std::uint64_t> host;    // on the whole machine
};
OomCounts oom_counts();

// What is known about a SIGKILL that the launcher did not send: one line.
std::string explain_kill(const OomCounts& before, const OomCounts& after);

}  // namespace convoy::launch
