#include "os/socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "base/error.h"
#include "os/fork_guard.h"

namespace convoy {
namespace {

constexpr std::size_t kMaxDescriptors = 253;  // SCM_MAX_FD

int new_unix_socket() {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) fail_errno("making a Unix socket");
  return fd;
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    fail(ErrorKind::kInvalidArgument, "socket path '", path, "' has ", path.size(),
         " bytes; a Unix socket takes 1 to ", sizeof address.sun_path - 1);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

const sockaddr* as_sockaddr(const sockaddr_un& address) {
  return reinterpret_cast<const sockaddr*>(&address);
}

bool would_block(int code) { return code == EAGAIN || code == EWOULDBLOCK; }

// Calls again what a signal has interrupted: who looks at a deadline that has passed, or does not
// wait at all, must not take that for "nothing there".
template <class Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

bool peer_gone(int code) { return code == EPIPE || code == ECONNRESET || code == ENOTCONN; }

}  // namespace

bool wait_ready(int fd, short events, const Deadline& deadline) {
  for (;;) {
    pollfd item{fd, events, 0};
    const int ready = uninterrupted([&] { return ::poll(&item, 1, deadline.poll_timeout_ms()); });
    if (ready > 0) return true;
    if (ready < 0) fail_errno("poll");
    if (deadline.expired()) return false;
  }
}

ssize_t send_message(int socket, std::span<const std::byte> bytes,
                     std::span<const int> descriptors) {
  iovec data{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control;
  if (!descriptors.empty()) {
    const std::size_t size = descriptors.size_bytes();
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(size);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(header), descriptors.data(), size);
  }
  return uninterrupted([&] { return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT); });
}

ssize_t receive_message(int socket, std::span<std::byte> bytes, std::vector<UniqueFd>* descriptors,
                        int flags) {
  iovec data{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control;
  if (descriptors) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
  const ssize_t n = uninterrupted(
      [&] { return ::recvmsg(socket, &message, flags | MSG_DONTWAIT | MSG_CMSG_CLOEXEC); });
  if (n < 0 || !descriptors) return n;
  // Own every descriptor before anything can throw.
  std::array<UniqueFd, kMaxDescriptors> received;
  std::size_t count = 0;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t size = header->cmsg_len - CMSG_LEN(0);
    for (std::size_t at = 0; at < size; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + at, sizeof fd);
      received[count++].reset(fd);
    }
  }
  if (message.msg_flags & MSG_CTRUNC) {
    fail(ErrorKind::kResource,
         "descriptors were lost in passing: this process has too many open files (raise the limit "
         "with ulimit -n)");
  }
  for (std::size_t i = 0; i < count; ++i) descriptors->push_back(std::move(received[i]));
  return n;
}

Socket::Socket(UniqueFd fd) : fd_(std::move(fd)) {
  const ForkPause pause;
  int type = 0;
  int domain = 0;
  socklen_t length = sizeof type;
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_TYPE, &type, &length) < 0 ||
      getsockopt(fd_.get(), SOL_SOCKET, SO_DOMAIN, &domain, &length) < 0 || type != SOCK_STREAM ||
      domain != AF_UNIX) {
    fail(ErrorKind::kInvalidArgument, "descriptor ", fd_.get(), " is not a Unix stream socket");
  }
  const int flags = fcntl(fd_.get(), F_GETFL);
  if (flags < 0 || fcntl(fd_.get(), F_SETFL, flags | O_NONBLOCK) < 0 ||
      fcntl(fd_.get(), F_SETFD, FD_CLOEXEC) < 0) {
    fail_errno("setting up socket ", fd_.get());
  }
  register_fork_closed(fd_.get());
}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::move(other.fd_);
  }
  return *this;
}

Socket::~Socket() { close(); }

void Socket::close() {
  if (!fd_) return;
  const ForkPause pause;
  unregister_fork_closed(fd_.get());
  fd_.reset();
}

void Socket::shutdown() noexcept {
  if (fd_) ::shutdown(fd_.get(), SHUT_RDWR);
}

UniqueFd Socket::release() {
  unregister_fork_closed(fd_.get());
  return std::move(fd_);
}

std::pair<Socket, Socket> Socket::pair() {
  const ForkPause pause;
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) < 0) {
    fail_errno("making a socket pair");
  }
  UniqueFd first(ends[0]);
  UniqueFd second(ends[1]);
  return {Socket(std::move(first)), Socket(std::move(second))};
}

Socket Socket::connect(const std::string& path, const Deadline& deadline) {
  const sockaddr_un address = address_of(path);
  Socket socket = [] {
    const ForkPause pause;
    return Socket(UniqueFd(new_unix_socket()));
  }();
  while (::connect(socket.fd(), as_sockaddr(address), sizeof address) < 0) {
    const int code = errno;
    if (code == EINTR) continue;
    if (code != EAGAIN) {
      fail(code == ENOENT ? ErrorKind::kPeerLost : errno_kind(code), "connecting to ", path, ": ",
           errno_text(code));
    }
    // The listener's queue is full. Unix sockets give no event for room in it: poll in small steps.
    if (deadline.expired()) {
      fail(ErrorKind::kTimeout, "connecting to ", path,
           ": the listener's queue was full until the deadline");
    }
    ::poll(nullptr, 0, 1);
  }
  return socket;
}

PeerCredentials Socket::peer() const {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) < 0) {
    fail_errno("reading the credentials of a socket's peer");
  }
  return {credentials.pid, credentials.uid, credentials.gid};
}

void Socket::require_same_user() const {
  const auto other = peer();
  if (other.uid == geteuid() || other.uid == 0) return;
  fail(ErrorKind::kInvalidArgument, "connection from pid ", other.pid, " of user ", other.uid,
       " refused: this process belongs to user ", geteuid());
}

std::optional<std::size_t> Socket::try_send(std::span<const std::byte> bytes) {
  const ssize_t n = uninterrupted(
      [&] { return ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT); });
  if (n >= 0) return static_cast<std::size_t>(n);
  if (would_block(errno)) return 0;
  if (peer_gone(errno)) return std::nullopt;
  fail_errno("sending on socket ", fd_.get());
}

void Socket::send(std::span<const std::byte> bytes, const Deadline& deadline,
                  std::span<const int> descriptors) {
  if (descriptors.size() > kMaxDescriptors) {
    fail(ErrorKind::kInvalidArgument, "cannot pass ", descriptors.size(),
         " descriptors in one message; at most ", kMaxDescriptors);
  }
  CONVOY_CHECK(descriptors.empty() || !bytes.empty(), "descriptors need a byte to travel with");
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = send_message(fd_.get(), bytes.subspan(done),
                                   done == 0 ? descriptors : std::span<const int>());
    if (n >= 0) {
      done += static_cast<std::size_t>(n);
    } else if (errno == EBADF && !descriptors.empty()) {
      fail(ErrorKind::kInvalidArgument, "sending ", bytes.size(), " bytes with ",
           descriptors.size(), " descriptors: one of them is not open");
    } else if (!would_block(errno)) {
      fail_errno("sending ", bytes.size(), " bytes");
    } else if (!wait_ready(fd_.get(), POLLOUT, deadline)) {
      fail(ErrorKind::kTimeout, "sending ", bytes.size(), " bytes: ", done,
           " sent at the deadline");
    }
  }
}

std::optional<std::size_t> Socket::try_receive(std::span<std::byte> bytes,
                                               std::vector<UniqueFd>* descriptors) {
  std::vector<UniqueFd> unwanted;
  const ssize_t n = receive_message(fd_.get(), bytes, descriptors ? descriptors : &unwanted);
  if (n < 0) {
    if (would_block(errno)) return 0;
    if (peer_gone(errno)) return std::nullopt;
    fail_errno("receiving on socket ", fd_.get());
  }
  if (!unwanted.empty()) {
    fail(ErrorKind::kInvalidArgument, "the peer sent ", unwanted.size(),
         " descriptors where none were expected");
  }
  if (n == 0 && !bytes.empty()) return std::nullopt;
  return static_cast<std::size_t>(n);
}

void Socket::receive(std::span<std::byte> bytes, const Deadline& deadline,
                     std::vector<UniqueFd>* descriptors) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const auto n = try_receive(bytes.subspan(done), descriptors);
    if (!n) {
      fail(ErrorKind::kPeerLost, "the peer closed the connection after ", done, " of ",
           bytes.size(), " bytes");
    }
    done += *n;
    if (*n == 0 && !wait_ready(fd_.get(), POLLIN, deadline)) {
      fail(ErrorKind::kTimeout, "receiving ", bytes.size(), " bytes: ", done,
           " arrived by the deadline");
    }
  }
}

Listener::Listener(const std::string& folder, const std::string& name)
    : path_(concat(folder, "/", name)), generation_(fork_generation()) {
  const sockaddr_un address = address_of(path_);
  prepare_folder(folder);
  try {
    const ForkPause pause;
    fd_.reset(new_unix_socket());
    register_fork_closed(fd_.get());
  } catch (...) {
    remove_folder();
    throw;
  }
  // The folder keeps others out between bind and chmod.
  if (::bind(fd_.get(), as_sockaddr(address), sizeof address) < 0) {
    const int code = errno;
    close();
    remove_folder();
    fail(ErrorKind::kInvalidArgument, "binding ", path_, ": ", errno_text(code));
  }
  if (::chmod(path_.c_str(), 0600) < 0 || ::listen(fd_.get(), 128) < 0) {
    const int code = errno;
    const std::string path = path_;
    close();
    unlink();
    fail(errno_kind(code), "listening on ", path, ": ", errno_text(code));
  }
}

void Listener::prepare_folder(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0700) == 0) {
    made_folder_ = folder;
  } else if (errno != EEXIST) {
    fail_errno("making folder ", folder);
  }
  struct stat info {};
  if (::lstat(folder.c_str(), &info) < 0) fail_errno("looking at folder ", folder);
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 077) != 0) {
    fail(ErrorKind::kInvalidArgument, "folder ", folder,
         " is not safe for a socket: it must be a folder of user ", geteuid(), " with mode 0700");
  }
}

void Listener::remove_folder() noexcept {
  if (!made_folder_.empty()) ::rmdir(made_folder_.c_str());
  made_folder_.clear();
}

void Listener::close() noexcept {
  const ForkPause pause;
  unregister_fork_closed(fd_.get());
  fd_.reset();
}

Listener::~Listener() {
  unlink();
  close();
  unregister_fork_closed(hidden_.get());
}

std::string Listener::hide() {
  hidden_.reset(::open(path_.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  if (!hidden_) fail_errno("opening ", path_);
  register_fork_closed(hidden_.get());
  unlink();
  return concat("/proc/", getpid(), "/fd/", hidden_.get());
}

void Listener::unlink() noexcept {
  // A forked child destroys its copy of this object; the path belongs to the parent.
  if (path_.empty() || fork_generation() != generation_) return;
  ::unlink(path_.c_str());
  remove_folder();
  path_.clear();
}

std::optional<Socket> Listener::try_accept() const {
  const ForkPause pause;
  UniqueFd fd(uninterrupted(
      [&] { return ::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); }));
  if (fd) return Socket(std::move(fd));
  if (would_block(errno) || errno == ECONNABORTED) return std::nullopt;
  fail_errno("accepting on ", path_);
}

Socket Listener::accept(const Deadline& deadline) const {
  for (;;) {
    if (auto socket = try_accept()) return std::move(*socket);
    if (!wait_ready(fd_.get(), POLLIN, deadline)) {
      fail(ErrorKind::kTimeout, "nobody connected to ", path_, " by the deadline");
    }
  }
}

}  // namespace convoy
