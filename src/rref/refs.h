#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "rref/entry.h"
#include "rref/ids.h"
#include "rref/machine.h"

namespace convoy::rref {

class Core;

// A reference: to a value here (is_owner), or to one of another worker. Copies are the same
// reference; when the last one goes, the owner hears of it. May outlive the session, and does not
// keep it. Thread-safe, as a shared_ptr is.
class Ref {
 public:
  Ref() = default;
  Ref(const Ref& other) noexcept;
  Ref(Ref&& other) noexcept : entry_(std::exchange(other.entry_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(entry_, other.entry_);
    return *this;
  }
  ~Ref();  // NOLINT(bugprone-exception-escape): see there

  explicit operator bool() const noexcept { return entry_ != nullptr; }
  friend bool operator==(const Ref&, const Ref&) = default;

  const RRefId& id() const noexcept;
  bool is_owner() const noexcept;
  std::uint64_t fork() const noexcept;  // its number at the owner; 0 at the owner
  // The owner knows of it.
  bool confirmed() const;
  // Why it is of no use: the creation failed, the owner is lost, it was deleted, the session ended.
  std::optional<Failure> failure() const;
  // Once the owner knows of it, or it is of no use. At once, if it is so now. Never under a lock.
  void when_confirmed(Callback callback) const;
  // Once it is of no use because its owner is gone, or because the session ended. May be at once;
  // never, if it is dropped before.
  void when_lost(Callback callback) const;

 private:
  friend class Refs;
  struct Adopt {};
  Ref(Entry* entry, Adopt) noexcept : entry_(entry) {}

  Entry* entry_ = nullptr;
};

// The references of one worker of a session. Made before the agent meets the others, and may be
// destroyed after it. Thread-safe. Callbacks come on any thread, without a lock, and must be short.
class Refs {
 public:
  explicit Refs(agent::Agent& agent);
  Refs(const Refs&) = delete;
  Refs& operator=(const Refs&) = delete;
  ~Refs();
  // Each worker, this one first, after the agent has met the others, and each that joins later.
  void met(WorkerId worker);

  // --- values ---

  // Of a value that is here: rpc.rref(value).
  Ref make(Value value);
  // remote(): a reference to what a call will make at `owner`, and what goes with that call. To
  // this worker: a reference to a value that is not there yet.
  struct Creation {
    Ref ref;
    CreationHead head;
  };
  Creation create(WorkerId owner);
  // That call has ended here. `failure`: the reference is of no use, because of it. Once for each
  // create(), also if the call could not be started.
  void creation_ended(const Ref& ref, const Failure* failure);
  // The other side of it, when the call is decoded: a reference to the value that will be there.
  // Throws kCancelled if the creator has given up: the function must not run.
  Ref begin(WorkerId from, const CreationHead& head);
  void set_value(const Ref& ref, Value value);
  // As it is told to those who want the value.
  void set_failure(const Ref& ref, const Failure& failure);

  // Once there is a value, or why there is none; at once, if it is so now. `ref` is an owner's.
  void when_value(const Ref& ref, ValueCallback callback);
  // For another worker (to_here, calls of methods): not created yet: later; deleted: an error, at
  // once.
  void when_value(WorkerId from, const RRefId& id, ValueCallback callback);
  // The value that is there now, of a reference that another worker has; none: when_value() knows
  // more.
  Value ready_value(const RRefId& id);
  // Waits. Throws why there is none (RemoteError), kTimeout. `ref` is an owner's.
  Value value(const Ref& ref, const Deadline& deadline);

  // --- messages ---

  // A reference goes with a call to `to`, or, with the number of its call (Request::number()), with
  // an answer. Throws why the reference is of no use. The message must follow; for calls, and for
  // answers that could not be sent, passed() must be called once it has ended.
  Passed pass(const Ref& ref, WorkerId to, std::optional<std::uint64_t> answer_to = std::nullopt);
  // NOLINTNEXTLINE(bugprone-exception-escape): see there
  void passed(WorkerId to, std::span<const Passed> references, Passage how) noexcept;
  // What arrived. Throws kCancelled if the sender has given up, kInvalidArgument for nonsense.
  Ref take(WorkerId from, const Passed& passed);
  // The function starts when all of them are known to their owners, or fails with the first that is
  // of no use.
  void when_settled(std::span<const Ref> refs, Callback callback);

  // --- the end ---

  // All references are of no use from now on; nothing more is sent. The agent's end does it, too.
  void close() noexcept;
  // Who refers to values here: "RRef (worker0, #3 of worker1) is held by worker2".
  std::vector<std::string> leaks() const;
  DebugInfo debug_info() const;

 private:
  const std::shared_ptr<Core> core_;
};

}  // namespace convoy::rref
