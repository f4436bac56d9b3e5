#include "launch/supervisor.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "launch/job.h"
#include "launch/writer.h"
#include "os/descendants.h"
#include "os/process.h"

namespace convoy::launch {
namespace {

constexpr int kCannotRun = 126;

// Each rank costs the supervisor two pipes, a pidfd, a store connection, its flight record, its
// input, log files.
void ensure_descriptors(int ranks) {
  const rlim_t needed = 64 + rlim_t{9} * static_cast<rlim_t>(ranks);
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  if (limit.rlim_max < needed) {
    fail(ErrorKind::kResource, ranks, " ranks need ", needed,
         " open files in the launcher, but the limit is ", limit.rlim_max,
         "; raise it (ulimit -Hn) or start fewer ranks");
  }
  limit.rlim_cur = needed;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// A program that was found can still be one that the kernel does not know how to run.
std::string start_hint(const std::string& message) {
  if (message.find(errno_text(ENOEXEC)) != std::string::npos) {
    return " (a script needs a first line such as #!/bin/sh)";
  }
  if (message.find(errno_text(ENOENT)) != std::string::npos) {
    return " (the interpreter named in its first line, or its loader, is missing)";
  }
  return "";
}

int run_job(const RunOptions& options, const JobContext& context, const std::string& folder,
            Launcher launcher) {
  ensure_descriptors(options.ranks);
  Job job(options, context, folder, std::move(launcher));
  try {
    job.start_ranks();
  } catch (const Error& error) {
    write_fully(STDERR_FILENO, concat("convoy run: starting the ranks: ", error.what(),
                                      start_hint(error.what()), "\n"));
    job.give_up_output();
    return error.kind() == ErrorKind::kInvalidArgument ? kCannotRun : 1;
  }
  return job.run();
}

}  // namespace

int supervise(const RunOptions& options, const JobContext& job, const std::string& folder,
              Launcher launcher) {
  int code = 1;
  try {
    // Its own group: Ctrl-C goes to the launcher alone, which tells us. In the background a write
    // to a terminal with `stty tostop` would stop us.
    setpgid(0, 0);
    signal(SIGTTOU, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    become_subreaper();
    code = run_job(options, job, folder, std::move(launcher));
  } catch (const std::exception& error) {
    write_fully(STDERR_FILENO, concat("convoy run: ", error.what(), "\n"));
  }
  // Only something that went wrong above has left anything.
  kill_descendants(Deadline::after(std::chrono::seconds(1)));
  return code;
}

}  // namespace convoy::launch
