#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "agent/agent.h"
#include "agent/letters.h"
#include "agent/peer.h"
#include "base/guarded.h"

// The parts of an agent: included by the files that implement it.
//
// Locks: a peer's mutex, under which letters that are not large are sent (so it is taken before the
// endpoint's own); the others are taken alone, or after it. No handler and no Call::ended() is
// called under one.
namespace convoy::agent {

// What others may call. Entries are added and never removed: their places are known to others.
struct Agent::Functions {
  mutable std::mutex mutex;
  std::deque<Function> all;  // guarded; entries stay where they are
  // The first ones again, to be found without the lock.
  std::array<std::atomic<Function*>, 256> first{};

  // The lock is held.
  void add(const Handler& handler) {
    Function& function = all.emplace_back(handler, declare_function(handler.key));
    if (all.size() > first.size()) return;
    first[all.size() - 1].store(&function, std::memory_order_release);
  }
  // nullptr: there is none.
  Function* find(std::uint32_t place) {
    if (place < first.size()) [[likely]]
      return first[place].load(std::memory_order_acquire);
    const std::scoped_lock lock(mutex);
    return place < all.size() ? &all[place] : nullptr;
  }
  std::vector<TableEntry> table() const;
};

// What came to an end under a lock, to be told without it.
struct Agent::Ended {
  std::vector<std::pair<Call*, Failure>> calls;
  std::vector<std::pair<transport::Sent, std::string>> letters;
  struct Reply {
    std::uint32_t slot;
    std::uint64_t number;
    Error error;
  };
  std::vector<Reply> replies;          // that could not be sent
  std::vector<std::uint64_t> cancels;  // numbers of calls that the callee has, perhaps

  void tell() noexcept;
};

// Memory that was given to arriving pieces.
struct Agent::Placed {
  struct Entry {
    transport::Remote* remote;
    std::shared_ptr<void> memory;
  };
  Guarded<std::unordered_map<const std::byte*, Entry>> memory;
};

struct Agent::Gathers {
  using Key = std::pair<std::uint64_t, std::uint64_t>;  // group, number
  struct Last {
    std::uint64_t number;
    std::string value;  // this worker's
  };
  struct State {
    std::map<std::uint64_t, std::uint64_t> begun;  // how many, by group
    std::map<Key, std::map<WorkerId, std::string>> values;
    std::map<std::uint64_t, Last> last;  // that has ended here, by group
  };
  Guarded<State> state;
};

// Looks at the handler that runs on the thread that serves: if it takes too long, another thread
// serves. Looks only as long as such handlers run.
class Agent::Tick {
 public:
  explicit Tick(Agent& agent);
  Tick(const Tick&) = delete;
  Tick& operator=(const Tick&) = delete;
  ~Tick();
  void stop() noexcept;

  // On the thread that serves, around a handler; what begin() returned goes into the others.
  std::uint64_t begin() noexcept;
  void end(std::uint64_t run) noexcept;
  // If nobody has done so yet: another thread serves from now on.
  void take_over(std::uint64_t run) noexcept;

 private:
  void watch();

  Agent& agent_;
  // The number of the run, odd while it goes on, and nobody has taken over.
  std::atomic<std::uint64_t> run_{0};
  std::atomic<bool> asleep_{true};
  std::mutex mutex_;
  std::condition_variable wakes_;
  bool stopping_ = false;
  std::thread thread_;
};

// Marks a thread that is in a call of the inbox.
class InboxScope {
 public:
  explicit InboxScope(const Agent& agent) noexcept;
  InboxScope(const InboxScope&) = delete;
  InboxScope& operator=(const InboxScope&) = delete;
  ~InboxScope();

  // This thread is in a call of that agent's inbox; any agent's, if nullptr.
  static bool is_here(const Agent* agent) noexcept;

 private:
  const Agent* const before_;
};

}  // namespace convoy::agent
