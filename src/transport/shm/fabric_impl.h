#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/guarded.h"
#include "base/log_limit.h"
#include "base/loop.h"
#include "os/frame_socket.h"
#include "transport/shm/arena.h"
#include "transport/shm/fabric.h"

// The parts of the Fabric: included by the files that implement it.
//   fabric.cpp            its making; connections that this process asks for
//   fabric_greetings.cpp  those that others ask for
//   fabric_memory.cpp     blocks of memory
namespace convoy::shm {

// Bytes by which memory may grow, where no test says otherwise.
std::uint64_t machine_headroom();
[[noreturn]] void fail_gone(const ProcessInfo& info);
// The other side has closed it.
bool is_over(const Socket& socket);

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

}  // namespace convoy::shm
