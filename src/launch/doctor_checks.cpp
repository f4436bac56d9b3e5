#include "launch/doctor_checks.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "launch/text.h"

namespace convoy::launch {
namespace {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = kKiB * 1024;
constexpr std::uint64_t kGiB = kMiB * 1024;
// "/convoy.XXXXXX/" and the longest name of a socket of ours.
constexpr std::size_t kSocketTail = 40;
constexpr std::size_t kSocketPath = 107;

Finding ok(std::string name, std::string text) {
  return {Level::kOk, std::move(name), std::move(text), ""};
}
Finding warn(std::string name, std::string text, std::string fix) {
  return {Level::kWarn, std::move(name), std::move(text), std::move(fix)};
}
Finding bad(std::string name, std::string text, std::string fix) {
  return {Level::kFail, std::move(name), std::move(text), std::move(fix)};
}

// A system call that a sandbox forbids (EPERM) or the kernel does not have.
std::string kernel_fix(int error, const char* version) {
  if (error == EPERM || error == EACCES) {
    return "a sandbox forbids it: allow the system call in the seccomp profile of the container";
  }
  return concat("use Linux ", version, " or newer");
}

std::string limit_text(Limit limit) { return limit ? std::to_string(*limit) : "unlimited"; }

}  // namespace

Finding check_pidfd(int error) {
  if (error == 0) return ok("pidfd", "processes can be watched without races");
  return bad("pidfd",
             concat("pidfd_open: ", errno_text(error),
                    "; neither launcher nor ranks could notice "
                    "a death"),
             kernel_fix(error, "5.3"));
}

Finding check_memfd(int error) {
  if (error == 0) return ok("memfd", "shared memory without names, sealed against resizing");
  return bad(
      "memfd",
      concat("memfd_create with seals: ", errno_text(error), "; ranks could not share memory"),
      kernel_fix(error, "3.17"));
}

Finding check_noexec_seal(int error) {
  if (error == 0) return ok("noexec-seal", "shared memory can never be made executable");
  return warn("noexec-seal",
              concat("MFD_NOEXEC_SEAL: ", errno_text(error),
                     "; works without, but shared memory could be executed"),
              kernel_fix(error, "6.3"));
}

Finding check_futex(int error) {
  if (error == 0) return ok("futex", "ranks can sleep on shared memory");
  return bad("futex", concat("futex: ", errno_text(error), "; ranks could not wait for each other"),
             kernel_fix(error, "2.6"));
}

Finding check_subreaper(int error) {
  if (error == 0) return ok("subreaper", "daemons of ranks stay below the launcher");
  return bad("subreaper",
             concat("PR_SET_CHILD_SUBREAPER: ", errno_text(error),
                    "; processes that ranks leave behind could escape"),
             kernel_fix(error, "3.4"));
}

Finding check_proc(bool usable) {
  if (usable) return ok("proc", "/proc shows the processes of a job");
  return bad("proc",
             "/proc does not show our own children; the launcher could not find what ranks leave "
             "running",
             "mount -t proc proc /proc (and no hidepid for this user)");
}

Finding check_peer_memory(const PeerMemoryFacts& facts) {
  if (facts.error == 0) {
    return ok("peer-memory", "process_vm_readv works: mid-size copies between ranks are direct");
  }
  const bool yama = facts.ptrace_scope && *facts.ptrace_scope > 0;
  return warn("peer-memory",
              concat("process_vm_readv: ", errno_text(facts.error),
                     "; copies go through shared memory instead, which is slower for some sizes"),
              yama ? concat("sysctl kernel.yama.ptrace_scope=0 (it is ", *facts.ptrace_scope, ")")
                   : std::string("containers: docker run --cap-add SYS_PTRACE, or allow it in the "
                                 "seccomp profile"));
}

Finding check_cores(const CoreFacts& facts) {
  const std::string text = concat(facts.usable, " of ", facts.online, " cores are usable");
  if (facts.usable == 1) {
    return warn("cores", concat(text, "; ranks take turns on it"),
                "give the container more (--cpus) or the process a wider affinity (taskset)");
  }
  if (facts.usable < facts.online) {
    return ok("cores", concat(text, " (affinity or cgroup quota); libraries may see all ",
                              facts.online, ", convoy run sets their threads for ", facts.usable));
  }
  return ok("cores", text);
}

Finding check_memory(const MemoryState& memory) {
  // Version 1 of cgroups says "no limit" with a number near 2^63.
  constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;
  std::string text = concat(format_bytes(memory.headroom()), " can still be allocated");
  if (memory.limit && *memory.limit < kNoLimit) {
    text += concat(" (cgroup limit ", format_bytes(*memory.limit), ")");
  }
  const std::string fix = memory.limit && *memory.limit - memory.used.value_or(0) < memory.available
                              ? "raise the memory limit of the container or slice"
                              : "free memory, or use a larger machine";
  if (memory.headroom() < 64 * kMiB) return bad("memory", text + "; too little for any job", fix);
  if (memory.headroom() < kGiB) return warn("memory", text + "; enough for small jobs only", fix);
  return ok("memory", text);
}

Finding check_core_distance(const CoreDistance& distance, int usable_cores) {
  const auto ns = distance.round_trip.count();
  if (usable_cores < 2) {
    return ok("core-distance", concat("one core: a hand-over is a context switch, ", ns, " ns"));
  }
  const std::string text = concat("a cache line goes to another core and back in ", ns, " ns");
  if (ns < 1000) return ok("core-distance", text + (distance.near() ? " (near)" : " (far)"));
  return warn("core-distance", text + "; the machine is busy, or its cores are far apart",
              "stop other load, or keep ranks on one socket (taskset, convoy run --pin)");
}

Finding check_huge_pages(const std::optional<std::string>& enabled) {
  if (!enabled) {
    return warn("huge-pages",
                "this kernel has no transparent huge pages; large tensors are slower "
                "to touch first",
                "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE");
  }
  if (enabled->find("[never]") != std::string::npos) {
    return warn("huge-pages",
                "transparent huge pages are off; large tensors are slower to touch "
                "first",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
  }
  const bool always = enabled->find("[always]") != std::string::npos;
  return ok("huge-pages", concat("transparent huge pages: ", always ? "always" : "on request"));
}

Finding check_open_files(Limit soft, Limit hard) {
  const std::string text =
      concat("open files: ", limit_text(soft), ", up to ", limit_text(hard), " on request");
  if (hard && *hard < 256) {
    return bad("open-files", text + "; too few for a job", "ulimit -Hn 4096 (as root), then again");
  }
  if (soft && *soft < 1024) {
    return warn("open-files", text + "; large jobs and many connections need more",
                "ulimit -n 4096");
  }
  return ok("open-files", text);
}

Finding check_locked_memory(Limit soft) {
  if (!soft || *soft >= 64 * kKiB) {
    return ok("locked-memory", concat("locked memory: ", soft ? format_bytes(*soft) : "unlimited",
                                      "; convoy locks none (RDMA under MPI does)"));
  }
  return warn("locked-memory",
              concat("locked memory: ", format_bytes(*soft),
                     "; convoy locks none, but RDMA under MPI fails with so little"),
              "ulimit -l unlimited");
}

Finding check_file_size(Limit soft) {
  if (!soft) return ok("file-size", "file sizes are unlimited");
  return bad("file-size",
             concat("files are limited to ", format_bytes(*soft),
                    "; shared memory counts as a file and would be refused beyond that"),
             "ulimit -f unlimited");
}

Finding check_address_space(Limit soft) {
  if (!soft) return ok("address-space", "the address space is unlimited");
  return warn("address-space",
              concat("the address space is limited to ", format_bytes(*soft),
                     "; mappings of several ranks' memory add up to more than is in use"),
              "ulimit -v unlimited");
}

Finding check_shm(const std::optional<std::uint64_t>& bytes) {
  if (bytes && *bytes >= 512 * kMiB) {
    return ok("shm", concat("/dev/shm has ", format_bytes(*bytes), "; convoy does not use it"));
  }
  return warn("shm",
              concat(bytes ? concat("/dev/shm has ", format_bytes(*bytes)) : "there is no /dev/shm",
                     "; convoy does not use it, but worker processes of PyTorch's DataLoader do"),
              "docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm");
}

Finding check_temp(const TempFacts& facts) {
  if (facts.error != 0) {
    return bad("temp-folder",
               concat(facts.folder, ": ", errno_text(facts.error),
                      "; convoy run cannot make its folder there"),
               "set TMPDIR to a folder of yours that can be written to");
  }
  if (facts.folder.size() + kSocketTail > kSocketPath) {
    return bad("temp-folder",
               concat(facts.folder, " has ", facts.folder.size(),
                      " characters; the path of a Unix socket in it would exceed ", kSocketPath),
               "set TMPDIR to a shorter path, such as /tmp");
  }
  return ok("temp-folder", concat(facts.folder, " can be written to"));
}

Finding check_unix_socket(const UnixSocketFacts& facts) {
  if (facts.error != 0) {
    return bad(
        "unix-socket",
        concat("a pair of Unix sockets: ", errno_text(facts.error), "; ranks could not meet"),
        "allow AF_UNIX sockets in this sandbox");
  }
  if (facts.ours != facts.peer) {
    return bad("unix-socket",
               concat("the kernel names user ", facts.peer,
                      " as the peer of our own socket, but "
                      "we are user ",
                      facts.ours, "; connections would be refused"),
               "run all ranks in one user namespace");
  }
  return ok("unix-socket", "the kernel vouches for the user of a peer");
}

Finding check_loopback(int error) {
  if (error == 0) return ok("loopback", "127.0.0.1 works, for torch's own store on MASTER_PORT");
  return warn("loopback",
              concat("binding 127.0.0.1: ", errno_text(error),
                     "; torch's own env:// store would fail, convoy's does not need it"),
              "ip link set lo up");
}

Finding check_ports(const std::vector<int>& listening) {
  if (listening.empty()) return ok("tcp-ports", "serving a job opens no TCP port");
  std::string list;
  for (const int port : listening) list += (list.empty() ? "" : ", ") + std::to_string(port);
  return bad("tcp-ports", concat("this process listens on TCP ", list, ", which it should not"),
             "report this as a bug of convoy");
}

namespace {

const std::string* find(const Environment& environment, const std::string& name) {
  const auto found = environment.find(name);
  return found == environment.end() ? nullptr : &found->second;
}

std::optional<Finding> check_torchrun_pair(const Environment& environment) {
  const std::string* rank = find(environment, "RANK");
  const std::string* size = find(environment, "WORLD_SIZE");
  if (!rank && !size) return std::nullopt;
  constexpr const char* kFix = "unset RANK WORLD_SIZE, or set both";
  if (!rank || !size) {
    return bad("environment",
               concat(rank ? "RANK" : "WORLD_SIZE", " is set but ", rank ? "WORLD_SIZE" : "RANK",
                      " is not; a program started here would not know its job"),
               kFix);
  }
  const auto r = parse_int(*rank);
  const auto n = parse_int(*size);
  if (!r || !n || *r < 0 || *r >= *n) {
    return bad("environment",
               concat("RANK=", *rank, " and WORLD_SIZE=", *size, " do not go together"), kFix);
  }
  return std::nullopt;
}

}  // namespace

Finding check_environment(const Environment& environment) {
  if (auto finding = check_torchrun_pair(environment)) return *finding;
  const std::vector<std::pair<std::string, std::string>> launchers = {
      {"RANK", "torchrun or convoy run"},
      {"OMPI_COMM_WORLD_RANK", "Open MPI"},
      {"PMI_RANK", "MPICH or Intel MPI"},
      {"SLURM_PROCID", "Slurm"}};
  std::vector<std::string> present;
  std::set<std::string> ranks;
  for (const auto& [variable, launcher] : launchers) {
    const std::string* value = find(environment, variable);
    if (!value) continue;
    present.push_back(concat(variable, "=", *value, " (", launcher, ")"));
    ranks.insert(*value);
  }
  std::string list;
  for (const auto& item : present) list += (list.empty() ? "" : ", ") + item;
  if (ranks.size() > 1) {
    return warn(
        "environment",
        concat("several launchers left different ranks: ", list, "; RANK wins where it is set"),
        "unset those that are not meant");
  }
  if (!present.empty()) {
    return ok("environment", concat("inside a job already: ", list,
                                    "; convoy run gives its ranks their own variables"));
  }
  return ok("environment", "no variables of another launcher");
}

}  // namespace convoy::launch
