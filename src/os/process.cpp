#include "os/process.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <new>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "os/file.h"
#include "os/fork_guard.h"
#include "os/socket.h"

namespace convoy {
namespace {

// Fields of /proc/<pid>/stat behind the command's name, counted from the state.
constexpr std::size_t kStatParent = 1;
constexpr std::size_t kStatThreads = 17;
constexpr std::size_t kStatStartTime = 19;
constexpr std::size_t kStatExitCode = 49;

// Empty if there is no such file, or it cannot be read. The name is in parentheses and may hold any
// character: look behind the last one.
std::vector<std::string> stat_fields(const std::string& folder) {
  const auto text = read_file(folder + "/stat");
  const auto close = text ? text->rfind(')') : std::string::npos;
  if (close == std::string::npos) return {};
  std::istringstream rest(text->substr(close + 1));
  std::vector<std::string> fields;
  for (std::string field; rest >> field;) fields.push_back(field);
  return fields;
}

std::vector<std::string> stat_fields(pid_t pid) { return stat_fields(concat("/proc/", pid)); }

// The main thread of a process whose other threads run stays as a zombie until they have ended.
bool is_zombie(const std::vector<std::string>& fields) {
  return fields[0] == "Z" && fields.size() > kStatThreads && std::stoi(fields[kStatThreads]) <= 1;
}

// A /proc that was mounted in another pid namespace shows other processes under our numbers.
bool proc_shows_our_pids() {
  std::array<char, 24> name{};
  const ssize_t length = ::readlink("/proc/self", name.data(), name.size());
  return length > 0 && std::string_view(name.data(), static_cast<std::size_t>(length)) ==
                           std::to_string(::getpid());
}

bool has_no_process(pid_t pid) { return ::kill(pid, 0) < 0 && errno == ESRCH; }

// nullopt: it is not known. 0: there is no such file.
std::optional<std::uint64_t> inode_of(const char* path) {
  struct stat info {};
  if (::stat(path, &info) == 0) return info.st_ino;
  return errno == ENOENT ? std::optional<std::uint64_t>(0) : std::nullopt;
}

// PIDFD_GET_INFO of Linux 6.13, exit code since 6.15; Debian 12's headers do not have it.
struct PidfdInfo {
  std::uint64_t mask;
  std::uint64_t cgroup;
  std::array<std::uint32_t, 11> ids;
  std::int32_t exit_code;
};
static_assert(sizeof(PidfdInfo) == 64);
constexpr std::uint64_t kPidfdInfoExit = 1u << 3;

ExitStatus decode(int status) {
  if (WIFSIGNALED(status)) return {.code = 0, .signal = WTERMSIG(status)};
  return {.code = WEXITSTATUS(status), .signal = 0};
}

}  // namespace

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name ? concat("SIG", name) : concat("signal ", signal);
}

std::optional<int> parse_signal(const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && number > 0 && number < NSIG) {
    return number;
  }
  for (int signal = 1; signal < NSIG; ++signal) {
    const char* name = sigabbrev_np(signal);
    if (name && (text == name || text == concat("SIG", name))) return signal;
  }
  return std::nullopt;
}

std::string ExitStatus::to_string() const {
  if (signal != 0) return concat("signal ", signal, " (", signal_name(signal), ")");
  return concat("exit code ", code);
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      generation_(other.generation_),
      own_group_(other.own_group_),
      pidfd_(std::move(other.pidfd_)),
      status_(std::exchange(other.status_, std::nullopt)) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  if (this != &other) {
    this->~ChildProcess();
    new (this) ChildProcess(std::move(other));
  }
  return *this;
}

ChildProcess::~ChildProcess() {
  if (!running() || generation_ != fork_generation()) return;
  ::kill(pid_, SIGKILL);  // not reaped, so still ours; there may be no pidfd if spawn threw
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
}

std::optional<ExitStatus> ChildProcess::wait(const Deadline& deadline) {
  if (status_) return status_;
  CONVOY_CHECK(pid_ > 0, "no process");
  if (!wait_ready(pidfd_.get(), POLLIN, deadline)) return std::nullopt;
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0) {
    if (errno == ECHILD) {
      fail(ErrorKind::kInternal, "waiting for process ", pid_,
           ": somebody else took its exit status (is SIGCHLD ignored in this program?)");
    }
    if (errno != EINTR) fail_errno("waiting for process ", pid_);
  }
  status_ = decode(status);
  return status_;
}

void ChildProcess::kill(int signal) noexcept {
  if (running()) send_signal(pidfd_.get(), signal);
}

void ChildProcess::kill_group(int signal) noexcept {
  if (pid_ > 0 && own_group_) ::kill(-pid_, signal);
}

UniqueFd open_pidfd(pid_t pid) {
  // The kernel makes pidfds close-on-exec.
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

bool send_signal(int pidfd, int signal) noexcept {
  return syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0) == 0;
}

namespace {

Liveness find_liveness(pid_t pid, std::optional<std::uint64_t> start_time) {
  // Asked first, as it needs no descriptor. (0 and negative numbers are groups.)
  if (pid <= 0 || has_no_process(pid)) return Liveness::kDead;
  if (!proc_shows_our_pids()) return Liveness::kUnknown;
  const auto fields = stat_fields(pid);
  if (fields.size() <= kStatStartTime) {
    return has_no_process(pid) ? Liveness::kDead : Liveness::kUnknown;
  }
  if (start_time && std::stoull(fields[kStatStartTime]) != *start_time) return Liveness::kDead;
  return is_zombie(fields) || fields[0] == "X" ? Liveness::kDead : Liveness::kAlive;
}

}  // namespace

Liveness liveness_of(pid_t pid, std::uint64_t start_time) { return find_liveness(pid, start_time); }
Liveness liveness_of_any(pid_t pid) { return find_liveness(pid, std::nullopt); }

Liveness liveness_by(int pidfd) {
  pollfd item{pidfd, POLLIN, 0};
  if (pidfd < 0 || ::poll(&item, 1, 0) < 0 || (item.revents & POLLNVAL) != 0) {
    return Liveness::kUnknown;
  }
  // Of the whole process: not when only its main thread has ended.
  return (item.revents & POLLIN) != 0 ? Liveness::kDead : Liveness::kAlive;
}

std::uint64_t own_start_time() {
  errno = 0;
  const auto fields = stat_fields("/proc/self");
  if (fields.empty() && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) {
    fail_errno("reading /proc/self/stat, by which other processes know this one");
  }
  if (fields.size() <= kStatStartTime) {
    fail(ErrorKind::kUnsupported,
         "/proc/self/stat cannot be read: without it other processes cannot tell whether this one "
         "runs; mount /proc");
  }
  return std::stoull(fields[kStatStartTime]);
}

std::uint64_t process_domain() {
  // Inodes of namespaces are numbers of 32 bits. There are kernels without time namespaces.
  const std::uint64_t pids = inode_of("/proc/self/ns/pid").value_or(0);
  const auto time = inode_of("/proc/self/ns/time");
  return pids == 0 || !time ? 0 : (pids << 32) | (*time & 0xffffffff);
}

std::optional<char> process_state(pid_t pid) {
  const auto fields = stat_fields(pid);
  if (fields.empty()) return std::nullopt;
  if (fields[0] != "Z" || is_zombie(fields)) return fields[0][0];
  std::error_code error;
  for (std::filesystem::directory_iterator task(concat("/proc/", pid, "/task"), error), end;
       !error && task != end; task.increment(error)) {
    const auto thread = stat_fields(task->path().string());
    if (!thread.empty() && thread[0] != "Z" && thread[0] != "X") return thread[0][0];
  }
  return 'S';  // they could not be read, or are about to end
}

std::optional<pid_t> parent_of(pid_t pid) {
  const auto fields = stat_fields(pid);
  if (fields.size() <= kStatParent) return std::nullopt;
  return std::stoi(fields[kStatParent]);
}

std::uint64_t process_start_time(pid_t pid) {
  const auto fields = stat_fields(pid);
  return fields.size() > kStatStartTime ? std::stoull(fields[kStatStartTime]) : 0;
}

std::optional<ExitStatus> exit_status_of(pid_t pid, int pidfd) {
  const auto fields = stat_fields(pid);
  if (fields.size() > kStatExitCode && is_zombie(fields)) {
    return decode(std::stoi(fields[kStatExitCode]));
  }
  PidfdInfo info{};
  info.mask = kPidfdInfoExit;
  if (ioctl(pidfd, _IOWR(0xFF, 11, PidfdInfo), &info) < 0 || !(info.mask & kPidfdInfoExit)) {
    return std::nullopt;
  }
  return decode(info.exit_code);
}

std::string process_name(pid_t pid) {
  std::string name = read_file(concat("/proc/", pid, "/comm")).value_or("");
  if (name.ends_with('\n')) name.pop_back();
  return name;
}

std::vector<pid_t> children_by_scan(pid_t pid) {
  std::vector<pid_t> children;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    pid_t candidate = 0;
    const auto [rest, bad] = std::from_chars(name.data(), name.data() + name.size(), candidate);
    if (bad != std::errc() || rest != name.data() + name.size()) continue;
    if (parent_of(candidate) == pid) children.push_back(candidate);
  }
  return children;
}

std::vector<pid_t> children_of(pid_t pid) {
  std::vector<pid_t> children;
  std::error_code error;
  // With error codes: a process may end while its folder is read.
  for (std::filesystem::directory_iterator task(concat("/proc/", pid, "/task"), error), end;
       !error && task != end; task.increment(error)) {
    const auto text = read_file(task->path().string() + "/children");
    if (!text && process_state(pid)) return children_by_scan(pid);
    std::istringstream list(text.value_or(""));
    for (pid_t child = 0; list >> child;) children.push_back(child);
  }
  return children;
}

std::vector<pid_t> descendants_of(pid_t pid) {
  std::vector<pid_t> found = children_of(pid);
  for (std::size_t i = 0; i < found.size(); ++i) {
    for (const pid_t child : children_of(found[i])) {
      if (std::find(found.begin(), found.end(), child) == found.end()) found.push_back(child);
    }
  }
  return found;
}

void become_subreaper() {
  if (prctl(PR_SET_CHILD_SUBREAPER, 1) < 0) fail_errno("becoming a subreaper");
}

}  // namespace convoy
