#include "launch/doctor_probes.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/unique_fd.h"
#include "launch/text.h"
#include "os/file.h"
#include "os/process.h"
#include "os/socket.h"
#include "store/server.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace convoy::launch {
namespace {

// Runs `probe` in a forked child (no threads exist here); its result, an errno, is the exit code.
template <class Probe>
int in_child(Probe probe) {
  const pid_t pid = fork();
  if (pid < 0) return errno;
  if (pid == 0) _exit(probe());
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : ECHILD;
}

// Inodes of the sockets among our descriptors.
std::set<std::string> own_sockets() {
  std::set<std::string> inodes;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    if (target.starts_with("socket:[")) inodes.insert(target.substr(8, target.size() - 9));
  }
  return inodes;
}

// Ports of listening sockets in a table such as /proc/self/net/tcp.
void add_listening(const std::string& table, const std::set<std::string>& inodes,
                   std::vector<int>& ports) {
  std::istringstream lines(read_file(table).value_or(""));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::vector<std::string> fields;
    for (std::string word; words >> word;) fields.push_back(word);
    constexpr const char* kListen = "0A";
    if (fields.size() < 10 || fields[3] != kListen || !inodes.contains(fields[9])) continue;
    ports.push_back(static_cast<int>(
        std::strtol(fields[1].substr(fields[1].rfind(':') + 1).c_str(), nullptr, 16)));
  }
}

Limit to_limit(rlim_t value) {
  return value == RLIM_INFINITY ? Limit() : Limit(static_cast<std::uint64_t>(value));
}

}  // namespace

int probe_pidfd() {
  const UniqueFd fd = open_pidfd(getpid());
  return fd ? 0 : errno;
}

int probe_memfd() {
  const UniqueFd fd(memfd_create("convoy doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return errno;
  return fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0 ? 0 : errno;
}

int probe_noexec_seal() {
  const UniqueFd fd(memfd_create("convoy doctor", MFD_CLOEXEC | MFD_NOEXEC_SEAL));
  return fd ? 0 : errno;
}

int probe_futex() {
  int word = 0;
  return syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0) >= 0 ? 0 : errno;
}

int probe_subreaper() {
  return in_child([] { return prctl(PR_SET_CHILD_SUBREAPER, 1) == 0 ? 0 : errno; });
}

bool probe_proc() {
  const pid_t parent = getpid();
  return in_child([parent] {
           const auto children = children_of(parent);
           return std::find(children.begin(), children.end(), getpid()) == children.end() ? 1 : 0;
         }) == 0;
}

PeerMemoryFacts probe_peer_memory() {
  PeerMemoryFacts facts;
  // A child reads its parent: as little related as two ranks are, by Yama's rule.
  volatile int source = 42;
  const pid_t parent = getpid();
  facts.error = in_child([&] {
    int copy = 0;
    iovec local{&copy, sizeof copy};
    iovec remote{const_cast<int*>(&source), sizeof source};
    return process_vm_readv(parent, &local, 1, &remote, 1, 0) == sizeof copy ? 0 : errno;
  });
  auto scope = read_file("/proc/sys/kernel/yama/ptrace_scope");
  if (scope && scope->ends_with('\n')) scope->pop_back();
  if (scope) facts.ptrace_scope = parse_int(*scope);
  return facts;
}

CoreFacts probe_cores() {
  return {.online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)), .usable = usable_cores()};
}

std::optional<std::string> probe_huge_pages() {
  return read_file("/sys/kernel/mm/transparent_hugepage/enabled");
}

Limit probe_limit(__rlimit_resource resource) {
  rlimit limit{};
  return getrlimit(resource, &limit) == 0 ? to_limit(limit.rlim_cur) : Limit();
}

Limit probe_hard_limit(__rlimit_resource resource) {
  rlimit limit{};
  return getrlimit(resource, &limit) == 0 ? to_limit(limit.rlim_max) : Limit();
}

std::optional<std::uint64_t> probe_shm() {
  struct statvfs info {};
  if (statvfs("/dev/shm", &info) != 0) return std::nullopt;
  return static_cast<std::uint64_t>(info.f_blocks) * info.f_frsize;
}

TempFacts probe_temp() {
  const char* folder = std::getenv("TMPDIR");
  TempFacts facts{.folder = folder && *folder ? folder : "/tmp"};
  std::string path = facts.folder + "/convoy.XXXXXX";
  if (!mkdtemp(path.data())) {
    facts.error = errno;
  } else {
    rmdir(path.c_str());
  }
  return facts;
}

UnixSocketFacts probe_unix_socket() {
  UnixSocketFacts facts{.ours = geteuid()};
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    facts.error = errno;
    return facts;
  }
  const UniqueFd first(ends[0]);
  const UniqueFd second(ends[1]);
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(first.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) facts.error = errno;
  facts.peer = peer.uid;
  return facts;
}

int probe_loopback() {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return errno;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto* raw = reinterpret_cast<const sockaddr*>(&address);
  return ::bind(fd.get(), raw, sizeof address) == 0 ? 0 : errno;
}

std::vector<int> probe_ports() {
  StoreServer store;
  const UniqueFd client = store.connect();
  std::vector<int> ports;
  const auto inodes = own_sockets();
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    add_listening(table, inodes, ports);
  }
  return ports;
}

}  // namespace convoy::launch
