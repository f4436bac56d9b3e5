#include "os/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "base/error.h"
#include "convoy/deadline.h"

namespace convoy {
namespace {

constexpr int kMaxFd = 1 << 20;  // the kernel's default hard limit (fs.nr_open)

// One bit a descriptor. Written by any thread (fetch_or, fetch_and), read in the child, where no
// other thread exists: relaxed is enough.
std::array<std::atomic<std::uint64_t>, kMaxFd / 64> registered;
std::atomic<int> highest_word{-1};  // grows only
std::atomic<unsigned> generation{0};

// A pausing thread raises `pauses` and then looks at `forks`; a forking thread raises `forks` and
// then looks at `pauses`. Both sequentially consistent: one of them sees the other.
std::atomic<int> pauses{0};
std::atomic<int> forks{0};
thread_local int pause_depth = 0;

void before_fork() {
  forks.fetch_add(1);
  // A pause lasts a few system calls. A thread that never ends its pause (a signal handler that
  // forks inside one) must not hang the fork; the child may then keep one socket.
  const auto limit = Deadline::after(std::chrono::seconds(1));
  while (pauses.load() != 0 && !limit.expired()) sched_yield();
}

void in_parent() { forks.fetch_sub(1); }

// A socket whose peer is gone. Under a full descriptor table it takes the place of `spare`.
int peerless_socket(int spare) {
  std::array<int, 2> ends{};
  constexpr int kType = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
  if (::socketpair(AF_UNIX, kType, 0, ends.data()) == 0) {
    ::close(ends[1]);
    return ends[0];
  }
  ::close(spare);
  return ::socket(AF_UNIX, kType, 0);  // unconnected: also tells its user ENOTCONN, EPIPE
}

void replace(int fd, int& peerless) {
  if (peerless < 0) peerless = peerless_socket(fd);
  if (peerless == fd) return;  // it took the place itself
  if (peerless < 0 || ::dup3(peerless, fd, O_CLOEXEC) < 0) ::close(fd);
}

// Runs in the child of fork(): only async-signal-safe calls.
void in_child() {
  forks.store(0);
  pauses.store(pause_depth > 0 ? 1 : 0);
  generation.fetch_add(1, std::memory_order_relaxed);
  const int top = highest_word.load(std::memory_order_relaxed);
  int peerless = -1;
  bool in_place = false;  // the number of `peerless` is itself one of those to fill
  for (int word = 0; word <= top; ++word) {
    std::uint64_t bits =
        registered[static_cast<std::size_t>(word)].exchange(0, std::memory_order_relaxed);
    for (; bits != 0; bits &= bits - 1) {
      const int fd = word * 64 + __builtin_ctzll(bits);
      replace(fd, peerless);
      in_place = in_place || peerless == fd;
    }
  }
  if (peerless >= 0 && !in_place) ::close(peerless);
}

// 0, or why the handlers could not be installed.
int install() noexcept {
  static const int error = pthread_atfork(before_fork, in_parent, in_child);
  return error;
}

}  // namespace

void register_fork_closed(int fd) {
  CONVOY_CHECK(fd >= 0 && fd < kMaxFd, "descriptor ", fd);
  if (const int error = install(); error != 0) {
    errno = error;
    fail_errno("pthread_atfork");
  }
  const int word = fd / 64;
  registered[static_cast<std::size_t>(word)].fetch_or(std::uint64_t{1} << (fd % 64),
                                                      std::memory_order_relaxed);
  int seen = highest_word.load(std::memory_order_relaxed);
  while (seen < word &&
         !highest_word.compare_exchange_weak(seen, word, std::memory_order_relaxed)) {
  }
}

void unregister_fork_closed(int fd) noexcept {
  if (fd < 0 || fd >= kMaxFd) return;
  registered[static_cast<std::size_t>(fd / 64)].fetch_and(~(std::uint64_t{1} << (fd % 64)),
                                                          std::memory_order_relaxed);
}

ForkPause::ForkPause() noexcept {
  install();
  if (pause_depth++ > 0) return;
  for (;;) {
    pauses.fetch_add(1);
    if (forks.load() == 0) return;
    pauses.fetch_sub(1);
    while (forks.load() != 0) sched_yield();
  }
}

ForkPause::~ForkPause() {
  if (--pause_depth == 0) pauses.fetch_sub(1);
}

unsigned fork_generation() noexcept {
  install();
  return generation.load(std::memory_order_relaxed);
}

}  // namespace convoy
