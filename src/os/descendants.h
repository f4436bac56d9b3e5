#pragma once

#include <sys/types.h>

#include <set>
#include <vector>

#include "convoy/deadline.h"

namespace convoy {

// Descendants of this process, for one that is a subreaper (become_subreaper): whatever they start,
// double-forked daemons included, stays below it. Functions here are meant for one thread.

// Those that have not ended. `spared` processes and all below them are left out.
std::vector<pid_t> live_descendants(const std::set<pid_t>& spared = {});

// Sends `signal` to all of them. A process id that was reused meanwhile is never hit: each process
// is held by a pidfd and only then looked up in our tree.
void signal_descendants(int signal, const std::set<pid_t>& spared = {});

// Reaps children that have ended, but for `kept` (whose owner wants their status).
void reap_orphans(const std::set<pid_t>& kept = {});

// True if this process has no child at all, ended ones included: then nothing is left below it.
bool has_no_children();

// Kills and reaps all of them, again and again until none is left or the deadline passes. Returns
// those that are left: processes that wait in the kernel (state D) do not die.
std::vector<pid_t> kill_descendants(const Deadline& deadline, const std::set<pid_t>& spared = {});

}  // namespace convoy
