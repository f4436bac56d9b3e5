#include "share/link.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "os/machine.h"
#include "os/process.h"
#include "os/wait.h"
#include "share/depot.h"

namespace convoy::share {
namespace {

constexpr int kMostSpins = 4000;  // of a few tens of nanoseconds
constexpr int kLeastSpins = 64;
// How old the knowledge may be that the peer lives when a message is sent.
constexpr auto kLookInterval = std::chrono::milliseconds(1);
constexpr int kExitGraceMs = 200;
constexpr std::uint32_t kMostRegions = 1 << 16;
constexpr std::uint32_t kMostNumbers = 1U << 31;  // WireBlock::kLocal
constexpr std::size_t kMostPassed = 256;          // descriptors that no message has asked for yet
constexpr const char* kGone = "closed the channel or ended";

// Spinning keeps the awaited process off the only core.
int spins_here() {
  static const int spins = usable_cores() > 1 ? kMostSpins : 0;
  return spins;
}

}  // namespace

Link::Link(Socket socket)
    : socket_(std::move(socket)), last_pump_(Deadline::Clock::now()), spin_(spins_here()) {}

Link::~Link() { close(); }

void Link::close() noexcept {
  if (closed_.exchange(true)) return;
  Socket& socket = socket_.socket();
  if (socket && !lost()) {
    const std::scoped_lock lock(socket_mutex_);
    try {
      socket_.try_send({.type = LinkFrame::kBye});
    } catch (const Error&) {
      // The end of the stream says as much.
    }
  }
  {
    const std::scoped_lock lock(pump_mutex_);
    // The peer hears of it, and of its own end we still hear: what it has not received is kept for
    // it as long as it is there. A thread of ours that sleeps on the socket hears of no less.
    if (polling_) {
      socket.shutdown();
    } else if (socket) {
      ::shutdown(socket.fd(), SHUT_WR);
    }
  }
  pumped_.notify_all();
}

bool Link::look() {
  // What came to an end that was not used yet is for who gets it by release().
  if (!greeted_.load(std::memory_order_acquire)) return !lost();
  const std::scoped_lock lock(pump_mutex_);
  pump_if_idle();
  return !lost();
}

UniqueFd Link::release() {
  if (greeted_.load() || closed()) {
    fail(ErrorKind::kInvalidArgument,
         "a channel can be passed on only before it was used, and only once");
  }
  closed_.store(true);
  return socket_.socket().release();
}

std::string Link::peer() const {
  const std::scoped_lock lock(pump_mutex_);
  if (peer_ == 0) return "the peer";
  return peer_ == own_process_word() ? "the other end, in this process,"
                                     : concat("pid ", pid_of(peer_));
}

void Link::check_open(const char* operation) const {
  if (closed()) fail(ErrorKind::kInvalidArgument, operation, ": the channel is closed");
}

void Link::fail_lost(const char* operation) {
  const std::string who = peer();
  check_open(operation);
  const std::scoped_lock lock(pump_mutex_);
  fail(lost_kind_, operation, ": ", who, " ", why_lost_);
}

void Link::greet(const Deadline& deadline) {
  if (greeted_.load(std::memory_order_acquire)) return;
  const std::scoped_lock lock(greet_mutex_);
  if (greeted_.load()) return;
  out_ = Ring::create();
  const std::uint64_t domain = own_domain();
  send_frame({.type = LinkFrame::kHello,
              .process = own_process_word(),
              .bytes = out_.bytes(),
              .index = static_cast<std::uint32_t>(domain >> 32),
              .kind = static_cast<std::uint32_t>(domain)},
             out_.fd(), deadline);
  greeted_.store(true, std::memory_order_release);
}

void Link::send_frame(const LinkFrame& frame, int descriptor, const Deadline& deadline) {
  const auto fds = descriptor < 0 ? std::span<const int>() : std::span(&descriptor, 1);
  for (;;) {
    try {
      const std::scoped_lock lock(socket_mutex_);
      return socket_.send(frame, Deadline::after(std::chrono::seconds(0)), fds);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kPeerLost) break;
      const bool full = error.kind() == ErrorKind::kTimeout;
      // Also when more descriptors are under way than this process may have open.
      if (!full && error.kind() != ErrorKind::kResource) throw;
      if (deadline.expired()) {
        if (!full) throw;
        fail(ErrorKind::kTimeout,
             "the peer takes no descriptors: its socket was full until the deadline");
      }
    }
    // The peer may wait for us to take what it has sent.
    {
      const std::scoped_lock lock(pump_mutex_);
      pump_if_idle();
    }
    if (lost()) return;  // the caller finds out
    pollfd item{socket_.socket().fd(), POLLOUT, 0};
    ::poll(&item, 1, 1);
  }
  const std::scoped_lock lock(pump_mutex_);
  lose(kGone);
}

void Link::wake_peer(SleepFlag& sleeps) {
  if (!sleeps.take()) return;
  {
    const std::scoped_lock lock(socket_mutex_);
    // A full socket wakes it as well.
    if (socket_.try_send({.type = LinkFrame::kWake})) return;
  }
  const std::scoped_lock lock(pump_mutex_);
  lose(kGone);
}

void Link::lose(const std::string& why, ErrorKind kind) {
  if (lost()) return;
  why_lost_ = why;
  lost_kind_ = kind;
  lost_.store(true, std::memory_order_release);
}

void Link::take(const LinkFrame& frame) {
  if (frame.type == LinkFrame::kWake || frame.type == LinkFrame::kBye) {
    bye_ = bye_ || frame.type == LinkFrame::kBye;
    socket_.take_descriptors(0, 0);
  } else if (frame.type == LinkFrame::kHello) {
    if (has_ring_) fail(ErrorKind::kInvalidArgument, "a second greeting");
    require_own_domain(std::uint64_t{frame.index} << 32 | frame.kind, "this channel");
    in_ = Ring::adopt(socket_.take_descriptor(), frame.bytes);
    peer_ = frame.process;
    if (peer_ != own_process_word()) {
      // Opened before the look at its start time: so it is that process's, or is not kept. Then the
      // socket will tell.
      pidfd_ = open_pidfd(pid_of(peer_));
      if (word_liveness(peer_, own_domain()) != Liveness::kAlive) pidfd_.reset();
    }
    has_ring_ = true;
  } else if (frame.type == LinkFrame::kRegion) {
    if (frame.index != got_.next_region || got_.regions.size() >= kMostRegions) {
      fail(ErrorKind::kInvalidArgument, "memory ", frame.index, " after ", got_.next_region);
    }
    const auto kind = static_cast<Region::Kind>(frame.kind);
    if (kind == Region::Kind::kPool || kind == Region::Kind::kPlain ||
        kind == Region::Kind::kOutside) {
      // What its owner has given up is unmapped here too.
      std::erase_if(got_.regions, [](const auto& known) {
        return known.second->book() && known.second->book().head().retired.load() != 0;
      });
      auto region = Depot::instance().adopt(socket_.take_descriptor(), frame.bytes, kind);
      got_.regions.emplace(got_.next_region++, std::move(region));
    } else {
      fail(ErrorKind::kInvalidArgument, "memory of unknown kind ", frame.kind);
    }
  } else if (frame.type == LinkFrame::kDescriptor) {
    if (frame.index != got_.next_descriptor || got_.descriptors.size() >= kMostPassed) {
      fail(ErrorKind::kInvalidArgument, "descriptor ", frame.index, " after ",
           got_.next_descriptor);
    }
    got_.descriptors.emplace(got_.next_descriptor, socket_.take_descriptor());
    ++got_.next_descriptor;
  } else {
    fail(ErrorKind::kInvalidArgument, "unknown message ", frame.type);
  }
}

void Link::pump() {
  last_pump_ = Deadline::Clock::now();
  if (drained_) return;
  // Also of a peer that is known to be gone: what it sent counts.
  try {
    while (const auto frame = socket_.try_receive()) take(*frame);
    drained_ = socket_.ended();
  } catch (const Error& error) {
    drained_ = true;
    const bool other_namespace = error.kind() == ErrorKind::kUnsupported;
    return lose(
        concat(other_namespace ? "cannot be reached: " : "sent something unusable: ", error.what()),
        other_namespace ? ErrorKind::kUnsupported : ErrorKind::kPeerLost);
  }
  if (!lost()) find_out_how_it_ended();
}

void Link::find_out_how_it_ended() {
  if (drained_ && bye_) return lose(kGone);
  if (pidfd_) {
    // A dying process closes its socket a moment before its pidfd tells.
    pollfd item{pidfd_.get(), POLLIN, 0};
    if (drained_) ::poll(&item, 1, kExitGraceMs);
    if (liveness_by(pidfd_.get()) == Liveness::kDead) {
      const auto status = exit_status_of(pid_of(peer_), pidfd_.get());
      return lose(status ? concat("ended with ", status->to_string()) : "ended");
    }
  }
  if (drained_) lose(kGone);
}

void Link::pump_if_idle() {
  if (!polling_) pump();
}

void Link::pump_now_and_then() {
  const std::scoped_lock lock(pump_mutex_);
  if (Deadline::Clock::now() - last_pump_ >= kLookInterval && !polling_) pump();
}

// Until ready() or the deadline. One thread waits on the socket, others for it to come back.
template <class Ready>
bool Link::sleep(const Deadline& deadline, Ready ready) {
  std::unique_lock lock(pump_mutex_);
  for (;;) {
    if (ready()) return true;
    if (deadline.expired()) return false;
    if (polling_) {
      if (deadline.is_never()) {
        pumped_.wait(lock);
      } else {
        pumped_.wait_until(lock, deadline.when());
      }
      continue;
    }
    polling_ = true;
    std::array<pollfd, 2> items{pollfd{descriptor(), POLLIN, 0}, pollfd{pidfd_.get(), POLLIN, 0}};
    const nfds_t count = pidfd_ ? 2 : 1;
    lock.unlock();
    ::poll(items.data(), count, deadline.poll_timeout_ms());
    lock.lock();
    polling_ = false;
    pump();
    pumped_.notify_all();
  }
}

template <class Ready>
bool Link::wait(SleepFlag& sleeps, const Deadline& deadline, Ready ready) {
  const int guess = spin_.spins();
  const int spins = guess != 0 ? guess : std::min(kLeastSpins, spins_here());
  for (int i = 0; i < spins; ++i) {
    if (ready()) {
      if (guess != 0) spin_.paid();
      return true;
    }
    cpu_relax();
  }
  if (guess != 0) spin_.in_vain();
  const bool came = sleep(deadline, [&] {
    if (lost() || closed()) return true;
    sleeps.raise();
    return ready();
  });
  sleeps.lower();
  return came;
}

std::uint32_t Link::introduce(const std::shared_ptr<Region>& region, const Deadline& deadline) {
  const auto found = given_.regions.find(region->serial());
  if (found != given_.regions.end()) return found->second;
  check_open("send");
  greet(deadline);
  const std::uint32_t index = given_.next_region;
  if (given_.regions.size() >= kMostRegions || index >= kMostNumbers) {
    fail(ErrorKind::kResource, "send: a channel carries at most ", kMostRegions,
         " pieces of memory; make another channel");
  }
  const LinkFrame frame{.type = LinkFrame::kRegion,
                        .bytes = region->bytes(),
                        .index = index,
                        .kind = static_cast<std::uint32_t>(region->kind())};
  send_frame(frame, region->fd(), deadline);
  ++given_.next_region;
  // One tensor each: there can be any number of them, and the peer keeps none.
  if (region->kind() != Region::Kind::kOutside) given_.regions.emplace(region->serial(), index);
  return index;
}

std::uint32_t Link::pass(int descriptor, const Deadline& deadline) {
  check_open("send");
  greet(deadline);
  send_frame({.type = LinkFrame::kDescriptor, .index = given_.next_descriptor}, descriptor,
             deadline);
  return given_.next_descriptor++;
}

std::uint64_t Link::send(std::span<const std::byte> message, const Deadline& deadline) {
  check_open("send");
  greet(deadline);
  pump_now_and_then();
  if (lost()) fail_lost("send");
  if (!out_.try_write(message)) {
    const auto room = [&] { return out_.has_room(message.size()); };
    if (!wait(out_.writer_sleeps(), deadline, room)) {
      fail(ErrorKind::kTimeout, "send: ", peer(), " has not received what was sent before; ",
           sent_ - done(), " messages wait");
    }
    if (lost() || closed()) fail_lost("send");
    CONVOY_CHECK(out_.try_write(message));
  }
  wake_peer(out_.reader_sleeps());
  return ++sent_;
}

bool Link::has_message() {
  if (has_ring_ && in_.has_message()) return true;
  check_open("receive");
  greet(Deadline::after(std::chrono::seconds(1)));
  {
    const std::scoped_lock lock(pump_mutex_);
    pump_if_idle();
    if (has_ring_ && in_.has_message()) return true;
  }
  if (lost()) fail_lost("receive");
  return false;
}

std::vector<std::byte> Link::receive(const Deadline& deadline) {
  if (!has_ring_) {
    check_open("receive");
    greet(deadline);
    {
      // The peer may have ended before this side was used: what it sent counts.
      const std::scoped_lock lock(pump_mutex_);
      pump_if_idle();
    }
    if (!sleep(deadline, [&] { return has_ring_ || lost() || closed(); })) {
      fail(ErrorKind::kTimeout, "receive: the peer has not used its end of the channel yet");
    }
    if (!has_ring_) fail_lost("receive");
  }
  const auto there = [&] { return in_.has_message(); };
  if (!there()) {
    if (!wait(in_.reader_sleeps(), deadline, there)) {
      fail(ErrorKind::kTimeout, "receive: ", peer(), " sent nothing by the deadline");
    }
    // What a dead peer sent counts.
    if (!there()) fail_lost("receive");
  }
  auto message = in_.read();
  wake_peer(in_.writer_sleeps());
  return message;
}

// Descriptors are sent before the message that needs them. Whoever waits on the socket gets them.
template <class Known>
void Link::pump_until(std::unique_lock<std::mutex>& lock, Known known) {
  while (!known() && polling_) {
    if (pumped_.wait_for(lock, std::chrono::seconds(10)) == std::cv_status::timeout) break;
  }
  if (!known()) pump();
}

UniqueFd Link::passed(std::uint32_t index) {
  std::unique_lock lock(pump_mutex_);
  pump_until(lock, [&] { return index < got_.next_descriptor; });
  const auto found = got_.descriptors.find(index);
  if (found == got_.descriptors.end()) {
    fail(ErrorKind::kInvalidArgument, "receive: a message refers to descriptor ", index,
         " that was not passed before", lost() ? concat("; the peer ", why_lost_) : "");
  }
  UniqueFd descriptor = std::move(found->second);
  got_.descriptors.erase(found);
  return descriptor;
}

std::shared_ptr<Region> Link::region(std::uint32_t index) {
  std::unique_lock lock(pump_mutex_);
  pump_until(lock, [&] { return index < got_.next_region; });
  const auto found = got_.regions.find(index);
  if (found == got_.regions.end()) {
    fail(ErrorKind::kInvalidArgument, "receive: a message refers to memory ", index,
         " that was not passed before", lost() ? concat("; the peer ", why_lost_) : "");
  }
  auto region = found->second;
  if (region->kind() == Region::Kind::kOutside) got_.regions.erase(found);
  return region;
}

void Link::finish() { in_.finish(); }

}  // namespace convoy::share
