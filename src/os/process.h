#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "convoy/deadline.h"

namespace convoy {

// How a process ended.
struct ExitStatus {
  int code = 0;    // exit code; 0 when a signal ended it
  int signal = 0;  // 0: it exited

  bool success() const { return code == 0 && signal == 0; }
  // What a shell would report: the code, or 128 + signal.
  int shell_code() const { return signal != 0 ? 128 + signal : code; }
  // "exit code 3", "signal 9 (SIGKILL)".
  std::string to_string() const;
};

// "SIGKILL"; "signal 77" for a number without a name.
std::string signal_name(int signal);
// From "SIGTERM", "TERM" or "15"; nullopt for anything else.
std::optional<int> parse_signal(const std::string& text);

struct SpawnOptions {
  std::vector<std::string> arguments;  // [0] is looked up in PATH unless it holds a slash
  std::optional<std::vector<std::string>> environment = {};  // "NAME=value"; nullopt: ours
  std::string working_folder = {};                           // empty: ours
  // Descriptors the child gets besides 0, 1, 2, under the same numbers; it gets no others.
  std::vector<int> inherited = {};
  int standard_input = -1;   // -1: /dev/null
  int standard_output = -1;  // -1: ours
  int standard_error = -1;   // -1: ours
  // Sent to the child when the *thread* that spawned it ends; 0: none. Spawn from a thread that
  // lives as long as the process.
  int death_signal = 0;
  bool own_process_group = false;
  std::vector<int> cores = {};  // pinned to these; empty: as ours
};

// A child process. The destructor kills (SIGKILL) and reaps a child that still runs; that of a copy
// in a forked child does neither. Not thread-safe.
class ChildProcess {
 public:
  ChildProcess() = default;
  // Returns once the program runs. Throws if it cannot be executed (kInvalidArgument: not found,
  // not executable) or no process can be made (kResource).
  static ChildProcess spawn(const SpawnOptions& options);

  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  // Readable when the process has ended: for poll and Loop.
  int pidfd() const { return pidfd_.get(); }
  bool running() const { return pid_ > 0 && !status_; }

  // Ends of itself, or nullopt at the deadline. Reaps; callable again.
  std::optional<ExitStatus> wait(const Deadline& deadline);
  // To the process only. No effect once it was reaped.
  void kill(int signal) noexcept;
  // To its process group (own_process_group). Reaches children of an already reaped leader too,
  // while any member lives.
  void kill_group(int signal) noexcept;

 private:
  pid_t pid_ = -1;
  unsigned generation_ = 0;  // fork_generation() of the parent
  bool own_group_ = false;
  UniqueFd pidfd_;
  std::optional<ExitStatus> status_;
};

// A pidfd of any process; empty if it does not exist (any more).
UniqueFd open_pidfd(pid_t pid);
// False: it was not sent, and errno says why (ESRCH: the process has ended).
bool send_signal(int pidfd, int signal) noexcept;

// Whether a process runs. Only proof counts: what cannot be found out is kUnknown, and must change
// nothing. A zombie is dead, whether it was reaped or not; a process whose main thread has ended
// (pthread_exit) and whose other threads run is alive.
enum class Liveness { kAlive, kDead, kUnknown };
// The process that had this pid and this start time. kDead: the kernel says that there is no such
// pid, or it is that of a process with another start time. kUnknown: /proc could not be read (no
// descriptors left, no /proc, one that is hidden or of another pid namespace).
Liveness liveness_of(pid_t pid, std::uint64_t start_time);
// Of whatever process has this pid now.
Liveness liveness_of_any(pid_t pid);
// Of a pidfd that is held already: needs no descriptor, and cannot mean another process.
Liveness liveness_by(int pidfd);

// When this process started, as process_start_time() tells others. kResource if descriptors have
// run out, kUnsupported without /proc: never a wrong number. Correct in a forked child.
std::uint64_t own_start_time();
// What two processes must have in common for the pid and start time of one to mean anything to the
// other: the pid and time namespaces (as the inodes of /proc/self/ns). Needs no descriptor. 0 if it
// is not known.
std::uint64_t process_domain();

// 'R', 'S', 'D', 'T' (stopped), 't' (traced), 'Z' ... of /proc/<pid>/stat; of another thread where
// the main one has ended and others run. nullopt if it has gone, or cannot be seen.
std::optional<char> process_state(pid_t pid);
std::optional<pid_t> parent_of(pid_t pid);
// The command's name, at most 15 characters; empty if it has gone.
std::string process_name(pid_t pid);
// When it started, in clock ticks since boot: with the pid it names a process for good. 0 if it has
// gone or cannot be seen: whether it has gone tells liveness_of().
std::uint64_t process_start_time(pid_t pid);
// How any process of this user ended, asked of the kernel: known while it is a zombie, and after it
// was reaped on Linux 6.15 and newer. nullopt: it runs, or nobody knows.
std::optional<ExitStatus> exit_status_of(pid_t pid, int pidfd);
// Direct children of `pid`, in no order.
std::vector<pid_t> children_of(pid_t pid);
// The same by looking at every process of the system: what children_of does on a kernel without
// /proc/<pid>/task/<tid>/children (CONFIG_PROC_CHILDREN).
std::vector<pid_t> children_by_scan(pid_t pid);
// Children, their children and so on, parents first. Processes that come and go while it looks may
// be missed: callers that must reach all look again until none is left.
std::vector<pid_t> descendants_of(pid_t pid);

// From now on orphaned descendants become children of this process (PR_SET_CHILD_SUBREAPER).
void become_subreaper();

}  // namespace convoy
