#include "launch/oom.h"

#include <sstream>

#include "base/concat.h"
#include "os/file.h"

namespace convoy::launch {
namespace {

// The number behind a line's first word `key`.
std::optional<std::uint64_t> counter(const std::string& path, const std::string& key) {
  std::istringstream lines(read_file(path).value_or(""));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    std::uint64_t value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return std::nullopt;
}

// memory.events (cgroup v2) or memory.oom_control (v1) of the cgroup this process is in.
std::optional<std::uint64_t> cgroup_oom_kills() {
  std::istringstream lines(read_file("/proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    std::optional<std::uint64_t> count;
    if (line.starts_with("0::")) {
      count = counter(concat("/sys/fs/cgroup", line.substr(3), "/memory.events"), "oom_kill");
    } else if (const auto at = line.find(":memory:"); at != std::string::npos) {
      count = counter(concat("/sys/fs/cgroup/memory", line.substr(at + 8), "/memory.oom_control"),
                      "oom_kill");
    }
    if (count) return count;
  }
  return std::nullopt;
}

}  // namespace

OomCounts oom_counts() {
  return {.cgroup = cgroup_oom_kills(), .host = counter("/proc/vmstat", "oom_kill")};
}

std::string explain_kill(const OomCounts& before, const OomCounts& after) {
  if (before.cgroup && after.cgroup && *after.cgroup > *before.cgroup) {
    return concat("the kernel's OOM killer struck in this cgroup (oom_kill ", *before.cgroup,
                  " -> ", *after.cgroup, "): the job needs more memory than its limit allows");
  }
  if (before.host && after.host && *after.host > *before.host) {
    return concat("the kernel's OOM killer struck on this host while the job ran (oom_kill ",
                  *before.host, " -> ", *after.host, "): memory probably ran out");
  }
  if (after.cgroup || after.host) {
    return "not sent by the launcher, and the kernel counted no OOM kill: somebody killed it";
  }
  return "not sent by the launcher: the OOM killer (see dmesg) or somebody else";
}

}  // namespace convoy::launch
