#include "transport/shm/fabric.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "base/error.h"
#include "os/file.h"
#include "os/fork_guard.h"
#include "os/machine.h"
#include "transport/shm/fabric_impl.h"
#include "transport/shm/fence.h"
#include "transport/shm/short_slices.h"

namespace convoy::shm {
namespace {

// Between looks at what else may have happened to whoever is waited for.
constexpr auto kConnectSlice = std::chrono::milliseconds(25);

std::atomic<Fabric*> made{nullptr};

}  // namespace

void fail_gone(const ProcessInfo& info) {
  fail(ErrorKind::kPeerLost, "pid ", info.pid, " ended while its group was being made");
}

bool is_over(const Socket& socket) {
  pollfd item{socket.fd(), POLLRDHUP, 0};
  return ::poll(&item, 1, 0) > 0;
}

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

}  // namespace convoy::shm
