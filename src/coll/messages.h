#pragma once

#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "coll/types.h"
#include "convoy/deadline.h"
#include "transport/shm/fabric.h"

namespace convoy::coll {

// A message to or from another rank, as this one sees it.
struct Transfer {
  bool sends = false;
  std::byte* data = nullptr;  // only read if it sends
  std::size_t bytes = 0;
  DataType type = DataType::kU8;
  int peer = 0;  // -1: from any
  std::uint64_t tag = 0;
  Deadline deadline = Deadline::never();
  std::function<void(std::exception_ptr)> callback;

  // Of the Messages that carry it out, guarded by their mutex:
  bool done = false;
  std::exception_ptr error;
  int source = -1;                 // whose message was received
  std::shared_ptr<Transfer> self;  // keeps an asynchronous one alive while it is pending
  std::list<Transfer*>::iterator place;
  // Of Mail:
  std::size_t moved = 0;  // bytes copied on this side
  shm::Block bounce;      // of a send of private data
};

// The callbacks of transfers that have ended, until they can be called without the lock that guards
// them.
class Callbacks {
 public:
  using Lock = std::unique_lock<std::mutex>;

  void add(Transfer& ended);
  // Gives the lock away while it calls them; returns when there are no more.
  void run(Lock& lock);

 private:
  std::vector<std::pair<std::function<void(std::exception_ptr)>, std::exception_ptr>> ready_;
};

// Waits for the end of a thread that was told to end. A callback on that very thread may destroy
// its owner: then it ends later, by itself, and keeps what it needs.
void end_thread(std::thread& thread);

// The point-to-point messages of one rank of a group, over whatever carries them. All methods may
// be called from any thread.
class Messages {
 public:
  virtual ~Messages() = default;

  // The short way for small messages: no list, no clock. False: nothing was done; take the long
  // one.
  virtual bool try_send(const Transfer& send) = 0;
  virtual bool try_receive(Transfer& receive) = 0;
  // Sends and receives, in no order, and waits for all. Throws the first error.
  virtual void run(std::span<Transfer> transfers) = 0;
  virtual void start(std::span<const std::shared_ptr<Transfer>> transfers) = 0;
  // Throws the transfer's error. False: `deadline` passed first.
  virtual bool wait(const Transfer& transfer, const Deadline& deadline) = 0;
  virtual bool is_done(const Transfer& transfer) = 0;

  // Of a broken group: what is pending fails, and nothing here touches another rank's memory any
  // more. Runs no callbacks but those of what failed.
  virtual void settle() = 0;
  // What is pending fails; nothing is accepted any more. Idempotent.
  virtual void close() = 0;
};

}  // namespace convoy::coll
