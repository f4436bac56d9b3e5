#include "transport/shm/fence.h"

#include <poll.h>
#include <signal.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "base/log.h"
#include "os/file.h"

namespace convoy::shm {
namespace {

// Rounds of looking for processes that have inherited memory, each of which found some: more can
// only be forking faster than they are killed.
constexpr int kMostRounds = 100;

std::string maps_of(pid_t pid) {
  errno = 0;
  if (auto text = read_file(concat("/proc/", pid, "/maps"))) return std::move(*text);
  // Gone meanwhile, or not for our eyes: it is another user's, or runs with another's rights. No
  // such process can be a fork of a rank's, which is this user's.
  if (errno == ENOENT || errno == ESRCH || errno == EACCES || errno == EPERM) return {};
  fail(ErrorKind::kResource, "cannot list the mappings of pid ", pid, ": ", errno_text(errno));
}

// "7f12a000-7f12b000 rw-s 00000000 00:01 1234  /memfd:convoy:arena (deleted)"
bool is_writable_mapping_of(std::string_view line, std::span<const Segment::Key> memory) {
  char permissions[5] = {};
  unsigned major = 0, minor = 0;
  unsigned long inode = 0;
  const std::string text(line.substr(0, 128));
  if (std::sscanf(text.c_str(), "%*x-%*x %4s %*x %x:%x %lu", permissions, &major, &minor, &inode) !=
      4) {
    return false;
  }
  // Shared is enough: what is read-only now could be made writable.
  if (permissions[3] != 's') return false;
  const Segment::Key key{makedev(major, minor), inode};
  return std::find(memory.begin(), memory.end(), key) != memory.end();
}

// Has the marker of one of them, and maps some of the memory.
bool holds(const std::string& maps, std::span<const std::string> markers,
           std::span<const Segment::Key> memory) {
  const auto marked = [&](const std::string& marker) {
    return maps.find(marker) != std::string::npos;
  };
  if (std::none_of(markers.begin(), markers.end(), marked)) return false;
  for (std::size_t begin = 0; begin < maps.size();) {
    const std::size_t end = std::min(maps.find('\n', begin), maps.size());
    if (is_writable_mapping_of(std::string_view(maps).substr(begin, end - begin), memory)) {
      return true;
    }
    begin = end + 1;
  }
  return false;
}

std::vector<pid_t> all_processes() {
  std::vector<pid_t> found;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    pid_t pid = 0;
    const auto [rest, bad] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (bad == std::errc() && rest == name.data() + name.size()) found.push_back(pid);
  }
  if (error) fail(ErrorKind::kResource, "cannot list processes in /proc: ", error.message());
  return found;
}

// With all its threads: nothing of it runs, and its memory is unmapped.
bool has_ended(int pidfd, const Deadline& deadline) {
  for (;;) {
    pollfd item{.fd = pidfd, .events = POLLIN, .revents = 0};
    if (::poll(&item, 1, deadline.poll_timeout_ms()) == 1) return (item.revents & POLLIN) != 0;
    if (deadline.expired()) return false;
  }
}

void end_process(pid_t pid, int pidfd, const Deadline& deadline) {
  if (!send_signal(pidfd, SIGKILL) && errno != ESRCH) {
    fail(ErrorKind::kUnsupported, "pid ", pid, " cannot be killed (", errno_text(errno),
         ") and could write into this process's memory; end it, or start the job anew");
  }
  if (has_ended(pidfd, deadline)) return;
  fail(ErrorKind::kTimeout, "pid ", pid, " was sent SIGKILL and has not ended by the deadline");
}

// Those that run, and whatever else holds the memory because they have forked it.
std::size_t end_holders(std::span<const std::string> markers, std::span<const Segment::Key> memory,
                        const std::string& why, const Deadline& deadline) {
  std::size_t ended = 0;
  for (const pid_t pid : all_processes()) {
    if (pid == getpid() || !holds(maps_of(pid), markers, memory)) continue;
    // Looked at again with a descriptor in hand: the number may be another process's by now.
    const UniqueFd pidfd = open_pidfd(pid);
    if (!pidfd && errno != ESRCH) {
      fail(ErrorKind::kResource, "pid ", pid, " cannot be watched: ", errno_text(errno));
    }
    if (!pidfd || !holds(maps_of(pid), markers, memory)) continue;
    log_warn("pid ", pid, " has memory of this process from a process that was left out, and is ",
             "killed: ", why);
    end_process(pid, pidfd.get(), deadline);
    ++ended;
  }
  return ended;
}

}  // namespace

std::string marker_label(const Id& process) { return "process " + process.to_string(); }

void fence(std::span<const std::shared_ptr<Peer>> outsiders, const Id& self,
           const std::function<std::vector<Segment::Key>()>& memory, const std::string& why,
           const Deadline& deadline) {
  if (outsiders.empty()) return;
  // What does not show this process to itself shows nobody.
  if (maps_of(getpid()).find(marker_label(self)) == std::string::npos) {
    fail(ErrorKind::kUnsupported, "/proc does not show this process's mappings, so the ",
         "processes that map this memory cannot be listed; mount /proc, and let the process ",
         "be dumpable");
  }
  std::vector<std::string> markers;
  for (const auto& peer : outsiders) {
    const auto& info = peer->info();
    markers.push_back(marker_label(info.id));
    // One that was lost and runs may have become another program by exec: its mappings tell.
    if (peer->lost() || has_ended(peer->pidfd(), Deadline::after(std::chrono::seconds(0)))) {
      continue;
    }
    log_warn("pid ", info.pid, " is killed: ", why);
    end_process(info.pid, peer->pidfd(), deadline);
  }
  for (int round = 0; end_holders(markers, memory(), why, deadline) != 0; ++round) {
    if (round == kMostRounds || deadline.expired()) {
      fail(ErrorKind::kTimeout, "children of a process that was left out fork faster than they ",
           "can be killed");
    }
  }
}

}  // namespace convoy::shm
