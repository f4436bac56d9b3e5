#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/share.h"

// Objects that processes of one host and one user share: queues of tensors, events, barriers,
// locks.
//
//   convoy::share::Queue queue({.capacity = 100});
//   channel.send(convoy::share::Message{queue});     // or to a process that is started, or by name
//   queue.put({tensor, "step", 41});                 // many producers
//   const auto message = queue.get();                // many consumers
//
// If a process dies at any point, the others go on. See docs/reference/processes.md.
namespace convoy::share {

class ValueReader;

struct QueueOptions {
  std::size_t capacity = 1024;  // items
  // Bytes reserved for each item, without its tensors. A larger item gets shared memory of its own.
  std::size_t item_bytes = 2048;
  // Private tensors with at most this many bytes of storage are copied into and out of the queue:
  // faster, but later writes are not visible to the other side. 0: all tensors are shared.
  std::size_t copy_below = 0;
  // Timeout of calls without a deadline, in all processes that have the queue.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

// A bounded FIFO queue of messages (MPMC), for any number of producers and consumers in any
// processes. At most 256 processes use it at the same time. Copies are the same queue. Thread-safe.
// The queue and its items live as long as any process has it or is being sent it.
//
// Tensors are shared, not copied, as by a Channel. Queued items stay valid even if their producer
// dies.
//
// A process that dies inside put() or get() loses at most the items of that call. They are counted
// (lost()) and logged.
class Queue : public Shared {
 public:
  Queue() = default;  // no queue
  // Makes a new queue. Throws kInvalidArgument for bad options, kResource if memory or descriptors
  // do not suffice.
  explicit Queue(const QueueOptions& options);
  // Throws kInvalidArgument if the object is not a queue.
  explicit Queue(const Shared& object);

  std::size_t size() const;  // messages in the queue
  std::size_t capacity() const;

  // Blocks while the queue is full. Throws kTimeout at the deadline (nothing was put), kPeerLost if
  // the queue is closed, kUnsupported if the message holds a Shared; otherwise as Channel::send.
  void put(const at::Tensor& tensor) const;
  void put(const Message& message) const;
  void put(const Message& message, const Deadline& deadline) const;
  // Does not wait. Returns false if the queue is full.
  bool try_put(const Message& message) const;
  // Puts messages in order; other producers may put theirs in between. Returns how many were put
  // before the deadline, or before the first message that cannot be put. Throws only if that is the
  // very first message.
  std::size_t put_many(const std::vector<Message>& messages, const Deadline& deadline) const;

  // Blocks while the queue is empty. Throws kTimeout at the deadline, kPeerLost if the queue is
  // closed and empty. A message that cannot be received is lost, and its error is thrown.
  Message get() const;
  Message get(const Deadline& deadline) const;
  // Does not wait. Returns nullopt if the queue is empty.
  std::optional<Message> try_get() const;
  // Blocks until there is a message, then returns all that are there, at most `most`. Returns an
  // empty vector at the deadline. Throws kPeerLost if the queue is closed and empty. A message that
  // cannot be received is counted (lost()) and left out.
  std::vector<Message> get_many(std::size_t most, const Deadline& deadline) const;
  // As get(), for a message that is one tensor. Throws kInvalidArgument for any other message,
  // which is consumed.
  at::Tensor get_tensor() const;
  at::Tensor get_tensor(const Deadline& deadline) const;

  // Closes the queue for all processes: put() fails and waiters wake up. Consumers can still take
  // queued items.
  void close() const;
  bool closed() const;

  struct Losses {
    std::uint64_t items = 0;
    std::string latest;  // "pid 12 died while it held item 7, put by pid 9"
  };
  // All losses since the queue was made, in any process. Checks for dead processes first.
  Losses lost() const;

  // For arguments of processes: convoy/values.h.
  void put_values(Message& to) const { to.add(*this); }
  static Queue take_values(ValueReader& from);
};

// A flag that processes can wait for. Copies are the same event. Thread-safe.
class Event : public Shared {
 public:
  Event() = default;  // no event
  static Event create();
  explicit Event(const Shared& object);

  bool is_set() const;
  void set() const;  // wakes all waiters
  void clear() const;
  // Blocks until the event is set. Returns false at the deadline. Also returns true if the event
  // was set and cleared again during the wait.
  bool wait(const Deadline& deadline) const;

  void put_values(Message& to) const { to.add(*this); }
  static Event take_values(ValueReader& from);
};

// A reusable barrier for a fixed number of threads in any processes. Copies are the same barrier.
// Thread-safe.
//
// A process that dies while it has the barrier breaks it: current and later waiters get kPeerLost
// until reset().
class Barrier : public Shared {
 public:
  Barrier() = default;  // no barrier
  // Throws kInvalidArgument unless `parties` is from 1 to 65535.
  explicit Barrier(std::size_t parties);
  explicit Barrier(const Shared& object);

  std::size_t parties() const;
  std::size_t waiting() const;
  // Blocks until all parties have arrived. Returns 0 for the last thread to arrive, for the others
  // their arrival number from 1. Throws kTimeout at the deadline: this thread no longer counts, the
  // others go on waiting. Throws kPeerLost if the barrier is broken or is reset.
  std::size_t wait(const Deadline& deadline) const;
  // Fails current waiters with kPeerLost and resets the barrier.
  void reset() const;

  void put_values(Message& to) const { to.add(*this); }
  static Barrier take_values(ValueReader& from);
};

// A robust mutex between processes, owned by the thread that locked it. If that thread or its
// process ends, the next owner gets the lock and learns of it. Copies are the same lock.
// Thread-safe.
class Lock : public Shared {
 public:
  enum class Taken {
    kFree,
    kFromDead,  // the owner died: the guarded data may be inconsistent
  };

  Lock() = default;  // no lock
  static Lock create();
  explicit Lock(const Shared& object);

  // Blocks until this thread owns the lock. Throws kTimeout at the deadline, kInvalidArgument if
  // this thread owns it already.
  Taken lock(const Deadline& deadline) const;
  std::optional<Taken> try_lock() const;  // nullopt: it is locked
  // Throws kInvalidArgument if this thread does not own it.
  void unlock() const;

  void put_values(Message& to) const { to.add(*this); }
  static Lock take_values(ValueReader& from);
};

// Publishes an object under a name for processes of this user, as long as this process has it.
// Names are in the folder $CONVOY_SHARE_FOLDER/convoy-<uid> (mode 0700; in /dev/shm by default).
// Names of dead processes are removed. Throws kInvalidArgument if the name is taken, empty, longer
// than 60 characters or has a slash.
void offer(const Shared& object, const std::string& name);
// Blocks until a process offers an object under this name. Throws kTimeout at the deadline.
// Example: Queue(open("jobs", deadline)).
Shared open(const std::string& name, const Deadline& deadline);

}  // namespace convoy::share
