#include "os/descendants.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "os/process.h"

namespace convoy {
namespace {

// How long a round waits for killed processes to go before it looks again.
constexpr int kRoundMs = 5;

bool has_ended(pid_t pid) { return liveness_of_any(pid) == Liveness::kDead; }

bool is_below(pid_t pid, pid_t ancestor) {
  while (pid > 1) {
    const auto parent = parent_of(pid);
    if (!parent) return false;
    if (*parent == ancestor) return true;
    pid = *parent;
  }
  return false;
}

}  // namespace

std::vector<pid_t> live_descendants(const std::set<pid_t>& spared) {
  std::vector<pid_t> found;
  std::set<pid_t> seen = spared;
  std::vector<pid_t> open = {getpid()};
  while (!open.empty()) {
    const pid_t parent = open.back();
    open.pop_back();
    for (const pid_t child : children_of(parent)) {
      if (!seen.insert(child).second) continue;
      open.push_back(child);
      if (!has_ended(child)) found.push_back(child);
    }
  }
  return found;
}

void signal_descendants(int signal, const std::set<pid_t>& spared) {
  for (const pid_t pid : live_descendants(spared)) {
    const UniqueFd pidfd = open_pidfd(pid);
    if (pidfd && is_below(pid, getpid())) send_signal(pidfd.get(), signal);
  }
}

void reap_orphans(const std::set<pid_t>& kept) {
  for (const pid_t pid : children_of(getpid())) {
    if (!kept.contains(pid)) waitpid(pid, nullptr, WNOHANG);
  }
}

bool has_no_children() {
  siginfo_t info{};
  return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) < 0 && errno == ECHILD;
}

std::vector<pid_t> kill_descendants(const Deadline& deadline, const std::set<pid_t>& spared) {
  for (;;) {
    signal_descendants(SIGKILL, spared);
    reap_orphans(spared);
    if (has_no_children()) return {};
    // With spared children there is no such proof: two looks that find nothing must do.
    auto left = live_descendants(spared);
    if (!spared.empty() && left.empty()) left = live_descendants(spared);
    if (left.empty() && !spared.empty()) {
      reap_orphans(spared);  // those that died after the last time
      return {};
    }
    if (deadline.expired()) return left;
    ::poll(nullptr, 0, kRoundMs);
  }
}

}  // namespace convoy
