#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "launch/environment.h"
#include "launch/options.h"

namespace convoy::launch {

// The process the user started, as its child, the supervisor, knows it.
struct Launcher {
  pid_t pid = 0;
  UniqueFd pidfd;              // opened before the fork: no other process can be meant
  UniqueFd input;              // what it reads from its standard input; empty with --stdin none
  std::vector<int> forwarded;  // signals it passes on; blocked
};

// Runs a job from start to end in this process: serves the store, starts the ranks, takes their
// output, ends all of them at the first failure, reports. Returns the exit status. Leaves no
// process behind, even if the launcher is killed. To be called in a process of its own, before it
// has threads.
int supervise(const RunOptions& options, const JobContext& job, const std::string& folder,
              Launcher launcher);

}  // namespace convoy::launch
