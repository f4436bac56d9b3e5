#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "convoy/deadline.h"

namespace convoy {

// Who is at the other end of a Unix socket, as the kernel recorded it.
struct PeerCredentials {
  pid_t pid;
  uid_t uid;
  gid_t gid;
};

// A connected Unix stream socket: non-blocking, close-on-exec, dropped in forked children. Movable.
// One thread may send while another receives; otherwise not thread-safe.
class Socket {
 public:
  Socket() = default;
  // Takes over a connected Unix stream socket; sets its flags. Throws kInvalidArgument for any
  // other kind of descriptor.
  explicit Socket(UniqueFd fd);
  Socket(Socket&& other) noexcept = default;
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  static std::pair<Socket, Socket> pair();
  // Waits for a listener to accept; throws kPeerLost at once when nobody listens there.
  static Socket connect(const std::string& path, const Deadline& deadline);

  int fd() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  void close();
  // Ends both directions; a thread blocked in send or receive wakes with kPeerLost.
  void shutdown() noexcept;
  // Gives the descriptor away, for example to a child process.
  UniqueFd release();

  PeerCredentials peer() const;
  // Throws kInvalidArgument naming both users unless the peer runs as our user (or as root).
  void require_same_user() const;

  // The whole of `bytes`, and with its first byte the descriptors (253 at most).
  void send(std::span<const std::byte> bytes, const Deadline& deadline,
            std::span<const int> descriptors = {});
  // Exactly `bytes.size()` bytes. Descriptors that came with them are appended to `descriptors`;
  // without it a message that carries any is an error. Throws kPeerLost at the end of the stream.
  void receive(std::span<std::byte> bytes, const Deadline& deadline,
               std::vector<UniqueFd>* descriptors = nullptr);

  // Non-blocking: bytes moved, 0 if the call would block, nullopt at the end of the stream or when
  // the peer is gone.
  std::optional<std::size_t> try_send(std::span<const std::byte> bytes);
  std::optional<std::size_t> try_receive(std::span<std::byte> bytes,
                                         std::vector<UniqueFd>* descriptors = nullptr);

 private:
  UniqueFd fd_;
};

// Listens on a path inside a folder that only this user may enter. The path is removed by unlink()
// or the destructor, whichever is first.
class Listener {
 public:
  // Makes `folder` (0700) if it is missing; an existing one must be ours and closed to others.
  // `name` becomes a socket with mode 0600. Throws kInvalidArgument where a path is unsafe or too
  // long for a Unix socket (107 bytes).
  Listener(const std::string& folder, const std::string& name);
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  ~Listener();

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }
  Socket accept(const Deadline& deadline) const;
  // nullopt if nobody waits.
  std::optional<Socket> try_accept() const;
  // Removes the path and returns another that this user's processes can connect to as long as the
  // listener lives: a link in /proc to the unlinked socket. Nothing is left behind even if this
  // process is killed.
  std::string hide();
  // Removes the path (and the folder, if this object made it); connected sockets stay.
  void unlink() noexcept;

 private:
  void prepare_folder(const std::string& folder);
  void remove_folder() noexcept;
  void close() noexcept;

  UniqueFd fd_;
  UniqueFd hidden_;  // O_PATH: holds the inode of the unlinked socket
  std::string path_;
  std::string made_folder_;  // empty: the folder was there before
  unsigned generation_;      // fork_generation() of the process that made it
};

// One sendmsg or recvmsg on a Unix socket of any type, with up to 253 descriptors. Does not wait,
// and is not interrupted by signals. -1: see errno.
ssize_t send_message(int socket, std::span<const std::byte> bytes,
                     std::span<const int> descriptors);
// Descriptors are appended; without `descriptors` they are not asked for. kResource if some are
// lost.
ssize_t receive_message(int socket, std::span<std::byte> bytes, std::vector<UniqueFd>* descriptors,
                        int flags = 0);

// Waits until `fd` has one of `events` (POLLIN, POLLOUT). False at the deadline.
bool wait_ready(int fd, short events, const Deadline& deadline);

}  // namespace convoy
