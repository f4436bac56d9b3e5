#include "launch/guardian.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "base/id.h"
#include "launch/environment.h"
#include "launch/oom.h"
#include "launch/program.h"
#include "launch/supervisor.h"
#include "launch/text.h"
#include "launch/writer.h"
#include "os/descendants.h"
#include "os/file.h"
#include "os/machine.h"
#include "os/process.h"
#include "os/signal_fd.h"

namespace convoy::launch {
namespace {

constexpr std::chrono::seconds kKillLimit{10};

// All but those that we were started to ignore (nohup).
std::vector<int> forwarded_signals() {
  std::vector<int> signals;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT}) {
    if (!is_ignored(signal)) signals.push_back(signal);
  }
  return signals;
}

// Copies our standard input to the supervisor: only the terminal's foreground group, which we are
// in and it is not, may read from a terminal.
class InputPump {
 public:
  explicit InputPump(UniqueFd to) : to_(std::move(to)) {
    if (to_) fcntl(to_.get(), F_SETFL, O_NONBLOCK);
  }

  // Entries for poll(2): one at most is in use.
  pollfd wanted() const {
    if (!to_) return {-1, 0, 0};
    if (!pending_.empty()) return {to_.get(), POLLOUT, 0};
    return {STDIN_FILENO, POLLIN, 0};
  }
  // poll() reports something for wanted().
  void step() {
    if (pending_.empty()) {
      std::array<char, 64 * 1024> buffer;
      const ssize_t n = ::read(STDIN_FILENO, buffer.data(), buffer.size());
      if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
      if (n <= 0) return to_.reset();
      pending_.assign(buffer.data(), static_cast<std::size_t>(n));
    }
    const ssize_t n = ::write(to_.get(), pending_.data(), pending_.size());
    if (n >= 0) {
      pending_.erase(0, static_cast<std::size_t>(n));
    } else if (errno != EAGAIN && errno != EINTR) {
      to_.reset();  // nobody reads any more
    }
  }

 private:
  UniqueFd to_;
  std::string pending_;
};

// Watches the supervisor until it ends.
class Guardian {
 public:
  Guardian(pid_t supervisor, UniqueFd pidfd, SignalFd signals, UniqueFd input)
      : supervisor_(supervisor),
        pidfd_(std::move(pidfd)),
        signals_(std::move(signals)),
        pump_(std::move(input)) {}

  ExitStatus wait() {
    for (;;) {
      std::array<pollfd, 3> items = {pollfd{pidfd_.get(), POLLIN, 0},
                                     pollfd{signals_.fd(), POLLIN, 0}, pump_.wanted()};
      if (::poll(items.data(), items.size(), -1) < 0 && errno != EINTR) fail_errno("poll");
      if (items[1].revents != 0) pass_signals();
      if (items[2].revents != 0) pump_.step();
      if (items[0].revents != 0 || (!pidfd_ && has_ended())) return reap();
    }
  }

 private:
  void pass_signals() {
    while (const auto signal = signals_.next()) {
      if (*signal == SIGCHLD) {
        reap_orphans({supervisor_});
        continue;
      }
      // It is our child and not reaped: its number is no other's.
      if (!pidfd_ || !send_signal(pidfd_.get(), *signal)) ::kill(supervisor_, *signal);
      // Ctrl-Z: the ranks stop, and so do we; the supervisor keeps watch.
      if (*signal == SIGTSTP) raise(SIGSTOP);
    }
  }
  // Where it has no pidfd (no descriptors, or the kernel refuses), SIGCHLD wakes us.
  bool has_ended() const {
    siginfo_t info{};
    return waitid(P_PID, static_cast<id_t>(supervisor_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == supervisor_;
  }
  ExitStatus reap() const {
    int status = 0;
    while (waitpid(supervisor_, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFSIGNALED(status)) return {.code = 0, .signal = WTERMSIG(status)};
    return {.code = WEXITSTATUS(status), .signal = 0};
  }

  pid_t supervisor_;
  UniqueFd pidfd_;
  SignalFd signals_;
  InputPump pump_;
};

std::array<UniqueFd, 2> make_pipe() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) < 0) fail_errno("making a pipe");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

void prepare_log_folder(const RunOptions& options) {
  std::error_code error;
  std::filesystem::create_directories(options.log_folder, error);
  if (error || ::access(options.log_folder.c_str(), W_OK) != 0) {
    fail(ErrorKind::kInvalidArgument, "convoy run: --log-dir '", options.log_folder,
         "' is not a folder that can be written to");
  }
  // What an earlier job left there would be taken for this one's.
  for (int rank = 0; rank < options.ranks; ++rank) {
    std::filesystem::remove(concat(options.log_folder, "/rank-", rank, ".error.json"), error);
  }
  std::filesystem::remove(options.log_folder + "/report.txt", error);
}

JobContext make_context(const RunOptions& options, const std::string& folder) {
  JobContext context;
  context.id = options.job_id.empty() ? Id::random().to_string() : options.job_id;
  // The ranks may run in another folder.
  context.error_folder =
      options.log_folder.empty() ? folder : std::filesystem::absolute(options.log_folder).string();
  context.master_port = pick_free_port();
  context.cores = usable_cores();
  return context;
}

// The supervisor was killed: its ranks are, by the kernel; what they had started is ours now.
int clean_up(pid_t supervisor, const ExitStatus& status, const OomCounts& before,
             const std::set<pid_t>& spared) {
  const auto left = kill_descendants(Deadline::after(kKillLimit), spared);
  std::string text =
      concat("convoy: the supervisor (pid ", supervisor, ") was killed: ", status.to_string(),
             "; all ranks were killed with it\n");
  if (status.signal == SIGKILL) text += concat("  ", explain_kill(before, oom_counts()), "\n");
  for (const pid_t pid : left) {
    text += concat("  could not be killed: ", process_name(pid), " (pid ", pid, ")\n");
  }
  write_fully(STDERR_FILENO, text);
  return status.shell_code();
}

}  // namespace

int run_guardian(RunOptions options) {
  const char* path = std::getenv("PATH");
  if (const auto problem = check_program(options.program[0], path ? path : "/usr/bin:/bin",
                                         options.working_folder)) {
    write_fully(STDERR_FILENO, problem->line + "\n");
    return problem->exit_code;
  }
  if (!options.log_folder.empty()) prepare_log_folder(options);
  // Removed by whichever of the two processes lives longer.
  const TempFolder folder("convoy", TempFolder::Killed::kSwept);
  const JobContext context = make_context(options, folder.path());
  if (options.pin && options.ranks > context.cores) {
    write_fully(STDERR_FILENO, concat("convoy: --pin: ", options.ranks, " ranks share ",
                                      context.cores, " cores; some get the same one\n"));
  }
  auto [input_read, input_write] = make_pipe();
  if (options.stdin_mode == StdinMode::kNone) {
    input_read.reset();
    input_write.reset();
  }
  signal(SIGPIPE, SIG_IGN);
  signal(SIGTTOU, SIG_IGN);
  // Children that were there before us (`daemon & exec convoy run ...`) are none of ours.
  const auto before = children_of(getpid());
  const std::set<pid_t> spared(before.begin(), before.end());
  const OomCounts oom_before = oom_counts();
  become_subreaper();

  Launcher launcher{getpid(), open_pidfd(getpid()), std::move(input_read), forwarded_signals()};
  if (!launcher.pidfd) fail_errno("opening a pidfd (Linux 5.3 or newer is needed)");
  auto signals = launcher.forwarded;
  signals.push_back(SIGCHLD);
  SignalFd signal_fd(signals);  // blocked before the fork: none can be lost

  const pid_t pid = fork();
  if (pid < 0) fail_errno("starting the supervisor");
  if (pid == 0) {
    input_write.reset();
    const int code = supervise(options, context, folder.path(), std::move(launcher));
    std::error_code ignored;
    std::filesystem::remove_all(folder.path(), ignored);
    _exit(code);
  }
  setpgid(pid, pid);  // as the child does: whoever is first
  launcher = {};
  UniqueFd pidfd = open_pidfd(pid);
  const ExitStatus status =
      Guardian(pid, std::move(pidfd), std::move(signal_fd), std::move(input_write)).wait();
  if (status.signal != 0) return clean_up(pid, status, oom_before, spared);
  return status.code;
}

}  // namespace convoy::launch
