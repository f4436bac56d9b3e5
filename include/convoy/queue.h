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
// Whatever process ends, and however, the others go on. docs/processes.md tells more.
namespace convoy::share {

class ValueReader;

struct QueueOptions {
  std::size_t capacity = 1024;  // items
  // Of an item in the queue itself, without its tensors. A larger one goes through shared memory.
  std::size_t item_bytes = 2048;
  // Private tensors whose storage has at most so many bytes are copied into the queue and out of
  // it: quicker, but what either side writes then, the other one does not see. 0: all are shared.
  std::size_t copy_below = 0;
  // Of calls without a deadline, in this process and in those that get the queue.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

// A bounded queue of messages, first in, first out, for any number of producers and consumers in
// any processes. Copies are the same queue. Thread-safe. It lives, with what is in it, as long as
// any process has it, or is about to get it.
//
// Tensors are not copied but shared, as by a Channel. What is in the queue stays valid whatever
// becomes of the process that put it there.
//
// A process that ends in the middle of put() or get() takes at most the items of that call with
// it, which is counted (lost()) and logged.
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
  // In order, but not at one go: others may put in between. How many were put: by the deadline, or
  // before one that could not be (which is thrown when it is the first: call again with the rest).
  std::size_t put_many(const std::vector<Message>& messages, const Deadline& deadline) const;

  // Waits for a message. kTimeout. kPeerLost: the queue is closed, and nothing is left in it.
  Message get() const;
  Message get(const Deadline& deadline) const;
  // nullopt: nothing is there.
  std::optional<Message> try_get() const;
  // All that are there, `most` at most; waits for one. Empty: none came by the deadline. One that
  // cannot be received is counted (lost()) and left out.
  std::vector<Message> get_many(std::size_t most, const Deadline& deadline) const;
  // The message must be one tensor; kInvalidArgument if it is something else, which is then gone.
  at::Tensor get_tensor() const;
  at::Tensor get_tensor(const Deadline& deadline) const;

  // For all processes: nothing can be put any more, and who waits hears of it. What is in it can
  // still be taken.
  void close() const;
  bool closed() const;

  struct Losses {
    std::uint64_t items = 0;
    std::string latest;  // "pid 12 ended with item 7 of pid 9 in its hands"
  };
  // Of all processes, since the queue was made. Looks for processes that have ended.
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
  // False: it was not set by the deadline. One that was set and cleared again while this waited
  // counts.
  bool wait(const Deadline& deadline) const;

  void put_values(Message& to) const { to.add(*this); }
  static Event take_values(ValueReader& from);
};

// So many threads, in any processes, wait for each other, again and again.
//
// A process that has it and ends without letting go of it breaks it: who waits then, or comes
// later, gets kPeerLost, until reset().
class Barrier : public Shared {
 public:
  Barrier() = default;  // no barrier
  // kInvalidArgument: not 1 to 65535.
  explicit Barrier(std::size_t parties);
  explicit Barrier(const Shared& object);

  std::size_t parties() const;
  std::size_t waiting() const;
  // 0 for the last one that came, else how many others were there before it and it. kTimeout: this
  // one does not wait any more; the others still do. kPeerLost: it is broken.
  std::size_t wait(const Deadline& deadline) const;
  // Who waits gets kPeerLost; after that it is as new.
  void reset() const;

  void put_values(Message& to) const { to.add(*this); }
  static Barrier take_values(ValueReader& from);
};

// A mutex between processes. It belongs to the thread that took it. If that ends while it has it,
// or its process does, the next one gets it and is told.
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

// Makes an object known by a name to the processes of this user, as long as this process has it: in
// the folder $CONVOY_SHARE_FOLDER/convoy-<uid> (0700; /dev/shm by
// default). Names of the dead are removed. kInvalidArgument for a name that is taken, or that is
// empty, too long or has a slash.
void offer(const Shared& object, const std::string& name);
// Waits until somebody offers it. kTimeout. Queue(open("jobs", deadline)).
Shared open(const std::string& name, const Deadline& deadline);

}  // namespace convoy::share
