#include "os/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"

namespace convoy {
namespace {

long futex(const std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout, std::uint32_t mask) {
  static_assert(sizeof(word) == sizeof(std::uint32_t));
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, mask);
}

}  // namespace

bool futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                const Deadline& deadline) {
  timespec until{};
  const timespec* limit = nullptr;
  if (!deadline.is_never()) {
    // FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC, which is what steady_clock
    // reads. It refuses negative times.
    const std::chrono::nanoseconds since_boot = deadline.when().time_since_epoch();
    const auto count = std::max<std::int64_t>(since_boot.count(), 0);
    until.tv_sec = static_cast<time_t>(count / 1'000'000'000);
    until.tv_nsec = static_cast<long>(count % 1'000'000'000);
    limit = &until;
  }
  if (futex(word, FUTEX_WAIT_BITSET, expected, limit, FUTEX_BITSET_MATCH_ANY) == 0) return true;
  if (errno == ETIMEDOUT) return false;
  CONVOY_CHECK(errno == EAGAIN || errno == EINTR, "futex: ", errno_text(errno));
  return true;
}

void futex_wake(const std::atomic<std::uint32_t>& word, int count) noexcept {
  futex(word, FUTEX_WAKE, static_cast<std::uint32_t>(count), nullptr, 0);
}

}  // namespace convoy
