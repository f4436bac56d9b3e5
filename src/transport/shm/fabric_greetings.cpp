// The Fabric: processes that connect to this one, and what they want. All of it runs on the watch
// thread.
#include <sys/epoll.h>

#include <algorithm>

#include "base/error.h"
#include "os/process.h"
#include "transport/shm/fabric_impl.h"

namespace convoy::shm {
namespace {

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

}  // namespace

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

}  // namespace convoy::shm
