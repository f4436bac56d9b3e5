#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "os/fork_guard.h"
#include "os/process.h"

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
    const std::string candidate = concat(folder.empty() ? "." : folder, "/", name);
    std::error_code ignored;
    if (::access(candidate.c_str(), X_OK) == 0 &&
        std::filesystem::is_regular_file(candidate, ignored)) {
      return std::filesystem::absolute(candidate).string();  // also right in another folder
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
  int report;  // pipe: what failed; closed by a successful exec
};

// Why a child could not execute its program.
struct LaunchFailure {
  enum class Step : int { kGroup, kDeathSignal, kFolder, kCores, kStandard, kInherited, kExecute };
  Step step;
  int code;    // errno
  int detail;  // the descriptor, for kStandard and kInherited
};
using Step = LaunchFailure::Step;

[[noreturn]] void report_and_exit(const Launch& launch, Step step, int detail = -1) {
  const LaunchFailure failure{step, errno, detail};
  [[maybe_unused]] const auto written = ::write(launch.report, &failure, sizeof failure);
  _exit(127);
}

// A shell's `nohup` and `&` make a program ignore these on purpose; that is passed on. All other
// signals start with their default action, whatever a library in this process did to them.
bool keeps_ignoring(int signal) {
  return signal == SIGHUP || signal == SIGINT || signal == SIGQUIT;
}

void reset_signals() {
  struct sigaction by_default {};
  by_default.sa_handler = SIG_DFL;
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction now {};
    if (keeps_ignoring(signal) && sigaction(signal, nullptr, &now) == 0 &&
        now.sa_handler == SIG_IGN) {
      continue;
    }
    sigaction(signal, &by_default, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

void place_standard_descriptors(const Launch& launch) {
  const SpawnOptions& options = *launch.options;
  std::array<int, 3> sources = {options.standard_input, options.standard_output,
                                options.standard_error};
  // Not through the library: ThreadSanitizer keeps notes about descriptors, and in a forked child
  // they are what another thread was just writing.
  if (sources[0] < 0) {
    sources[0] =
        static_cast<int>(::syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDONLY | O_CLOEXEC));
  }
  // Sources may themselves be 0, 1 or 2: copy them above first.
  for (int& source : sources) {
    if (source < 0) continue;
    const int copy = fcntl(source, F_DUPFD_CLOEXEC, 3);
    if (copy < 0) report_and_exit(launch, Step::kStandard, source);
    source = copy;
  }
  for (int target = 0; target < 3; ++target) {
    const int source = sources[static_cast<std::size_t>(target)];
    if (source >= 0 && ::syscall(SYS_dup3, source, target, 0) < 0)
      report_and_exit(launch, Step::kStandard, target);
  }
}

// In the child, between fork and exec: async-signal-safe calls only.
[[noreturn]] void run_child(const Launch& launch) {
  const SpawnOptions& options = *launch.options;
  reset_signals();
  if (options.own_process_group && setpgid(0, 0) < 0) report_and_exit(launch, Step::kGroup);
  if (options.death_signal != 0) {
    if (prctl(PR_SET_PDEATHSIG, options.death_signal) < 0) {
      report_and_exit(launch, Step::kDeathSignal);
    }
    if (getppid() != launch.parent) raise(SIGKILL);  // it died before the line above
  }
  if (!options.working_folder.empty() && chdir(options.working_folder.c_str()) < 0) {
    report_and_exit(launch, Step::kFolder);
  }
  if (!options.cores.empty()) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    for (const int core : options.cores) CPU_SET(core, &mask);
    if (sched_setaffinity(0, sizeof mask, &mask) < 0) report_and_exit(launch, Step::kCores);
  }
  place_standard_descriptors(launch);
  // Also what others left open in us, and what we inherited ourselves. Linux before 5.11 cannot:
  // then the child gets what is not close-on-exec.
  close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
  for (const int fd : options.inherited) {
    if (fcntl(fd, F_SETFD, 0) < 0) report_and_exit(launch, Step::kInherited, fd);
  }
  execve(launch.program, launch.arguments, launch.environment);
  report_and_exit(launch, Step::kExecute);
}

[[noreturn]] void throw_failure(const Launch& launch, const LaunchFailure& failure) {
  const SpawnOptions& options = *launch.options;
  std::string doing;
  switch (failure.step) {
    case Step::kGroup: doing = "making its process group"; break;
    case Step::kDeathSignal: doing = concat("setting death signal ", options.death_signal); break;
    case Step::kFolder: doing = concat("entering folder ", options.working_folder); break;
    case Step::kCores: doing = "pinning it to its cores (are they all there?)"; break;
    case Step::kStandard:
      doing = concat("passing descriptor ", failure.detail, " as standard stream");
      break;
    case Step::kInherited: doing = concat("passing descriptor ", failure.detail, " on"); break;
    case Step::kExecute: doing = "executing it"; break;
  }
  const bool resource = errno_kind(failure.code) == ErrorKind::kResource;
  fail(resource ? ErrorKind::kResource : ErrorKind::kInvalidArgument, "running '", launch.program,
       "': ", doing, ": ", errno_text(failure.code));
}

// The pipe over which a child tells why it could not start. The write end is above 0, 1 and 2,
// which the child fills, and is dropped by whatever another thread forks meanwhile: such a child
// would hold it open, and we would wait for its end.
class ReportPipe {
 public:
  ReportPipe() {
    const ForkPause pause;
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) < 0) fail_errno("making a pipe");
    read_end_.reset(ends[0]);
    const UniqueFd low(ends[1]);
    write_end_ = duplicate(low.get());
    register_fork_closed(write_end_.get());
  }
  ~ReportPipe() { close_write_end(); }
  ReportPipe(const ReportPipe&) = delete;
  ReportPipe& operator=(const ReportPipe&) = delete;

  int write_end() const { return write_end_.get(); }
  void close_write_end() {
    const ForkPause pause;
    unregister_fork_closed(write_end_.get());
    write_end_.reset();
  }
  // nullopt once the child has executed its program (or died before).
  std::optional<LaunchFailure> receive() const {
    LaunchFailure failure{};
    ssize_t got = 0;
    do {
      got = ::read(read_end_.get(), &failure, sizeof failure);
    } while (got < 0 && errno == EINTR);
    if (got != sizeof failure) return std::nullopt;
    return failure;
  }

 private:
  UniqueFd read_end_;
  UniqueFd write_end_;
};

// The child of a fork, in the parent. No signal handler of ours may run in the child before exec.
pid_t fork_child(const Launch& launch) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  // _Fork (glibc 2.34) runs no atfork handlers: the child only prepares and executes.
  const pid_t pid = _Fork();
  const int code = errno;
  if (pid == 0) run_child(launch);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0) {
    errno = code;
    fail_errno("starting a process");
  }
  return pid;
}

}  // namespace

ChildProcess ChildProcess::spawn(const SpawnOptions& options) {
  if (options.arguments.empty()) fail(ErrorKind::kInvalidArgument, "no program to run");
  const std::string program = find_program(options.arguments[0]);
  const auto arguments = pointers(options.arguments);
  std::vector<char*> environment;
  if (options.environment) environment = pointers(*options.environment);

  ReportPipe report;
  const Launch launch{&options,         program.c_str(),
                      arguments.data(), options.environment ? environment.data() : environ,
                      getpid(),         report.write_end()};
  ChildProcess child;
  child.generation_ = fork_generation();  // before the fork, from which on it counts
  child.pid_ = fork_child(launch);
  child.own_group_ = options.own_process_group;
  if (child.own_group_) setpgid(child.pid_, child.pid_);  // also here: whoever is first
  child.pidfd_ = open_pidfd(child.pid_);
  if (!child.pidfd_) {
    if (errno == ESRCH) {
      const pid_t gone = std::exchange(child.pid_, -1);  // not ours to kill: it may be another's
      fail(ErrorKind::kInternal, "starting process ", gone,
           ": it ended, and somebody else took its exit status (is SIGCHLD ignored in this "
           "program?)");
    }
    fail_errno("opening a pidfd of process ", child.pid_, " (Linux 5.3 or newer is needed)");
  }
  report.close_write_end();
  if (const auto failure = report.receive()) {
    child.wait(Deadline::never());
    throw_failure(launch, *failure);
  }
  return child;
}

}  // namespace convoy
