#include "base/unique_fd.h"

#include <fcntl.h>
#include <unistd.h>

#include "base/error.h"

namespace convoy {

void UniqueFd::reset(int fd) {
  const int old = std::exchange(fd_, fd);
  // Linux releases the descriptor even when close reports an error: never retry.
  if (old >= 0) ::close(old);
}

UniqueFd duplicate(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!copy) fail_errno("duplicating descriptor ", fd);
  return copy;
}

}  // namespace convoy
