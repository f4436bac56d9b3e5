#include <fcntl.h>
#include <sys/stat.h>

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "store/protocol.h"
#include "store/server.h"
#include "store/socket_store.h"

namespace convoy {
namespace {

// 0: no socket.
std::uint64_t socket_inode(int fd) {
  struct stat info {};
  if (fstat(fd, &info) < 0 || !S_ISSOCK(info.st_mode)) return 0;
  return info.st_ino;
}

struct Inherited {
  int fd = -1;
  std::uint64_t inode = 0;
};

Inherited parse_inherited(std::string_view text) {
  Inherited result;
  const char* const end = text.data() + text.size();
  const auto fd = std::from_chars(text.data(), end, result.fd);
  if (fd.ec == std::errc() && result.fd >= 0 && fd.ptr != end && *fd.ptr == ':') {
    const auto inode = std::from_chars(fd.ptr + 1, end, result.inode);
    if (inode.ec == std::errc() && inode.ptr == end && result.inode != 0) return result;
  }
  fail(ErrorKind::kInvalidArgument, kStoreFdVariable, "=", printable(text),
       " is not of the form descriptor:inode; do not set it by hand, use `convoy run`");
}

// A script may pass the connection on to several programs. One after another is fine; two at once
// would take each other's replies. A record lock belongs to one process and ends with it.
void claim(int fd) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  if (fcntl(fd, F_SETLK, &lock) == 0 || (errno != EAGAIN && errno != EACCES)) return;
  struct flock holder = lock;
  if (fcntl(fd, F_GETLK, &holder) < 0 || holder.l_type == F_UNLCK) return claim(fd);
  fail(ErrorKind::kInvalidArgument, "the store connection of this rank is in use by process ",
       holder.l_pid, ": one program at a time can be the rank that `convoy run` started");
}

std::shared_ptr<Store> store_from_environment() {
  const char* const text = std::getenv(kStoreFdVariable);
  if (!text) return nullptr;
  const Inherited inherited = parse_inherited(text);
  if (socket_inode(inherited.fd) != inherited.inode) {
    fail(ErrorKind::kPeerLost, "the store connection of this rank (descriptor ", inherited.fd,
         ") is not open here: only the program that `convoy run` starts has it, not that program's "
         "children, and a program that closes all descriptors at its start loses it");
  }
  claim(inherited.fd);
  return make_socket_store(Socket(UniqueFd(inherited.fd)));
}

}  // namespace

std::string store_environment(int fd) {
  return concat(kStoreFdVariable, "=", fd, ":", socket_inode(fd));
}

std::shared_ptr<Store> launcher_store() {
  // Never destroyed: ranks may use it until they exit. A failure is not kept: the next call tries
  // again and throws again.
  static auto* const store = new std::shared_ptr<Store>(store_from_environment());
  return *store;
}

}  // namespace convoy
