#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/id.h"
#include "coll/calls.h"
#include "convoy/deadline.h"
#include "convoy/error.h"
#include "convoy/event.h"
#include "convoy/store.h"
#include "transport/shm/fabric.h"

namespace convoy::coll {

class Group;
class Medium;

// An operation under way. Copies share it. Thread-safe.
class [[nodiscard]] Work {
 public:
  Work() = default;

  // Of the collective in its group, from 1; 0 for messages.
  std::uint64_t number() const;
  bool done() const;
  // Waits for it, and runs it on this thread if it is its turn and nobody runs it yet. Rethrows its
  // error. False: `timeout` passed first; the operation goes on until its own deadline.
  bool wait(std::chrono::nanoseconds timeout);
  void wait();
  // Who sent the message that was received; -1 before that, and for anything else.
  int source() const;

 private:
  friend class Group;
  struct Operation;
  struct Collective;
  struct Messages;
  explicit Work(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}

  std::shared_ptr<Operation> operation_;
};

// Ranks that move bytes together: of one host, unless over() is given another medium. Operations of
// a group run in the order in which they are issued, which must be the same on all ranks; groups
// are independent of each other. Methods may be called from any thread, but then it is the caller
// who keeps the order equal on all ranks.
//
// Synchronous calls run on the calling thread and, those on single buffers, allocate nothing;
// asynchronous ones on the group's progress thread, started by the first of them. All throw Error;
// what an error leaves is said in docs/internals/collectives.md.
class Group {
 public:
  // Called when an operation has finished, on the thread that finished it; nullptr: it succeeded.
  // Must not throw. That of a collective may issue collectives of this group and wait for them:
  // they run inside it, or beside it if callbacks are nested deeply. That of a message must not
  // wait for messages.
  using Callback = std::function<void(std::exception_ptr)>;

  // Collective: returns when all `size` ranks have called it. The store's keys must be fresh
  // (with_prefix). kTimeout names the ranks that did not come.
  static std::shared_ptr<Group> create(const std::shared_ptr<Store>& store, int rank, int size,
                                       const GroupOptions& options = {});
  // On something else than shared memory, whose ranks have met already. `timeout` is that of
  // operations which do not bring their own.
  static std::shared_ptr<Group> over(std::shared_ptr<Medium> medium,
                                     std::chrono::nanoseconds timeout,
                                     std::vector<int> job_ranks = {});
  // Leaves the group; pending operations fail. Does not wait for other ranks. In a forked child it
  // does nothing.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const;
  int size() const;
  const std::string& name() const;
  const std::shared_ptr<Medium>& medium() const;
  // A group belongs to the process that made it. In a forked child of that everything but what
  // stands above this line, close() and the end throws kUnsupported, and so does this.
  void check_process(std::string_view operation) const;

  // Operations are made by calls(), where each is explained, and checked there. run() carries one
  // out on this thread, unless others come before it. start() does not wait: buffers belong to the
  // operation until it is done.
  const CallMaker& calls() const;
  void run(Call call);
  Work start(Call call, Callback done = nullptr);

  // What is run most often.
  void all_reduce(const void* input, void* output, std::size_t count, DataType type,
                  const ReduceOptions& options = {}) {
    run(calls().all_reduce(input, output, count, type, options));
  }
  void broadcast(const void* input, void* output, std::size_t count, DataType type, int root,
                 const CallOptions& options = {}) {
    run(calls().broadcast(input, output, count, type, root, options));
  }
  void all_gather(const void* input, void* output, std::size_t count, DataType type,
                  const CallOptions& options = {}) {
    run(calls().all_gather(input, output, count, type, options));
  }
  void barrier(const CallOptions& options = {}) { run(calls().barrier(options)); }

  // Messages between two ranks, apart from the collectives and in no order with them. A send is
  // done when its buffer may be changed: a small one at once, a large one when it has been
  // received. Size and type must be what the receiver expects: otherwise its receive, and a large
  // send, fail. A rank may send to itself.
  void send(const void* data, std::size_t count, DataType type, int target,
            const MessageOptions& options = {});
  // From `source` or, if that is kAnyRank, from whoever sends with this tag. Returns who it was.
  int recv(void* data, std::size_t count, DataType type, int source,
           const MessageOptions& options = {});
  // All of them, in no order among each other: no order of the sends and receives of two ranks can
  // block them.
  void batch(std::span<const Message> messages, std::chrono::nanoseconds timeout = {});
  Work send_async(const void* data, std::size_t count, DataType type, int target,
                  const MessageOptions& options = {}, Callback done = nullptr);
  Work recv_async(void* data, std::size_t count, DataType type, int source,
                  const MessageOptions& options = {}, Callback done = nullptr);
  Work batch_async(std::span<const Message> messages, std::chrono::nanoseconds timeout = {},
                   Callback done = nullptr);

  // Calls `callback` when an operation of this rank has ended, on the thread that ended it, where
  // it must not wait for this group.
  EventHandle on_event(EventCallback callback);

  // Memory that all ranks of the host can work on in place: operations on it copy nothing. Local;
  // aligned to pages, not cleared. Throws kResource before the machine or its cgroup runs out.
  shm::Block allocate(std::size_t bytes);

  // Breaks the group on every rank: pending and later operations fail everywhere, naming this rank.
  void abort(const std::string& why);
  // After abort(), before others go on without some of the ranks. settle(): waits until no rank of
  // this process is inside an operation of this group; kTimeout. fence(): kills the processes of
  // this group that are not among the members, as shm::Fabric::fence; with kQuiet only those that
  // do not notice in a few seconds that the group is broken. Where ranks do not share memory, both
  // do nothing.
  enum class Spare { kNobody, kQuiet };
  void settle(const Deadline& deadline);
  void fence(std::span<const Id> members, const Deadline& deadline, Spare spare = Spare::kNobody);
  // By rank; empty where ranks do not share memory.
  std::vector<Id> processes() const;
  // Leaves as the destructor does; operations under way and later ones fail on this rank.
  void close();
  bool broken() const;
  // Those whose processes are gone, as far as this rank has heard.
  std::vector<int> lost_ranks() const;
  // The same with what is known of each: "(pid 17, host a) was killed by ...".
  std::map<int, std::string> losses() const;
  // Those whom this rank's time-out, which broke the group, found missing; empty if it was
  // another's.
  std::vector<int> late_ranks() const;
  // What broke it, as far as errors tell; nullopt while it works.
  std::optional<ErrorKind> failure() const;
  // Number of the last collective that was issued here, and of the last that completed.
  std::uint64_t last_issued() const;
  std::uint64_t last_completed() const;

  class Impl;  // opaque

 private:
  explicit Group(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  // Shared with the Work objects, which may outlive the group.
  std::shared_ptr<Impl> impl_;
};

}  // namespace convoy::coll
