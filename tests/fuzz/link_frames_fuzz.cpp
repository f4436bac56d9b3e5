// What a peer sends over the socket of a link, with descriptors of all kinds: the link takes it, or
// counts the peer as lost. It never hangs, throws anything but an Error, or keeps a descriptor.
//
// The input is a list of steps: a byte says what descriptor goes along, then come the 32 bytes of a
// frame. What is left at the end goes as it is.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "convoy/error.h"
#include "share/link.h"

namespace {

using convoy::share::Link;
using convoy::share::LinkFrame;
using convoy::share::Region;
using convoy::share::Ring;

void require(bool condition) {
  if (!condition) std::abort();
}

// What a peer may pass: nothing, a ring, memory, another file, a socket, two at once.
class Descriptors {
 public:
  Descriptors() : ring_(Ring::create()), pool_(Region::create_pool(std::size_t{1} << 20)) {
    file_ = ::memfd_create("any", MFD_CLOEXEC);
    require(file_ >= 0 && ::ftruncate(file_, 8192) == 0);
  }
  std::size_t pick(std::uint8_t choice, std::array<int, 2>& fds) const {
    switch (choice % 7) {
      case 0: return 0;
      case 1: fds = {ring_.fd(), -1}; return 1;
      case 2: fds = {pool_->fd(), -1}; return 1;
      case 3: fds = {file_, -1}; return 1;
      case 4: fds = {ring_.fd(), pool_->fd()}; return 2;
      case 5: fds = {0, -1}; return 1;
      default: fds = {file_, file_}; return 2;
    }
  }

 private:
  Ring ring_;
  std::shared_ptr<Region> pool_;
  int file_ = -1;
};

bool send_step(int socket, const void* data, std::size_t bytes, std::span<const int> fds) {
  iovec body{const_cast<void*>(data), bytes};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(2 * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &body;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  return ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

template <class Function>
void or_an_error(Function function) {
  try {
    function();
  } catch (const convoy::Error& error) {
    require(error.kind() != convoy::ErrorKind::kInternal);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Descriptors descriptors;
  static const int next = [] {
    const int fd = ::dup(0);
    ::close(fd);
    return fd;
  }();
  {
    std::array<int, 2> ends{};
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0);
    const convoy::UniqueFd peer(ends[1]);
    Link link{convoy::Socket(convoy::UniqueFd(ends[0]))};
    std::size_t at = 0;
    for (int step = 0; step < 64 && at + 1 + sizeof(LinkFrame) <= size; ++step) {
      std::array<int, 2> fds{-1, -1};
      const std::size_t count = descriptors.pick(data[at], fds);
      LinkFrame frame;
      std::memcpy(&frame, data + at + 1, sizeof frame);
      if (frame.type == LinkFrame::kHello && frame.index == 0) {
        // That of this process: another one is refused, and hard to guess.
        const std::uint64_t domain = convoy::share::own_domain();
        frame.index = static_cast<std::uint32_t>(domain >> 32);
        frame.kind = static_cast<std::uint32_t>(domain);
      }
      if (!send_step(peer.get(), &frame, sizeof frame, std::span(fds).first(count))) {
        break;
      }
      at += 1 + sizeof(LinkFrame);
      if (step % 3 == 0) or_an_error([&] { (void)link.has_message(); });
    }
    if (at < size && size - at < 4096) send_step(peer.get(), data + at, size - at, {});
    or_an_error([&] { (void)link.has_message(); });
    for (std::uint32_t i = 0; i < 3; ++i) {
      or_an_error([&] { (void)link.region(i); });
      or_an_error([&] { (void)link.passed(i); });
    }
    or_an_error([&] {
      (void)link.receive(convoy::Deadline::after(std::chrono::seconds(0)));
      link.finish();
    });
  }
  // Whatever came, nothing of it is left open.
  const int fd = ::dup(0);
  ::close(fd);
  require(fd <= next + 8);
  return 0;
}
