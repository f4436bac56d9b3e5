#include "os/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "base/error.h"
#include "os/file.h"
#include "os/socket.h"

namespace convoy {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const auto& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

// PATH is searched before fork, so that the child only makes async-signal-safe calls.
std::string find_program(const std::string& name) {
  if (name.empty()) fail(ErrorKind::kInvalidArgument, "no program to run");
  if (name.find('/') != std::string::npos) return name;
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "/usr/local/bin:/usr/bin:/bin");
  for (std::string folder; std::getline(folders, folder, ':');) {
    std::string candidate = concat(folder.empty() ? "." : folder, "/", name);
    std::error_code ignored;
    if (::access(candidate.c_str(), X_OK) == 0 &&
        std::filesystem::is_regular_file(candidate, ignored)) {
      return candidate;
    }
  }
  fail(ErrorKind::kInvalidArgument, "program '", name,
       "' was not found in PATH (a program in this folder is './", name, "')");
}

// Everything the child needs, prepared before fork.
struct Launch {
  const SpawnOptions* options;
  const char* program;
  char* const* arguments;
  char* const* environment;
  pid_t parent;
  int report;  // pipe: errno of what failed; closed by a successful exec
};

[[noreturn]] void report_and_exit(const Launch& launch) {
  const int code = errno;
  [[maybe_unused]] const auto written = ::write(launch.report, &code, sizeof code);
  _exit(127);
}

// In the child, between fork and exec: async-signal-safe calls only.
[[noreturn]] void run_child(const Launch& launch) {
  const SpawnOptions& options = *launch.options;
  struct sigaction by_default {};
  by_default.sa_handler = SIG_DFL;
  for (int signal = 1; signal < NSIG; ++signal) sigaction(signal, &by_default, nullptr);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);

  if (options.own_process_group && setpgid(0, 0) < 0) report_and_exit(launch);
  if (options.death_signal != 0) {
    if (prctl(PR_SET_PDEATHSIG, options.death_signal) < 0) report_and_exit(launch);
    if (getppid() != launch.parent) raise(SIGKILL);  // it died before the line above
  }
  if (!options.working_folder.empty() && chdir(options.working_folder.c_str()) < 0) {
    report_and_exit(launch);
  }
  if (!options.cores.empty()) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    for (const int core : options.cores) CPU_SET(core, &mask);
    if (sched_setaffinity(0, sizeof mask, &mask) < 0) report_and_exit(launch);
  }
  // Sources may themselves be 0, 1 or 2: copy them above first.
  std::array<int, 3> sources = {options.standard_input, options.standard_output,
                                options.standard_error};
  if (sources[0] < 0) sources[0] = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  for (int& source : sources) {
    if (source >= 0 && (source = fcntl(source, F_DUPFD_CLOEXEC, 3)) < 0) report_and_exit(launch);
  }
  for (int target = 0; target < 3; ++target) {
    const int source = sources[static_cast<std::size_t>(target)];
    if (source >= 0 && dup2(source, target) < 0) report_and_exit(launch);
  }
  for (const int fd : options.inherited) {
    if (fcntl(fd, F_SETFD, 0) < 0) report_and_exit(launch);
  }
  execve(launch.program, launch.arguments, launch.environment);
  report_and_exit(launch);
}

UniqueFd require_pidfd(pid_t pid) {
  UniqueFd fd = open_pidfd(pid);
  if (!fd) fail_errno("opening a pidfd of process ", pid, " (Linux 5.3 or newer is needed)");
  return fd;
}

ExitStatus decode(int status) {
  if (WIFSIGNALED(status)) return {.code = 0, .signal = WTERMSIG(status)};
  return {.code = WEXITSTATUS(status), .signal = 0};
}

// Fields of /proc/<pid>/stat behind the command's name, counted from the state.
constexpr std::size_t kStatParent = 1;
constexpr std::size_t kStatStartTime = 19;
constexpr std::size_t kStatExitCode = 49;

std::vector<std::string> stat_fields(pid_t pid) {
  const auto text = read_file(concat("/proc/", pid, "/stat"));
  if (!text) return {};
  // The command's name is in parentheses and may hold any character: look behind the last one.
  const auto close = text->rfind(')');
  if (close == std::string::npos) return {};
  std::istringstream rest(text->substr(close + 1));
  std::vector<std::string> fields;
  for (std::string field; rest >> field;) fields.push_back(field);
  return fields;
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

ChildProcess ChildProcess::spawn(const SpawnOptions& options) {
  if (options.arguments.empty()) fail(ErrorKind::kInvalidArgument, "no program to run");
  const std::string program = find_program(options.arguments[0]);
  const auto arguments = pointers(options.arguments);
  std::vector<char*> environment;
  if (options.environment) environment = pointers(*options.environment);

  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) < 0) fail_errno("making a pipe");
  const UniqueFd report_read(ends[0]);
  UniqueFd report_write(ends[1]);
  const Launch launch{&options,         program.c_str(),
                      arguments.data(), options.environment ? environment.data() : environ,
                      getpid(),         report_write.get()};

  // No signal handler of ours may run in the child before exec.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  // _Fork (glibc 2.34) runs no atfork handlers: the child only prepares and executes.
  const pid_t pid = _Fork();
  const int fork_error = errno;
  if (pid == 0) run_child(launch);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0) {
    errno = fork_error;
    fail_errno("starting a process");
  }
  if (options.own_process_group) setpgid(pid, pid);  // also here: whoever is first

  ChildProcess child;
  child.pid_ = pid;
  child.own_group_ = options.own_process_group;
  child.pidfd_ = require_pidfd(pid);
  report_write.reset();
  int code = 0;
  ssize_t got = 0;
  do {
    got = ::read(report_read.get(), &code, sizeof code);
  } while (got < 0 && errno == EINTR);
  if (got == sizeof code) {
    child.wait(Deadline::never());
    fail(errno_kind(code) == ErrorKind::kResource ? ErrorKind::kResource
                                                  : ErrorKind::kInvalidArgument,
         "running '", program, "': ", errno_text(code));
  }
  return child;
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
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
  if (!running()) return;
  kill(SIGKILL);
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

void send_signal(int pidfd, int signal) noexcept {
  syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0);
}

std::optional<char> process_state(pid_t pid) {
  const auto fields = stat_fields(pid);
  if (fields.empty() || fields[0].empty()) return std::nullopt;
  return fields[0][0];
}

std::optional<pid_t> parent_of(pid_t pid) {
  const auto fields = stat_fields(pid);
  return fields.size() > kStatParent ? std::optional(std::stoi(fields[kStatParent])) : std::nullopt;
}

std::string process_name(pid_t pid) {
  std::string name = read_file(concat("/proc/", pid, "/comm")).value_or("");
  if (name.ends_with('\n')) name.pop_back();
  return name;
}

std::vector<pid_t> children_by_scan(pid_t pid) {
  std::vector<pid_t> children;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    pid_t candidate = 0;
    const auto [end, bad] = std::from_chars(name.data(), name.data() + name.size(), candidate);
    if (bad != std::errc() || end != name.data() + name.size()) continue;
    if (parent_of(candidate) == pid) children.push_back(candidate);
  }
  return children;
}

std::uint64_t process_start_time(pid_t pid) {
  const auto fields = stat_fields(pid);
  return fields.size() > kStatStartTime ? std::stoull(fields[kStatStartTime]) : 0;
}

std::optional<ExitStatus> exit_status_of(pid_t pid, int pidfd) {
  const auto fields = stat_fields(pid);
  if (fields.size() > kStatExitCode && fields[0] == "Z") {
    return decode(std::stoi(fields[kStatExitCode]));
  }
  PidfdInfo info{};
  info.mask = kPidfdInfoExit;
  if (ioctl(pidfd, _IOWR(0xFF, 11, PidfdInfo), &info) < 0 || !(info.mask & kPidfdInfoExit)) {
    return std::nullopt;
  }
  return decode(info.exit_code);
}

std::vector<pid_t> children_of(pid_t pid) {
  static const bool listed =
      read_file(concat("/proc/self/task/", syscall(SYS_gettid), "/children")).has_value();
  if (!listed) return children_by_scan(pid);
  std::vector<pid_t> children;
  std::error_code error;
  for (const auto& task :
       std::filesystem::directory_iterator(concat("/proc/", pid, "/task"), error)) {
    std::istringstream list(read_file(task.path().string() + "/children").value_or(""));
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
