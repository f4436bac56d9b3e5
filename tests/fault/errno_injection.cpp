#include "fault/errno_injection.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace {

// In this order they are numbered.
constexpr std::array kNames = {"memfd_create",
                               "ftruncate",
                               "fallocate",
                               "mmap",
                               "madvise",
                               "fcntl_dupfd",
                               "socket",
                               "socketpair",
                               "bind",
                               "listen",
                               "connect",
                               "accept4",
                               "sendmsg",
                               "recvmsg",
                               "send",
                               "recv",
                               "getsockopt",
                               "setsockopt",
                               "poll",
                               "epoll_create1",
                               "epoll_ctl",
                               "epoll_wait",
                               "eventfd",
                               "signalfd",
                               "pipe2",
                               "dup3",
                               "open",
                               "opendir",
                               "read",
                               "pread",
                               "write",
                               "pwrite",
                               "close",
                               "fstat",
                               "stat",
                               "lstat",
                               "readlink",
                               "mkdir",
                               "mkdtemp",
                               "unlink",
                               "chmod",
                               "flock",
                               "ioctl",
                               "pthread_create",
                               "_Fork",
                               "fork",
                               "execve",
                               "waitid",
                               "waitpid",
                               "kill",
                               "prctl",
                               "getrandom",
                               "process_vm_readv",
                               "futex_wait",
                               "futex_wake",
                               "pidfd_open",
                               "pidfd_send_signal",
                               "syscall"};
constexpr std::size_t kCalls = kNames.size();

constexpr std::size_t number_of(const char* name) {
  for (std::size_t i = 0; i < kCalls; ++i) {
    if (std::string_view(kNames[i]) == name) return i;
  }
  throw std::logic_error("no such call");  // when it is compiled
}

// Written by the control functions only, while nobody calls: relaxed.
std::atomic<std::size_t> armed{kCalls};
std::atomic<int> armed_error{0};
std::atomic<long> armed_first{0};
std::atomic<long> armed_times{0};
std::atomic<bool> counting{false};
// By every call: relaxed, they are numbers only.
std::array<std::atomic<long>, kCalls> counts{};
std::atomic<long> failed{0};

// Descriptors that are counters: reads and writes of them are whole, and never fail as those of
// files do. By whoever makes and closes them: relaxed.
std::array<std::atomic<bool>, 4096> counters{};
void note_counter(int fd, bool is_one) {
  if (fd >= 0 && static_cast<std::size_t>(fd) < counters.size()) {
    counters[static_cast<std::size_t>(fd)].store(is_one, std::memory_order_relaxed);
  }
}
bool is_counter(int fd) {
  return fd >= 0 && static_cast<std::size_t>(fd) < counters.size() &&
         counters[static_cast<std::size_t>(fd)].load(std::memory_order_relaxed);
}

// The kernel takes so few bytes whole or not at all.
constexpr std::size_t kWhole = 64;

thread_local bool exempt __attribute__((tls_model("initial-exec"))) = false;

// 0: the call is to be done; otherwise how it fails.
int failure_of(std::size_t call) {
  if (exempt || !counting.load(std::memory_order_relaxed)) return 0;
  const long number = counts[call].fetch_add(1, std::memory_order_relaxed) + 1;
  if (call != armed.load(std::memory_order_relaxed)) return 0;
  const long first = armed_first.load(std::memory_order_relaxed);
  const long times = armed_times.load(std::memory_order_relaxed);
  if (number < first || (times >= 0 && number >= first + times)) return 0;
  failed.fetch_add(1, std::memory_order_relaxed);
  return armed_error.load(std::memory_order_relaxed);
}

// Sets errno and says so; CONVOY_INJECT_PART is no failure. A connection that is said to be gone is
// gone: of the socket, if there is one.
bool fails(std::size_t call, bool* part = nullptr, int socket = -1) {
  const int error = failure_of(call);
  if (error == CONVOY_INJECT_PART && part) *part = true;
  if (error <= 0) return false;
  if (socket >= 0 && (error == EPIPE || error == ECONNRESET)) ::shutdown(socket, SHUT_RDWR);
  errno = error;
  return true;
}

// The C library's function. No lock: it may be asked for between fork and exec.
template <class Function>
Function next(std::atomic<void*>& slot, const char* name) {
  void* found = slot.load(std::memory_order_acquire);
  if (!found) {
    found = ::dlsym(RTLD_NEXT, name);
    if (!found) std::abort();
    slot.store(found, std::memory_order_release);
  }
  return reinterpret_cast<Function>(found);
}

// A line of the environment: "name:errno:first:times".
void arm_from_environment() {
  const char* const program = std::getenv(CONVOY_INJECT_PROGRAM_VARIABLE);
  if (!program) return;
  std::array<char, 4096> path{};
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size() - 1);
  if (length <= 0) return;
  const char* const slash = std::strrchr(path.data(), '/');
  if (std::strcmp(slash ? slash + 1 : path.data(), program) != 0) return;
  std::array<char, 64> name{};
  int error = 0;
  long first = 0;
  long times = 0;
  const char* const text = std::getenv(CONVOY_INJECT_VARIABLE);
  const bool given =
      text && std::sscanf(text, "%63[^:]:%d:%ld:%ld", name.data(), &error, &first, &times) == 4;
  convoy_inject_arm(given ? name.data() : nullptr, error, first, times);
}

[[gnu::constructor]] void begin() { arm_from_environment(); }

[[gnu::destructor]] void write_counts() {
  const char* const path = std::getenv(CONVOY_INJECT_COUNTS_VARIABLE);
  if (!path || !counting.exchange(false)) return;
  exempt = true;
  std::FILE* const file = std::fopen(path, "a");
  if (!file) return;
  for (std::size_t i = 0; i < kCalls; ++i) {
    std::fprintf(file, "%s %ld\n", kNames[i], counts[i].load(std::memory_order_relaxed));
  }
  std::fclose(file);
}

// What a call through syscall(2) is.
std::size_t number_of_raw(long number, long operation) {
  if (number == SYS_futex) {
    const long command = operation & FUTEX_CMD_MASK;
    const bool wakes = command == FUTEX_WAKE || command == FUTEX_WAKE_BITSET;
    return number_of(wakes ? "futex_wake" : "futex_wait");
  }
  if (number == SYS_pidfd_open) return number_of("pidfd_open");
  if (number == SYS_pidfd_send_signal) return number_of("pidfd_send_signal");
  return number_of("syscall");
}

void drop_descriptors(msghdr* message) {
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = CMSG_LEN(0); at + sizeof(int) <= part->cmsg_len; at += sizeof(int)) {
      int descriptor = -1;
      std::memcpy(&descriptor, reinterpret_cast<char*>(part) + at, sizeof descriptor);
      ::close(descriptor);
    }
  }
  message->msg_controllen = 0;
  message->msg_flags |= MSG_CTRUNC;
}

}  // namespace

#define CONVOY_EXPORT extern "C" __attribute__((visibility("default")))

CONVOY_EXPORT int convoy_inject_calls() { return static_cast<int>(kCalls); }
CONVOY_EXPORT const char* convoy_inject_name(int call) {
  return kNames[static_cast<std::size_t>(call)];
}
CONVOY_EXPORT long convoy_inject_count(int call) {
  return counts[static_cast<std::size_t>(call)].load(std::memory_order_relaxed);
}
CONVOY_EXPORT void convoy_inject_arm(const char* name, int error, long first, long times) {
  std::size_t call = kCalls;
  for (std::size_t i = 0; name && i < kCalls; ++i) {
    if (std::strcmp(kNames[i], name) == 0) call = i;
  }
  for (auto& count : counts) count.store(0, std::memory_order_relaxed);
  failed.store(0, std::memory_order_relaxed);
  armed_error.store(error, std::memory_order_relaxed);
  armed_first.store(first, std::memory_order_relaxed);
  armed_times.store(times, std::memory_order_relaxed);
  armed.store(call, std::memory_order_relaxed);
  counting.store(true, std::memory_order_relaxed);
}
CONVOY_EXPORT long convoy_inject_disarm() {
  counting.store(false, std::memory_order_relaxed);
  armed.store(kCalls, std::memory_order_relaxed);
  return failed.load(std::memory_order_relaxed);
}
CONVOY_EXPORT void convoy_inject_exempt(int on) { exempt = on != 0; }

// The functions themselves have names of their own: the headers declare the real ones in other
// words (noexcept, variable arguments).
#define CONVOY_DECLARE(result, name, parameters) \
  CONVOY_EXPORT result injected_##name parameters __asm__(#name)
#define CONVOY_NEXT(name)                  \
  static std::atomic<void*> slot{nullptr}; \
  const auto real = next<decltype(&injected_##name)>(slot, #name)
#define CONVOY_INJECTED(failure, result, name, parameters, arguments) \
  CONVOY_DECLARE(result, name, parameters);                           \
  result injected_##name parameters {                                 \
    constexpr std::size_t kCall = number_of(#name);                   \
    if (fails(kCall)) return failure;                                 \
    CONVOY_NEXT(name);                                                \
    return real arguments;                                            \
  }
// One that may do a part of its work.
#define CONVOY_INJECTED_PART(name, parameters, size, arguments) \
  CONVOY_DECLARE(ssize_t, name, parameters);                    \
  ssize_t injected_##name parameters {                          \
    constexpr std::size_t kCall = number_of(#name);             \
    bool part = false;                                          \
    if (fails(kCall, &part, fd)) return -1;                     \
    if (part && (size) > kWhole) (size) = 1;                    \
    CONVOY_NEXT(name);                                          \
    return real arguments;                                      \
  }

// clang-format off
CONVOY_INJECTED(-1, int, memfd_create, (const char* name, unsigned flags), (name, flags))
CONVOY_INJECTED(-1, int, ftruncate, (int fd, off_t size), (fd, size))
CONVOY_INJECTED(-1, int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
CONVOY_INJECTED(MAP_FAILED, void*, mmap, (void* at, std::size_t size, int rights, int flags, int fd, off_t offset),
                (at, size, rights, flags, fd, offset))
CONVOY_INJECTED(-1, int, madvise, (void* at, std::size_t size, int advice), (at, size, advice))
CONVOY_INJECTED(-1, int, socket, (int domain, int type, int protocol), (domain, type, protocol))
CONVOY_INJECTED(-1, int, socketpair, (int domain, int type, int protocol, int* ends), (domain, type, protocol, ends))
CONVOY_INJECTED(-1, int, bind, (int fd, const sockaddr* address, socklen_t size), (fd, address, size))
CONVOY_INJECTED(-1, int, listen, (int fd, int backlog), (fd, backlog))
CONVOY_INJECTED(-1, int, connect, (int fd, const sockaddr* address, socklen_t size), (fd, address, size))
CONVOY_INJECTED(-1, int, accept4, (int fd, sockaddr* address, socklen_t* size, int flags), (fd, address, size, flags))
CONVOY_INJECTED(-1, int, getsockopt, (int fd, int level, int name, void* value, socklen_t* size),
                (fd, level, name, value, size))
CONVOY_INJECTED(-1, int, setsockopt, (int fd, int level, int name, const void* value, socklen_t size),
                (fd, level, name, value, size))
CONVOY_INJECTED(-1, int, poll, (pollfd* items, nfds_t count, int timeout), (items, count, timeout))
CONVOY_INJECTED(-1, int, epoll_create1, (int flags), (flags))
CONVOY_INJECTED(-1, int, epoll_wait, (int epoll, epoll_event* events, int count, int timeout),
                (epoll, events, count, timeout))
CONVOY_INJECTED(-1, int, pipe2, (int* ends, int flags), (ends, flags))
CONVOY_INJECTED(-1, int, dup3, (int from, int to, int flags), (from, to, flags))
CONVOY_INJECTED(-1, int, open, (const char* path, int flags, mode_t mode), (path, flags, mode))
CONVOY_INJECTED(nullptr, DIR*, opendir, (const char* path), (path))
CONVOY_INJECTED(-1, int, fstat, (int fd, struct stat* info), (fd, info))
CONVOY_INJECTED(-1, int, stat, (const char* path, struct stat* info), (path, info))
CONVOY_INJECTED(-1, int, lstat, (const char* path, struct stat* info), (path, info))
CONVOY_INJECTED(-1, ssize_t, readlink, (const char* path, char* text, std::size_t size), (path, text, size))
CONVOY_INJECTED(-1, int, mkdir, (const char* path, mode_t mode), (path, mode))
CONVOY_INJECTED(nullptr, char*, mkdtemp, (char* path), (path))
CONVOY_INJECTED(-1, int, unlink, (const char* path), (path))
CONVOY_INJECTED(-1, int, chmod, (const char* path, mode_t mode), (path, mode))
CONVOY_INJECTED(-1, int, flock, (int fd, int operation), (fd, operation))
CONVOY_INJECTED(-1, int, ioctl, (int fd, unsigned long request, long argument), (fd, request, argument))
CONVOY_INJECTED(-1, pid_t, _Fork, (), ())
CONVOY_INJECTED(-1, pid_t, fork, (), ())
CONVOY_INJECTED(-1, int, execve, (const char* path, char* const* arguments, char* const* environment),
                (path, arguments, environment))
CONVOY_INJECTED(-1, int, waitid, (idtype_t type, id_t id, siginfo_t* info, int options), (type, id, info, options))
CONVOY_INJECTED(-1, pid_t, waitpid, (pid_t pid, int* status, int options), (pid, status, options))
CONVOY_INJECTED(-1, int, kill, (pid_t pid, int signal), (pid, signal))
CONVOY_INJECTED(-1, int, prctl, (int option, long a, long b, long c, long d), (option, a, b, c, d))
CONVOY_INJECTED(-1, ssize_t, getrandom, (void* data, std::size_t size, unsigned flags), (data, size, flags))
CONVOY_INJECTED(-1, ssize_t, process_vm_readv,
                (pid_t pid, const iovec* to, unsigned long tos, const iovec* from, unsigned long froms, unsigned long flags),
                (pid, to, tos, from, froms, flags))
CONVOY_INJECTED_PART(pread, (int fd, void* data, std::size_t size, off_t at), size, (fd, data, size, at))
CONVOY_INJECTED_PART(pwrite, (int fd, const void* data, std::size_t size, off_t at), size, (fd, data, size, at))
CONVOY_INJECTED_PART(send, (int fd, const void* data, std::size_t size, int flags), size, (fd, data, size, flags))
CONVOY_INJECTED_PART(recv, (int fd, void* data, std::size_t size, int flags), size, (fd, data, size, flags))
// clang-format on

CONVOY_DECLARE(ssize_t, sendmsg, (int fd, const msghdr* message, int flags));
ssize_t injected_sendmsg(int fd, const msghdr* message, int flags) {
  constexpr std::size_t kCall = number_of("sendmsg");
  bool part = false;
  if (fails(kCall, &part, fd)) return -1;
  CONVOY_NEXT(sendmsg);
  if (!part || message->msg_iovlen == 0) return real(fd, message, flags);
  iovec one = message->msg_iov[0];
  one.iov_len = std::min<std::size_t>(one.iov_len, 1);
  msghdr shorter = *message;
  shorter.msg_iov = &one;
  shorter.msg_iovlen = 1;
  return real(fd, &shorter, flags);
}

CONVOY_DECLARE(ssize_t, recvmsg, (int fd, msghdr* message, int flags));
ssize_t injected_recvmsg(int fd, msghdr* message, int flags) {
  constexpr std::size_t kCall = number_of("recvmsg");
  bool part = false;
  if (fails(kCall, &part, fd)) return -1;
  CONVOY_NEXT(recvmsg);
  const ssize_t got = real(fd, message, flags);
  if (part && got > 0 && message->msg_controllen > 0) drop_descriptors(message);
  return got;
}

// Taking out is not refused.
CONVOY_DECLARE(int, epoll_ctl, (int epoll, int operation, int fd, epoll_event* event));
int injected_epoll_ctl(int epoll, int operation, int fd, epoll_event* event) {
  constexpr std::size_t kCall = number_of("epoll_ctl");
  if (operation != EPOLL_CTL_DEL && fails(kCall)) return -1;
  CONVOY_NEXT(epoll_ctl);
  return real(epoll, operation, fd, event);
}

CONVOY_DECLARE(int, eventfd, (unsigned count, int flags));
int injected_eventfd(unsigned count, int flags) {
  constexpr std::size_t kCall = number_of("eventfd");
  if (fails(kCall)) return -1;
  CONVOY_NEXT(eventfd);
  const int fd = real(count, flags);
  note_counter(fd, true);
  return fd;
}

CONVOY_DECLARE(int, signalfd, (int fd, const sigset_t* mask, int flags));
int injected_signalfd(int fd, const sigset_t* mask, int flags) {
  constexpr std::size_t kCall = number_of("signalfd");
  if (fails(kCall)) return -1;
  CONVOY_NEXT(signalfd);
  const int made = real(fd, mask, flags);
  note_counter(made, true);
  return made;
}

CONVOY_DECLARE(ssize_t, read, (int fd, void* data, std::size_t size));
ssize_t injected_read(int fd, void* data, std::size_t size) {
  constexpr std::size_t kCall = number_of("read");
  bool part = false;
  if (!is_counter(fd) && fails(kCall, &part, fd)) return -1;
  CONVOY_NEXT(read);
  return real(fd, data, part ? std::min<std::size_t>(size, 1) : size);
}

CONVOY_DECLARE(ssize_t, write, (int fd, const void* data, std::size_t size));
ssize_t injected_write(int fd, const void* data, std::size_t size) {
  constexpr std::size_t kCall = number_of("write");
  bool part = false;
  if (!is_counter(fd) && fails(kCall, &part, fd)) return -1;
  CONVOY_NEXT(write);
  return real(fd, data, part ? std::min<std::size_t>(size, 1) : size);
}

// Only those that make a descriptor: seals and flags are not refused without a reason.
CONVOY_DECLARE(int, fcntl, (int fd, int command, long argument));
int injected_fcntl(int fd, int command, long argument) {
  constexpr std::size_t kCall = number_of("fcntl_dupfd");
  if ((command == F_DUPFD || command == F_DUPFD_CLOEXEC) && fails(kCall)) return -1;
  CONVOY_NEXT(fcntl);
  return real(fd, command, argument);
}

// The supervisor of `convoy run` ends by it.
CONVOY_DECLARE(void, _exit, (int code));
void injected__exit(int code) {
  write_counts();
  CONVOY_NEXT(_exit);
  real(code);
  std::abort();
}

// Closes what it is given whatever it says: so does Linux. Who tries again closes another's.
CONVOY_DECLARE(int, close, (int fd));
int injected_close(int fd) {
  constexpr std::size_t kCall = number_of("close");
  const int error = failure_of(kCall);
  note_counter(fd, false);
  CONVOY_NEXT(close);
  const int result = real(fd);
  if (error <= 0) return result;
  errno = error;
  return -1;
}

CONVOY_DECLARE(int, pthread_create,
               (pthread_t * thread, const pthread_attr_t* attributes, void* (*run)(void*),
                void* argument));
int injected_pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                            void* (*run)(void*), void* argument) {
  constexpr std::size_t kCall = number_of("pthread_create");
  const int error = failure_of(kCall);
  if (error > 0) return error;
  CONVOY_NEXT(pthread_create);
  return real(thread, attributes, run, argument);
}

CONVOY_DECLARE(long, syscall, (long number, long a, long b, long c, long d, long e, long f));
long injected_syscall(long number, long a, long b, long c, long d, long e, long f) {
  if (fails(number_of_raw(number, b))) return -1;
  CONVOY_NEXT(syscall);
  return real(number, a, b, c, d, e, f);
}
