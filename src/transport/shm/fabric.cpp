#include "transport/shm/fabric.h"

#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <set>

#include "base/error.h"
#include "base/log_limit.h"
#include "os/file.h"
#include "os/fork_guard.h"
#include "os/machine.h"
#include "transport/shm/fence.h"
#include "transport/shm/short_slices.h"

namespace convoy::shm {
namespace {

// Left to the rest of the machine when the arena grows.
constexpr std::uint64_t kMemoryReserve = std::uint64_t{256} << 20;
// For a stranger that connects and says nothing.
constexpr auto kHelloTimeout = std::chrono::seconds(10);
// Of a dial.
constexpr std::size_t kMostText = 4096;
// Before somebody is accepted again, where that has failed.
constexpr auto kAcceptPause = std::chrono::milliseconds(20);
// How long a connection is kept for whoever is going to ask for it; and how often the ones are
// looked for that were given up by the other side.
constexpr auto kClaimTimeout = std::chrono::minutes(5);
constexpr auto kClaimRound = std::chrono::milliseconds(200);
constexpr std::size_t kMostUnclaimed = 1024;
// Between looks at what else may have happened to whoever is waited for.
constexpr auto kConnectSlice = std::chrono::milliseconds(25);

std::uint64_t machine_headroom() {
  const std::uint64_t left = memory_state().headroom();
  return left - std::min(left, kMemoryReserve);
}

[[noreturn]] void fail_gone(const ProcessInfo& info) {
  fail(ErrorKind::kPeerLost, "pid ", info.pid, " ended while its group was being made");
}

// The other side has closed it.
bool is_over(const Socket& socket) {
  pollfd item{socket.fd(), POLLRDHUP, 0};
  return ::poll(&item, 1, 0) > 0;
}

bool overlaps(const Location& a, std::size_t a_bytes, const Location& b, std::size_t b_bytes) {
  return a.segment == b.segment && a.offset < b.offset + b_bytes && b.offset < a.offset + a_bytes;
}

}  // namespace

struct Fabric::Impl {
  // Connections by process. A connector makes its entry before it connects, so that a second caller
  // waits for the first one's connection.
  struct Arrived {
    Socket socket;
    Deadline kept = Deadline::never();
  };
  struct Connections {
    std::map<Id, std::shared_ptr<Peer>> peers;
    std::set<Id> connecting;
    std::map<Id, Arrived> arrived;                // accepted, greeted, not yet asked for
    std::vector<std::shared_ptr<Peer>> replaced;  // lost while they lived; there is another of each
    std::vector<std::shared_ptr<Peer>> dialed;    // by either side
  };
  struct Quarantine {
    Location location;
    std::function<bool()> released;
    Location reads;
  };
  struct Memory {
    std::optional<Arena> arena;
    std::vector<Quarantine> quarantine;
    std::map<std::pair<SegmentId, std::uint64_t>, std::size_t> sizes;  // of blocks in use
    std::vector<Location> limbo;  // freed by their owners, still in quarantine
  };

  std::optional<Listener> listener;
  Segment marker;  // see marker_label()
  // Locks are taken in this order: memory, then connections or headroom.
  Guarded<Memory> memory;
  Guarded<std::function<std::uint64_t()>> headroom{machine_headroom};
  Guarded<Connections> connections;
  struct Greeting {
    FrameSocket<Frame> frames;
    Loop::TimerId timer = 0;
    std::optional<Frame> frame = {};
    std::string text = {};  // of a dial, which follows
    std::size_t got = 0;
  };
  std::map<Loop::WatchId, Greeting> greetings;  // of the watch thread
  Loop::WatchId listener_watch = 0;             // of the watch thread
  bool sweeping = false;                        // likewise: sweep_arrived_on_loop() comes again
  LogLimit foreign;                             // of lines that strangers cause
  std::map<Id, Dialed> doors;                   // of the watch thread
  LoopThread watch{"convoy-watch"};

  // A copy: sending may wait, and the lock is one that the watch thread takes. (And a lock that is
  // a temporary in the head of a loop is gone before the loop begins.)
  std::vector<std::shared_ptr<Peer>> all_peers() {
    std::vector<std::shared_ptr<Peer>> found;
    auto state = connections.lock();
    for (const auto& [process, peer] : state->peers) found.push_back(peer);
    return found;
  }
  void listen_on_loop();
  void accept_on_loop();
  void greet_on_loop(Loop::WatchId id);
  void end_greeting_on_loop(Loop::WatchId id);
  void sweep_arrived_on_loop();
  void let_in_on_loop(Greeting greeting);
  Socket open_connection(const ProcessInfo& self, const ProcessInfo& other,
                         const Deadline& deadline, const std::function<void()>& check);
  void release_limbo(Memory& memory);
  void reap_on_loop();
  void drop_on_loop(const std::vector<std::shared_ptr<Peer>>& peers);
};

namespace {

std::atomic<Fabric*> made{nullptr};

}  // namespace

Fabric* Fabric::existing() noexcept {
  Fabric* const fabric = made.load(std::memory_order_acquire);
  return fabric && fabric->generation_ == fork_generation() ? fabric : nullptr;
}

Fabric& Fabric::instance() {
  // Leaked on purpose: peers may need this process's answers until it exits.
  static Fabric* const fabric = [] {
    auto* const first = new Fabric();
    made.store(first, std::memory_order_release);
    return first;
  }();
  if (fork_generation() != fabric->generation_) {
    fail(ErrorKind::kUnsupported,
         "shared memory cannot be used in a forked child of a rank: threads and connections do not "
         "survive fork; execute the program again (convoy::spawn, or fork before the first group)");
  }
  return *fabric;
}

Fabric::Fabric() : generation_(fork_generation()), impl_(std::make_unique<Impl>()) {
  {
    const TempFolder folder("convoy", TempFolder::Killed::kSwept);
    impl_->listener.emplace(folder.path(), "s");
    self_.socket = impl_->listener->hide();
  }
  self_.id = Id::random();
  impl_->marker = Segment::create(1, marker_label(self_.id));
  impl_->marker.close_descriptor();
  self_.pid = getpid();
  self_.start_time = own_start_time();
  self_.domain = process_domain();
  if (self_.domain == 0) {
    fail(ErrorKind::kUnsupported,
         "/proc/self/ns cannot be read, by which processes know that they "
         "can watch each other: ",
         errno_text(errno), "; is /proc mounted?");
  }
  self_.boot = boot_id();
  self_.host = host_name();
  self_.cores = CoreSet::of_thread();
  impl_->memory.lock()->arena.emplace(Arena::Hooks{
      // All run under the memory lock, from Arena's methods.
      .next_id = [next = SegmentId{1}]() mutable { return next++; },
      .added =
          [impl = impl_.get()](SegmentId id, const Segment& segment) {
            for (const auto& peer : impl->all_peers()) peer->send_segment(id, segment);
          },
      .removed =
          [impl = impl_.get()](SegmentId id) {
            for (const auto& peer : impl->all_peers()) peer->send_drop(id);
          },
      .headroom = [impl = impl_.get()] { return (*impl->headroom.lock())(); }});
  impl_->watch.call([this] {
    ask_for_short_slices();
    impl_->listen_on_loop();
  });
}

void Fabric::Impl::accept_on_loop() {
  CONVOY_DCHECK(watch.loop().in_loop());
  try {
    while (auto socket = listener->try_accept()) {
      socket->require_same_user();
      const int fd = socket->fd();
      auto id = std::make_shared<Loop::WatchId>();
      *id = watch.loop().watch(fd, EPOLLIN, [this, id](std::uint32_t) { greet_on_loop(*id); });
      const auto timer = watch.loop().call_at(Deadline::Clock::now() + kHelloTimeout,
                                              [this, id] { end_greeting_on_loop(*id); });
      greetings.emplace(*id, Greeting{FrameSocket<Frame>(std::move(*socket)), timer});
    }
  } catch (const Error& error) {
    foreign.warn("refused a connection: ", error.what());
    // If descriptors have run out, who waits to be accepted would keep this thread busy.
    watch.loop().unwatch(listener_watch);
    watch.loop().call_at(Deadline::Clock::now() + kAcceptPause, [this] { listen_on_loop(); });
  }
}

void Fabric::Impl::listen_on_loop() {
  CONVOY_DCHECK(watch.loop().in_loop());
  try {
    listener_watch =
        watch.loop().watch(listener->fd(), EPOLLIN, [this](std::uint32_t) { accept_on_loop(); });
  } catch (const Error& error) {
    foreign.warn("listening for processes: ", error.what(), "; trying again");
    watch.loop().call_at(Deadline::Clock::now() + kAcceptPause, [this] { listen_on_loop(); });
  }
}

void Fabric::Impl::end_greeting_on_loop(Loop::WatchId id) {
  CONVOY_DCHECK(watch.loop().in_loop());
  watch.loop().unwatch(id);
  watch.loop().cancel(greetings.at(id).timer);
  greetings.erase(id);
}

void Fabric::Impl::greet_on_loop(Loop::WatchId id) {
  CONVOY_DCHECK(watch.loop().in_loop());
  Greeting& greeting = greetings.at(id);
  try {
    Socket& socket = greeting.frames.socket();
    if (!greeting.frame) {
      greeting.frame = greeting.frames.try_receive();
      if (greeting.frames.ended()) return end_greeting_on_loop(id);
      if (!greeting.frame) return;
      greeting.frames.take_descriptors(0, 0);
    }
    const Frame& frame = *greeting.frame;
    if (frame.type == Frame::kHello) {
      auto state = connections.lock();
      if (state->arrived.size() >= kMostUnclaimed) {
        fail(ErrorKind::kResource, kMostUnclaimed,
             " unclaimed connections are already waiting, which is the limit");
      }
      state->arrived[frame.process] = {std::move(socket), Deadline::after(kClaimTimeout)};
      state.unlock();
      connections.notify();
      if (!sweeping) sweep_arrived_on_loop();
    } else if (frame.type == Frame::kDial && frame.bytes != 0 && frame.bytes <= kMostText) {
      greeting.text.resize(frame.bytes);
      const auto got = socket.try_receive(
          std::as_writable_bytes(std::span(greeting.text)).subspan(greeting.got));
      if (!got) return end_greeting_on_loop(id);
      greeting.got += *got;
      if (greeting.got < frame.bytes) return;
      Greeting whole = std::move(greeting);
      end_greeting_on_loop(id);
      return let_in_on_loop(std::move(whole));
    } else {
      foreign.warn("closed a connection that did not greet");
    }
  } catch (const Error& error) {
    foreign.warn("closed a connection: ", error.what());
  }
  end_greeting_on_loop(id);
}

// Who greets need not be wanted: what the other side has closed, or nobody asks for, is closed.
void Fabric::Impl::sweep_arrived_on_loop() {
  CONVOY_DCHECK(watch.loop().in_loop());
  auto state = connections.lock();
  std::erase_if(state->arrived, [](const auto& entry) {
    return is_over(entry.second.socket) || entry.second.kept.expired();
  });
  sweeping = !state->arrived.empty();
  if (!sweeping) return;
  watch.loop().call_at(Deadline::Clock::now() + kClaimRound, [this] { sweep_arrived_on_loop(); });
}

// The text begins with a line about the process.
void Fabric::Impl::let_in_on_loop(Greeting greeting) try {
  CONVOY_DCHECK(watch.loop().in_loop());
  Socket& socket = greeting.frames.socket();
  const std::string& text = greeting.text;
  const auto door = doors.find(greeting.frame->process);
  if (door == doors.end()) {
    greeting.frames.try_send({.type = Frame::kBye});
    return;
  }
  const std::size_t line = std::min(text.find('\n'), text.size());
  const auto info = ProcessInfo::decode(text.substr(0, line));
  if (socket.peer().pid != info.pid) {
    fail(ErrorKind::kInvalidArgument, "pid ", socket.peer().pid, " says that it is pid ", info.pid);
  }
  UniqueFd pidfd = open_pidfd(info.pid);
  if (!pidfd || liveness_of(info.pid, info.start_time) == Liveness::kDead) fail_gone(info);
  const auto peer = std::make_shared<Peer>(info, std::move(socket), std::move(pidfd));
  peer->on_note(door->second(peer, text.substr(std::min(line + 1, text.size()))));
  connections.lock()->dialed.push_back(peer);
  peer->start_on_loop(watch.loop());
  reap_on_loop();
} catch (const Error& error) {
  foreign.warn("turned away a process: ", error.what());
}

// The process with the smaller id connects, the other waits to be connected to.
Socket Fabric::Impl::open_connection(const ProcessInfo& self, const ProcessInfo& other,
                                     const Deadline& deadline, const std::function<void()>& check) {
  if (self.id < other.id) {
    FrameSocket<Frame> frames(Socket::connect(other.socket, deadline));
    frames.socket().require_same_user();
    frames.send({.type = Frame::kHello, .process = self.id}, deadline);
    return std::move(frames.socket());
  }
  auto state = connections.lock();
  // In slices: a process that dies before it connects gives no event here.
  for (;;) {
    const auto slice = Deadline::after(kConnectSlice);
    if (state.wait(std::min(slice, deadline), [&] { return state->arrived.contains(other.id); })) {
      Socket socket = std::move(state->arrived.extract(other.id).mapped().socket);
      // One that it has given up already is of an earlier try.
      if (!is_over(socket)) return socket;
      continue;
    }
    state.unlock();
    check();
    if (liveness_of(other.pid, other.start_time) == Liveness::kDead) fail_gone(other);
    state.relock();
    if (deadline.expired()) {
      fail(ErrorKind::kTimeout, "pid ", other.pid, " did not connect by the deadline");
    }
  }
}

// On the loop, where no handler of a peer can be running: forgets the dead that nobody uses.
void Fabric::Impl::reap_on_loop() {
  CONVOY_DCHECK(watch.loop().in_loop());
  std::vector<std::shared_ptr<Peer>> dead;
  auto state = connections.lock();
  for (auto i = state->peers.begin(); i != state->peers.end();) {
    if (i->second->lost() && i->second.use_count() == 1) {
      dead.push_back(std::move(i->second));
      i = state->peers.erase(i);
    } else {
      ++i;
    }
  }
  const auto take = [&](std::vector<std::shared_ptr<Peer>>& from) {
    const auto first = std::partition(from.begin(), from.end(), [](const auto& peer) {
      return peer.use_count() != 1 || !peer->lost();
    });
    dead.insert(dead.end(), std::make_move_iterator(first), std::make_move_iterator(from.end()));
    from.erase(first, from.end());
  };
  take(state->replaced);
  take(state->dialed);
  state.unlock();  // before the peers unmap their segments
}

void Fabric::require_reachable(const ProcessInfo& info) const {
  if (info.boot != self_.boot) {
    fail(ErrorKind::kUnsupported, "pid ", info.pid, " runs on host ", info.host,
         " and this process on ", self_.host, ": shared memory works within one host");
  }
  if (info.domain != self_.domain) {
    fail(ErrorKind::kUnsupported, "pid ", info.pid, " runs in another pid namespace (",
         info.domain >> 32, ") than this process, pid ", self_.pid, " (", self_.domain >> 32,
         "), or in another time namespace: neither could tell whether the other runs; start both "
         "in one (docker run --pid=container:<name>), or use the backend mpi between them");
  }
}

void Fabric::open_door(const Id& door, Dialed dialed) {
  impl_->watch.call([&] { impl_->doors[door] = std::move(dialed); });
}

void Fabric::close_door(const Id& door) {
  impl_->watch.call([&] { impl_->doors.erase(door); });
}

std::shared_ptr<Peer> Fabric::dial(const ProcessInfo& info, const Id& door, const std::string& text,
                                   Peer::Notes notes, const Deadline& deadline) {
  require_reachable(info);
  FrameSocket<Frame> frames(Socket::connect(info.socket, deadline));
  frames.socket().require_same_user();
  UniqueFd pidfd = open_pidfd(info.pid);
  const int code = errno;
  if (liveness_of(info.pid, info.start_time) == Liveness::kDead) {
    fail(ErrorKind::kPeerLost, "pid ", info.pid, " has ended");
  }
  if (!pidfd) {
    fail(errno_kind(code), "watching pid ", info.pid, " by a pidfd: ", errno_text(code));
  }
  const std::string all = concat(self_.encode(), "\n", text);
  frames.send({.type = Frame::kDial, .process = door, .bytes = all.size()}, deadline);
  frames.socket().send(std::as_bytes(std::span(all)), deadline);
  auto peer = std::make_shared<Peer>(info, std::move(frames.socket()), std::move(pidfd));
  peer->on_note(std::move(notes));
  impl_->connections.lock()->dialed.push_back(peer);
  impl_->watch.loop().post([this, peer] {
    peer->start_on_loop(impl_->watch.loop());  // does not throw
    impl_->reap_on_loop();
  });
  return peer;
}

// Whoever takes their notes and hears their alarms may be gone after this.
void Fabric::Impl::drop_on_loop(const std::vector<std::shared_ptr<Peer>>& peers) {
  CONVOY_DCHECK(watch.loop().in_loop());
  for (const auto& peer : peers) peer->stop_on_loop();
  std::erase_if(connections.lock()->dialed, [&](const auto& peer) {
    return std::find(peers.begin(), peers.end(), peer) != peers.end();
  });
}

void Fabric::hang_up(const std::vector<std::shared_ptr<Peer>>& peers) {
  for (const auto& peer : peers) peer->send_bye();
  impl_->watch.call([&] { impl_->drop_on_loop(peers); });
}

void Fabric::forget(std::vector<std::shared_ptr<Peer>> peers) {
  for (const auto& peer : peers) peer->send_bye();
  impl_->watch.loop().post([this, gone = std::move(peers)]() mutable {
    impl_->drop_on_loop(gone);
    gone.clear();
    impl_->reap_on_loop();
  });
}

std::shared_ptr<Peer> Fabric::connect(const ProcessInfo& info, const Deadline& deadline,
                                      const std::function<void()>& check) {
  if (info.id == self_.id) return nullptr;
  require_reachable(info);
  {
    auto state = impl_->connections.lock();
    for (std::shared_ptr<Peer> given_up;;) {
      while (!state.wait(std::min(deadline, Deadline::after(kConnectSlice)),
                         [&] { return !state->connecting.contains(info.id); })) {
        if (deadline.expired()) {
          fail(ErrorKind::kTimeout, "connecting to pid ", info.pid, " took too long");
        }
        state.unlock();
        check();
        state.relock();
      }
      const auto found = state->peers.find(info.id);
      if (found == state->peers.end() || found->second == given_up) break;
      auto peer = found->second;
      state.unlock();
      // A connection that broke (a process without descriptors or memory) can be made again.
      if (!peer->ends(deadline) || liveness_of(info.pid, info.start_time) != Liveness::kAlive) {
        return peer;
      }
      given_up = peer;
      state.relock();
    }
    state->connecting.insert(info.id);
  }
  const auto finish = [&](const std::shared_ptr<Peer>& peer) {
    auto state = impl_->connections.lock();
    state->connecting.erase(info.id);
    if (peer) {
      auto& place = state->peers[info.id];
      if (place) state->replaced.push_back(std::move(place));
      place = peer;
    }
    impl_->connections.notify();
  };
  try {
    Socket socket = impl_->open_connection(self_, info, deadline, check);
    UniqueFd pidfd = open_pidfd(info.pid);
    const int code = errno;
    // What runs can be watched, or there is an error that says why not.
    if (liveness_of(info.pid, info.start_time) == Liveness::kDead) fail_gone(info);
    if (!pidfd) {
      fail(errno_kind(code), "watching pid ", info.pid, " by a pidfd: ", errno_text(code));
    }
    auto peer = std::make_shared<Peer>(info, std::move(socket), std::move(pidfd));
    impl_->watch.loop().post([this, peer] {
      peer->start_on_loop(impl_->watch.loop());  // does not throw
      impl_->reap_on_loop();
    });
    try {
      // Under the memory lock: a segment added meanwhile is sent by this loop or by the hook.
      auto memory = impl_->memory.lock();
      memory->arena->for_each_segment(
          [&](SegmentId id, const Segment& segment) { peer->send_segment(id, segment); });
      finish(peer);
    } catch (const std::exception& error) {
      // The watch thread looks at it: it must not go before that has ended.
      impl_->watch.call([&] { peer->abandon_on_loop(error.what()); });
      throw;
    }
    return peer;
  } catch (...) {
    finish(nullptr);
    throw;
  }
}

Block Fabric::allocate(std::size_t bytes) {
  auto memory = impl_->memory.lock();
  impl_->release_limbo(*memory);
  const auto piece = memory->arena->allocate(bytes);
  memory->sizes[{piece.location.segment, piece.location.offset}] = piece.size;
  return {this, piece.data, piece.size, piece.location};
}

void Fabric::free(const Location& location) noexcept {
  // In a forked child the memory is the parent's, and its lock may be held by a thread that is not
  // here.
  if (fork_generation() != generation_) return;
  auto memory = impl_->memory.lock();
  memory->limbo.push_back(location);
  impl_->release_limbo(*memory);
}

void Fabric::Impl::release_limbo(Memory& state) {
  std::erase_if(state.quarantine, [](const Quarantine& entry) { return entry.released(); });
  std::erase_if(state.limbo, [&](const Location& location) {
    const std::pair key{location.segment, location.offset};
    const std::size_t size = state.sizes.at(key);
    for (const auto& entry : state.quarantine) {
      if (overlaps(location, size, entry.location, 1)) return false;
      if (overlaps(location, size, entry.reads, 1)) return false;
    }
    state.arena->free(location);
    state.sizes.erase(key);
    return true;
  });
}

void Fabric::quarantine(const Location& location, std::function<bool()> released,
                        const Location& reads) {
  impl_->memory.lock()->quarantine.push_back({location, std::move(released), reads});
}

Location Fabric::locate(const void* address, std::size_t bytes) {
  return impl_->memory.lock()
      ->arena->locate(static_cast<const std::byte*>(address), bytes)
      .value_or(Location{});
}

std::byte* Fabric::resolve(const Location& location, std::size_t bytes) {
  return impl_->memory.lock()->arena->resolve(location, bytes);
}

Fabric::SharedSegment Fabric::share_segment(SegmentId id) {
  std::optional<SharedSegment> found;
  impl_->memory.lock()->arena->for_each_segment([&](SegmentId other, const Segment& segment) {
    if (other == id) found = SharedSegment{duplicate(segment.fd()), segment.data(), segment.size()};
  });
  if (!found) fail(ErrorKind::kInvalidArgument, "there is no segment ", id, " in this process");
  return std::move(*found);
}

void Fabric::fence(const std::vector<std::shared_ptr<Peer>>& outsiders, const std::string& why,
                   const Deadline& deadline) {
  // Asked for when they are dead or lost: from then on they are sent no more of it.
  const auto keys = [this] {
    std::vector<Segment::Key> all;
    impl_->memory.lock()->arena->for_each_segment(
        [&](SegmentId, const Segment& segment) { all.push_back(segment.key()); });
    return all;
  };
  shm::fence(outsiders, self_.id, keys, why, deadline);
}

std::size_t Fabric::trim() {
  auto memory = impl_->memory.lock();
  impl_->release_limbo(*memory);
  impl_->watch.loop().post([this] { impl_->reap_on_loop(); });
  return memory->arena->trim();
}

Fabric::Stats Fabric::stats() {
  auto memory = impl_->memory.lock();
  impl_->release_limbo(*memory);
  auto state = impl_->connections.lock();
  return {.mapped_bytes = memory->arena->mapped_bytes(),
          .used_bytes = memory->arena->used_bytes(),
          .quarantined_blocks = memory->limbo.size(),
          .peers = state->peers.size(),
          .unclaimed = state->arrived.size()};
}

std::vector<int> Fabric::descriptors() {
  std::vector<int> found;
  const auto add_all = [&](const auto&... fds) { (found.push_back(fds), ...); };
  impl_->memory.lock()->arena->for_each_segment(
      [&](SegmentId, const Segment& segment) { add_all(segment.fd()); });
  auto state = impl_->connections.lock();
  for (const auto& [id, peer] : state->peers) add_all(peer->descriptor(), peer->pidfd());
  for (const auto& peer : state->replaced) add_all(peer->descriptor(), peer->pidfd());
  for (const auto& peer : state->dialed) add_all(peer->descriptor(), peer->pidfd());
  return found;
}

void Fabric::set_headroom_for_testing(std::function<std::uint64_t()> headroom) {
  *impl_->headroom.lock() = headroom ? std::move(headroom) : machine_headroom;
}

Block::Block(Block&& other) noexcept
    : owner_(other.owner_),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      location_(other.location_) {}

Block& Block::operator=(Block&& other) noexcept {
  if (this != &other) {
    if (data_) owner_->free(location_);
    owner_ = other.owner_;
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    location_ = other.location_;
  }
  return *this;
}

Block::~Block() {
  if (data_) owner_->free(location_);
}

}  // namespace convoy::shm
