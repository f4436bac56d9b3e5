#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/share.h"

// What processes of one host and one user do together: queues of tensors, events, barriers, locks.
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
  // Bytes reserved for an item, without its tensors. Larger items get shared memory of their own.
  std::size_t item_bytes = 2048;
  // Private tensors with at most this many bytes of storage are copied into and out of the queue:
  // faster, but later writes are not visible to the other side. 0: all tensors are shared.
  std::size_t copy_below = 0;
  // Timeout of calls without a deadline, in all processes that have the queue.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

// A bounded queue of messages, first in, first out, for any number of producers and consumers in
// any processes. Copies are the same queue. Thread-safe. The queue and its items live as long as
// any process has it or is being sent it.
//
// Tensors are not copied but shared, as by a Channel. Queued items stay valid even if their
// producer dies.
//
// A process that dies inside of put() or get() loses at most the items of that call; they are
// counted (lost()) and logged.
class Queue : public Shared {
 public:
  Queue() = default;  // no queue
  // A new one. kInvalidArgument, kResource.
  explicit Queue(const QueueOptions& options);
  // kInvalidArgument if it is something else.
  explicit Queue(const Shared& object);

  std::size_t size() const;  // messages that wait
  std::size_t capacity() const;

  // Waits for room. kTimeout: nothing was put. kPeerLost: the queue is closed. Otherwise as
  // Channel::send. kUnsupported for a Shared in the message.
  void put(const at::Tensor& tensor) const;
  void put(const Message& message) const;
  void put(const Message& message, const Deadline& deadline) const;
  // False: there is no room.
  bool try_put(const Message& message) const;
  // Puts messages in order; other producers may put in between. Returns how many were put before
  // the deadline, or before the first message that cannot be put. If that is the very first one,
  // its error is thrown.
  std::size_t put_many(const std::vector<Message>& messages, const Deadline& deadline) const;

  // Waits for a message. kTimeout. kPeerLost: the queue is closed, and nothing is left in it.
  Message get() const;
  Message get(const Deadline& deadline) const;
  // nullopt: nothing is there.
  std::optional<Message> try_get() const;
  // Returns the waiting messages, at most `most`; waits until there is one. Empty at the deadline.
  // A message that cannot be received is counted (lost()) and left out.
  std::vector<Message> get_many(std::size_t most, const Deadline& deadline) const;
  // The message must be one tensor. Otherwise kInvalidArgument, and the message is consumed.
  at::Tensor get_tensor() const;
  at::Tensor get_tensor(const Deadline& deadline) const;

  // Closes the queue for all processes: put() fails and waiters wake up. Queued items can still be
  // taken.
  void close() const;
  bool closed() const;

  struct Losses {
    std::uint64_t items = 0;
    std::string latest;  // "pid 12 ended with item 7 of pid 9 in its hands"
  };
  // Losses of all processes since the queue was made. Checks for dead processes first.
  Losses lost() const;

  // For arguments of processes: convoy/values.h.
  void put_values(Message& to) const { to.add(*this); }
  static Queue take_values(ValueReader& from);
};

// A flag that processes wait for.
class Event : public Shared {
 public:
  Event() = default;  // no event
  static Event create();
  explicit Event(const Shared& object);

  bool is_set() const;
  void set() const;  // wakes all that wait
  void clear() const;
  // False at the deadline. An event that was set and cleared again during the wait counts as set.
  bool wait(const Deadline& deadline) const;

  void put_values(Message& to) const { to.add(*this); }
  static Event take_values(ValueReader& from);
};

// A reusable barrier for a fixed number of threads in any processes.
//
// A process that dies while it has the barrier breaks it: current and later waiters get kPeerLost,
// until reset().
class Barrier : public Shared {
 public:
  Barrier() = default;  // no barrier
  // kInvalidArgument: not 1 to 65535.
  explicit Barrier(std::size_t parties);
  explicit Barrier(const Shared& object);

  std::size_t parties() const;
  std::size_t waiting() const;
  // Returns 0 for the last thread to arrive, else its arrival number from 1. kTimeout: this thread
  // no longer counts as waiting; the others go on waiting. kPeerLost: the barrier is broken.
  std::size_t wait(const Deadline& deadline) const;
  // Fails current waiters with kPeerLost and resets the barrier.
  void reset() const;

  void put_values(Message& to) const { to.add(*this); }
  static Barrier take_values(ValueReader& from);
};

// A robust mutex between processes, owned by the thread that locked it. If that thread or its
// process ends, the next one gets the lock and is told so.
class Lock : public Shared {
 public:
  enum class Taken {
    kFree,
    kFromDead,  // what the lock guards may be half changed: put it right
  };

  Lock() = default;  // no lock
  static Lock create();
  explicit Lock(const Shared& object);

  // kTimeout. kInvalidArgument if this thread has it.
  Taken lock(const Deadline& deadline) const;
  std::optional<Taken> try_lock() const;  // nullopt: somebody has it
  // kInvalidArgument if this thread does not have it.
  void unlock() const;

  void put_values(Message& to) const { to.add(*this); }
  static Lock take_values(ValueReader& from);
};

// Publishes an object under a name for processes of this user, as long as this process has it: in
// the folder $CONVOY_SHARE_FOLDER/convoy-<uid> (0700; /dev/shm by default). Names of dead processes
// are removed. kInvalidArgument for a name that is taken, or that is empty, too long or has a
// slash.
void offer(const Shared& object, const std::string& name);
// Waits until somebody offers it. kTimeout. Queue(open("jobs", deadline)).
Shared open(const std::string& name, const Deadline& deadline);

}  // namespace convoy::share
