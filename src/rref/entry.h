#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "rref/ids.h"

namespace convoy::rref {

class Core;
struct Party;

// What a reference refers to, at its owner. `type` is whatever the typed layer wants to check.
struct Value {
  std::shared_ptr<void> object = nullptr;
  std::uint64_t type = 0;
};

// A value, or why there is none. One of them is null.
using ValueCallback = std::function<void(const Value* value, const Failure* failure)>;
using Callback = std::function<void(const Failure* failure)>;  // nullptr: good

enum class EntryState : std::uint8_t {
  // At the owner:
  kExpected,  // others know of it; the call that creates it has not come
  kRunning,   // its function runs
  kReady,     // there is a value
  kFailed,    // there will be none
  // At others:
  kCreating,   // the call that creates it is under way
  kRequested,  // the owner was told of it
  kConfirmed,  // the owner knows of it
  // At both:
  kDead,  // of no use; nobody finds it any more
};

// A value at its owner, or a worker's reference to one. Guarded by the machine's lock, but for what
// is constant and for handles: the last one goes under the lock.
class Entry {
 public:
  Entry(const RRefId& which, bool owned, EntryState begins, Party* at, std::uint64_t number)
      : id(which), fork(number), owner(at), is_owner(owned), state(begins) {}

  const RRefId id;
  const std::uint64_t fork;  // of a user: its number at the owner
  Party* const owner;        // of a user
  const bool is_owner;
  bool registered = false;  // of a user: the owner must hear of its end
  bool counted = false;     // of an owner: among Party::expected of its creator
  EntryState state;
  std::atomic<std::uint32_t> handles{0};
  std::uint32_t pins = 0;                // calls and passages that need it
  std::shared_ptr<Core> core = nullptr;  // where its last handle goes to
  std::unique_ptr<Failure> failure = nullptr;
  Value value = {};

  // Others' references to a value here.
  struct Fork {
    Party* user = nullptr;
    std::uint64_t number = 0;
  };
  std::vector<Fork> forks = {};

  // What waits for it; few have any.
  struct Waiters {
    std::vector<ValueCallback> value;  // of an owner
    std::vector<Callback> confirmed;
    std::vector<Callback> lost;
    // Passages that brought it, and that its owner does not know of yet.
    std::vector<std::pair<Party*, std::uint64_t>> passages;
  };
  std::unique_ptr<Waiters> waiters = nullptr;

  Waiters& waiting() {
    if (!waiters) waiters = std::make_unique<Waiters>();
    return *waiters;
  }
};

}  // namespace convoy::rref
