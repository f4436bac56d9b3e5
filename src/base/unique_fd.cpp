#include "base/unique_fd.h"

#include <fcntl.h>
#include <unistd.h>

#include "base/error.h"

namespace convoy {

void UniqueFd::reset(int fd) noexcept {
  const int old = std::exchange(fd_, fd);
  if (old < 0) return;
  // Destructors run between a failed call and the look at its errno.
  const int saved = errno;
  ::close(old);  // Linux releases the descriptor even when this reports an error: never retry
  errno = saved;
}

UniqueFd duplicate(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!copy) fail_errno("duplicating descriptor ", fd);
  return copy;
}

}  // namespace convoy
