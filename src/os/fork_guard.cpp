#include "os/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "base/error.h"

namespace convoy {
namespace {

constexpr int kMaxFd = 1 << 20;  // the kernel's default hard limit (fs.nr_open)

// One bit a descriptor. Written by any thread (fetch_or, fetch_and), read in the child, where no
// other thread exists: relaxed is enough.
std::array<std::atomic<std::uint64_t>, kMaxFd / 64> registered;
std::atomic<int> highest_word{-1};  // grows only
std::atomic<unsigned> generation{0};

// Runs in the child of fork(): only async-signal-safe calls.
void in_child() {
  generation.fetch_add(1, std::memory_order_relaxed);
  const int top = highest_word.load(std::memory_order_relaxed);
  int null_fd = -1;
  for (int word = 0; word <= top; ++word) {
    std::uint64_t bits =
        registered[static_cast<std::size_t>(word)].exchange(0, std::memory_order_relaxed);
    while (bits != 0) {
      const int fd = word * 64 + __builtin_ctzll(bits);
      bits &= bits - 1;
      if (null_fd < 0) null_fd = ::open("/dev/null", O_RDWR | O_CLOEXEC);
      if (null_fd < 0 || ::dup3(null_fd, fd, O_CLOEXEC) < 0) ::close(fd);
    }
  }
  if (null_fd >= 0) ::close(null_fd);
}

}  // namespace

void register_fork_closed(int fd) {
  CONVOY_CHECK(fd >= 0 && fd < kMaxFd, "descriptor ", fd);
  static const bool installed = [] {
    if (const int error = pthread_atfork(nullptr, nullptr, in_child); error != 0) {
      errno = error;
      fail_errno("pthread_atfork");
    }
    return true;
  }();
  static_cast<void>(installed);
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

unsigned fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

}  // namespace convoy
