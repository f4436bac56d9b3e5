#include "group/job_socket.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <iomanip>
#include <sstream>

#include "base/error.h"
#include "base/id.h"
#include "os/process.h"
#include "os/socket.h"
#include "store/socket_store.h"

namespace convoy {
namespace {

// A Unix socket's path has 107 bytes; the name of ours takes 33 of them, its folder up to 18.
constexpr std::size_t kLongestBase = 107 - 33 - 18;
constexpr int kPauseMs = 5;

bool is_usable_base(const char* path) {
  struct stat info {};
  return path && *path == '/' && std::string_view(path).size() <= kLongestBase &&
         ::stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

// The runtime folder of a login may be missing where a batch system runs its jobs, or be another
// user's under sudo.
std::string base_folder() {
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  struct stat info {};
  if (is_usable_base(runtime) && ::stat(runtime, &info) == 0 && info.st_uid == ::geteuid()) {
    return runtime;
  }
  const char* const temporary = std::getenv("TMPDIR");
  return is_usable_base(temporary) ? temporary : "/tmp";
}

// Not the name itself: it may hold what others should not see, and any characters.
std::string socket_name(const std::string& job) {
  std::ostringstream name;
  name << std::hex << std::setfill('0') << std::setw(16) << hash_text(job, 1) << std::setw(16)
       << hash_text(job, 2);
  return std::move(name).str();
}

bool somebody_listens(const std::string& path) {
  try {
    Socket::connect(path, Deadline::after(std::chrono::seconds(0)));
    return true;
  } catch (const Error& error) {
    return error.kind() != ErrorKind::kPeerLost;
  }
}

}  // namespace

std::string job_folder() {
  std::string folder = concat(base_folder(), "/convoy-", ::geteuid());
  if (::mkdir(folder.c_str(), 0700) < 0 && errno != EEXIST) fail_errno("making folder ", folder);
  struct stat info {};
  if (::lstat(folder.c_str(), &info) < 0) fail_errno("looking at folder ", folder);
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 077) != 0) {
    fail(ErrorKind::kInvalidArgument, "rendezvous: ", folder,
         " is not safe to meet in: it must be a folder of user ", ::geteuid(),
         " with mode 0700; remove it, set TMPDIR, or set MASTER_ADDR and MASTER_PORT");
  }
  return folder;
}

ServedStore serve_job_socket(const std::string& job) {
  const std::string folder = job_folder();
  const std::string name = socket_name(job);
  const std::string path = concat(folder, "/", name);
  if (somebody_listens(path)) {
    fail(ErrorKind::kInvalidArgument, "rendezvous: another process listens at ", path,
         " already: two processes are rank 0 of the same job");
  }
  if (::unlink(path.c_str()) < 0 && errno != ENOENT) fail_errno("removing ", path);
  ServedStore result;
  result.server = std::make_unique<StoreServer>();
  result.server->listen(folder, name);
  result.store = make_socket_store(Socket(result.server->connect()));
  return result;
}

ServedStore connect_job_socket(const std::string& job, const Deadline& deadline) {
  const std::string path = concat(job_folder(), "/", socket_name(job));
  for (;;) {
    try {
      return {nullptr, connect_store(path, deadline)};
    } catch (const Error& error) {
      // Nobody listens: rank 0 is not there yet, or a dead job's socket is.
      if (error.kind() != ErrorKind::kPeerLost) throw;
    }
    if (deadline.expired()) {
      fail(ErrorKind::kTimeout, "rendezvous: rank 0 did not open ", path,
           " by the deadline; is it running, on this host, as the same user, with the same TMPDIR?"
           " Or set MASTER_ADDR and MASTER_PORT");
    }
    ::poll(nullptr, 0, kPauseMs);
  }
}

std::string job_of_parent() {
  constexpr std::array<std::string_view, 6> kStarters = {"hydra",  "pmi_proxy", "mpiexec",
                                                         "mpirun", "orted",     "prte"};
  pid_t chosen = ::getppid();
  for (std::optional<pid_t> pid = chosen; pid && *pid > 1; pid = parent_of(*pid)) {
    const std::string name = process_name(*pid);
    bool found = false;
    for (const auto starter : kStarters) found = found || name.starts_with(starter);
    if (!found) continue;
    chosen = *pid;
    break;
  }
  const std::uint64_t started = process_start_time(chosen);
  if (started == 0 && liveness_of_any(chosen) != Liveness::kDead) {
    fail(
        ErrorKind::kResource, "rendezvous: /proc/", chosen,
        "/stat, by which the ranks of a job find each other, cannot be read; are there descriptors "
        "left? Or set MASTER_ADDR and MASTER_PORT");
  }
  return concat("process ", chosen, " started ", started);
}

}  // namespace convoy
