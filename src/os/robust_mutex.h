#pragma once

#include <pthread.h>

#include <optional>

#include "convoy/deadline.h"

namespace convoy {

// A mutex in memory that processes share. It is held by a thread; if that ends while it holds it,
// in whatever way, the kernel gives it to the next that asks, which is told. Not movable, never
// destroyed: it goes with its memory.
class RobustMutex {
 public:
  enum class Taken {
    kFree,
    kFromDead,  // what it guards may be half changed: the caller holds it and puts that right
  };

  // Once, by who made the memory, before others see it.
  void init();

  // nullopt: the deadline passed. One that has passed already is enough for a mutex that is free.
  // kInvalidArgument if this thread holds it. kPeerLost if the memory is no mutex any more.
  std::optional<Taken> lock(const Deadline& deadline);
  std::optional<Taken> try_lock();  // nullopt: somebody holds it
  // kInvalidArgument if this thread does not hold it.
  void unlock();

 private:
  std::optional<Taken> taken(int result);

  pthread_mutex_t mutex_;
};

}  // namespace convoy
