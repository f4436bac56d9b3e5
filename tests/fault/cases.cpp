#include "fault/cases.h"

#include <errno.h>
#include <string.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "base/concat.h"
#include "fault/errno_injection.h"

namespace convoy::fault {
namespace {

constexpr auto kSuccess = Fault::Demand::kSuccess;
constexpr auto kAny = Fault::Demand::kErrorOrSuccess;
constexpr bool kLasting = true;

// A call that is made often is failed at the first of them, and then at ever larger distances.
constexpr long kEach = 40;

}  // namespace

const std::vector<Fault>& all_faults() {
  static const std::vector<Fault> faults = {
      {"memfd_create", EMFILE, kAny, kLasting},
      {"memfd_create", ENFILE},
      {"memfd_create", ENOMEM},
      {"fallocate", EINTR, kSuccess},
      {"fallocate", ENOSPC, kAny, kLasting},
      {"fallocate", ENOMEM},
      {"mmap", ENOMEM, kAny, kLasting},
      {"madvise", ENOMEM, kSuccess, kLasting},
      {"fcntl_dupfd", EMFILE, kAny, kLasting},
      {"socket", EMFILE, kAny, kLasting},
      {"socket", ENOBUFS},
      {"socketpair", EMFILE, kAny, kLasting},
      {"socketpair", ENFILE},
      {"bind", EADDRINUSE},
      {"bind", EACCES},
      {"bind", ENOSPC},
      {"listen", EADDRINUSE},
      {"connect", EINTR, kSuccess},
      {"connect", EAGAIN, kSuccess},
      {"connect", ECONNREFUSED},
      {"accept4", EINTR, kSuccess},
      {"accept4", EAGAIN, kSuccess},
      {"accept4", ECONNABORTED, kSuccess},
      {"accept4", EMFILE, kAny, kLasting},
      {"accept4", ENOBUFS},
      {"sendmsg", EINTR, kSuccess},
      {"sendmsg", EAGAIN, kSuccess},
      {"sendmsg", CONVOY_INJECT_PART, kSuccess},
      {"sendmsg", EPIPE},
      {"sendmsg", ENOBUFS},
      {"sendmsg", ETOOMANYREFS},
      {"recvmsg", EINTR, kSuccess},
      {"recvmsg", EAGAIN, kSuccess},
      {"recvmsg", CONVOY_INJECT_PART},
      {"recvmsg", ECONNRESET},
      {"recvmsg", ENOMEM},
      {"send", EINTR, kSuccess},
      // The kernel says this of full sockets only, and a full one wakes its reader: who sends a
      // wake-up byte may therefore leave it at that. Here the socket is empty, so a deadline is
      // right.
      {"send", EAGAIN},
      {"send", CONVOY_INJECT_PART, kSuccess},
      {"send", EPIPE},
      {"send", ENOBUFS},
      {"recv", EINTR, kSuccess},
      {"recv", EAGAIN, kSuccess},
      {"getsockopt", ENOBUFS},
      {"setsockopt", ENOBUFS},
      {"poll", EINTR, kSuccess},
      {"poll", ENOMEM},
      {"epoll_create1", EMFILE, kAny, kLasting},
      {"epoll_create1", ENOMEM},
      {"epoll_ctl", ENOMEM},
      {"epoll_ctl", ENOSPC, kAny, kLasting},
      {"epoll_wait", EINTR, kSuccess},
      {"eventfd", EMFILE, kAny, kLasting},
      {"eventfd", ENOMEM},
      {"signalfd", EMFILE},
      {"signalfd", ENOMEM},
      {"pipe2", EMFILE, kAny, kLasting},
      {"pipe2", ENFILE},
      {"dup3", EMFILE},
      {"open", EMFILE, kAny, kLasting},
      {"open", ENFILE},
      {"open", EACCES, kAny, kLasting},
      {"opendir", EMFILE, kAny, kLasting},
      {"opendir", EACCES},
      {"read", EINTR, kSuccess},
      {"read", CONVOY_INJECT_PART, kSuccess},
      {"read", EIO},
      {"pread", EINTR, kSuccess},
      {"pread", EIO},
      {"write", EINTR, kSuccess},
      {"write", CONVOY_INJECT_PART, kSuccess},
      {"write", ENOSPC},
      {"write", EIO},
      {"pwrite", EINTR, kSuccess},
      {"pwrite", ENOSPC},
      {"close", EINTR, kSuccess},
      {"close", EIO, kSuccess},
      {"fstat", ENOMEM},
      {"stat", EACCES},
      {"lstat", EACCES},
      {"readlink", ENOMEM},
      {"mkdir", EACCES},
      {"mkdir", ENOSPC},
      {"mkdtemp", EACCES},
      {"chmod", EPERM},
      {"flock", EINTR, kSuccess},
      {"flock", ENOLCK},
      {"ioctl", ENOTTY, kSuccess, kLasting},
      {"pthread_create", EAGAIN, kAny, kLasting},
      {"_Fork", EAGAIN, kAny, kLasting},
      {"_Fork", ENOMEM},
      {"fork", EAGAIN, kAny, kLasting},
      {"execve", ENOMEM},
      {"execve", EACCES},
      {"execve", ETXTBSY},
      {"waitid", EINTR, kSuccess},
      {"waitpid", EINTR, kSuccess},
      {"kill", EPERM},
      {"prctl", EINVAL},
      {"getrandom", EINTR, kSuccess},
      {"process_vm_readv", EPERM, kSuccess, kLasting},
      {"process_vm_readv", ENOSYS, kSuccess, kLasting},
      {"process_vm_readv", ENOMEM},
      {"futex_wait", EINTR, kSuccess},
      {"futex_wait", EAGAIN, kSuccess},
      {"pidfd_open", EMFILE, kAny, kLasting},
      {"pidfd_open", ENOMEM},
      {"pidfd_open", ENOSYS, kAny, kLasting},
      {"pidfd_send_signal", EPERM},
  };
  return faults;
}

std::string name_of(const Scenario& scenario) {
  if (!scenario.processes) return concat(scenario.name, "OfThreads");
  return concat(scenario.name, "OfProcessesRank", scenario.victim);
}

std::string to_string(const Fault& fault) {
  return concat(fault.call, " ",
                fault.error == CONVOY_INJECT_PART ? "in part" : ::strerrorname_np(fault.error));
}

std::string to_string(const Case& one) {
  return concat(to_string(one.fault), " at call ", one.first,
                one.times < 0 ? " and all after it" : "");
}

std::vector<Case> cases_for(const Fault& fault, long count) {
  std::vector<Case> cases;
  for (long first = 1; first <= count; first += first <= kEach ? 1 : first / 4) {
    cases.push_back({.fault = fault, .first = first, .times = 1});
    if (fault.lasting) cases.push_back({.fault = fault, .first = first, .times = -1});
  }
  return cases;
}

std::vector<Case> wanted(std::vector<Case> cases) {
  if (const char* const text = std::getenv("CONVOY_TEST_CASE")) {
    std::erase_if(cases,
                  [&](const Case& one) { return to_string(one).find(text) == std::string::npos; });
  }
  return cases;
}

std::vector<Case> sample_of(const std::vector<Case>& cases, std::size_t most) {
  std::vector<Case> some;
  std::sample(cases.begin(), cases.end(), std::back_inserter(some), most, std::mt19937(23));
  return some;
}

}  // namespace convoy::fault
