#include "share/descriptor_store.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>

#include "base/error.h"
#include "os/socket.h"

namespace convoy::share {
namespace {

void set_peek_offset(int socket, int offset) {
  if (::setsockopt(socket, SOL_SOCKET, SO_PEEK_OFF, &offset, sizeof offset) < 0) {
    fail_errno("looking into the store of descriptors of a queue");
  }
}

}  // namespace

DescriptorStore::DescriptorStore() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) < 0) {
    fail_errno("making the sockets of a queue");
  }
  writer_.reset(ends[0]);
  reader_.reset(ends[1]);
  set_peek_offset(reader_.get(), 0);  // a kernel that cannot says so here
}

DescriptorStore::DescriptorStore(UniqueFd writer, UniqueFd reader)
    : writer_(std::move(writer)), reader_(std::move(reader)) {
  for (const int end : {writer_.get(), reader_.get()}) {
    int type = 0, family = 0;
    socklen_t length = sizeof type;
    if (::getsockopt(end, SOL_SOCKET, SO_TYPE, &type, &length) < 0 || type != SOCK_SEQPACKET ||
        ::getsockopt(end, SOL_SOCKET, SO_DOMAIN, &family, &length) < 0 || family != AF_UNIX) {
      fail(ErrorKind::kInvalidArgument,
           "a descriptor from another process is not a socket of a queue");
    }
  }
}

// The kernel tells the reading end when the other one was closed everywhere: in processes, in
// children that a process has forked, and in messages that nobody has received.
bool DescriptorStore::has_writers() const {
  pollfd item{reader_.get(), 0, 0};
  return writer_ || ::poll(&item, 1, 0) < 0 || (item.revents & POLLHUP) == 0;
}

void DescriptorStore::add(const Entry& entry, int descriptor) const {
  if (send_message(writer_.get(), std::as_bytes(std::span(&entry, 1)), {&descriptor, 1}) >= 0) {
    return;
  }
  if (errno == EAGAIN || errno == ETOOMANYREFS) {
    const int code = errno;
    fail(ErrorKind::kResource, "a queue holds no more pieces of memory of processes: it has ",
         size(), " (", errno_text(code), ")");
  }
  fail_errno("passing memory to a queue");
}

// The one at this place, with a descriptor of it if that is asked for.
std::optional<DescriptorStore::Entry> DescriptorStore::look(std::size_t index,
                                                            UniqueFd* descriptor) const {
  set_peek_offset(reader_.get(), static_cast<int>(index * sizeof(Entry)));
  Entry entry;
  std::vector<UniqueFd> received;
  const ssize_t got = receive_message(reader_.get(), std::as_writable_bytes(std::span(&entry, 1)),
                                      descriptor ? &received : nullptr, MSG_PEEK);
  // 0: as EAGAIN, where nobody can put in any more.
  if (got == 0 || (got < 0 && errno == EAGAIN)) return std::nullopt;
  if (got < 0) fail_errno("looking into the store of descriptors of a queue");
  if (got != sizeof entry || entry.magic != Entry::kMagic || (descriptor && received.empty())) {
    fail(ErrorKind::kPeerLost, "the store of descriptors of a queue is damaged");
  }
  if (descriptor) *descriptor = std::move(received[0]);
  return entry;
}

std::optional<std::pair<DescriptorStore::Entry, UniqueFd>> DescriptorStore::find(
    const Segment::Key& key) const {
  for (std::size_t i = 0;; ++i) {
    const auto entry = look(i, nullptr);
    if (!entry) return std::nullopt;
    if (entry->device != key.device || entry->inode != key.inode) continue;
    UniqueFd descriptor;
    look(i, &descriptor);
    return std::pair(*entry, std::move(descriptor));
  }
}

std::size_t DescriptorStore::size() const {
  std::size_t count = 0;
  while (look(count, nullptr)) ++count;
  return count;
}

// Each goes to the end and is then removed from the front, in this order: who ends in between
// leaves one twice.
std::size_t DescriptorStore::prune(const std::function<bool(const Entry&)>& keep) const {
  std::size_t dropped = 0;
  bool any = false;
  for (std::size_t i = 0; const auto entry = look(i, nullptr); ++i) any = any || !keep(*entry);
  if (!any) return 0;
  for (std::size_t left = size(); left > 0; --left) {
    UniqueFd descriptor;
    const auto entry = look(0, &descriptor);
    if (!entry) break;
    if (keep(*entry)) {
      add(*entry, descriptor.get());
    } else {
      ++dropped;
    }
    Entry gone;
    if (::recv(reader_.get(), &gone, sizeof gone, MSG_DONTWAIT) < 0) {
      fail_errno("removing memory from a queue");
    }
  }
  return dropped;
}

}  // namespace convoy::share
