#pragma once

#include <atomic>

namespace convoy {

// A forked child of a rank must not keep the rank's sockets alive: its peers would not see the
// rank's death. Every socket of ours is registered here; in a child made by fork() a pthread_atfork
// handler puts a socket without a peer in the place of each. So the numbers stay valid (their
// owners close them as always, and whoever uses one is told that the peer is gone), and the sockets
// do not live on. Descriptors are close-on-exec besides.
//
// register/unregister: thread-safe, lock-free, and must bracket the life of the descriptor.
void register_fork_closed(int fd);
void unregister_fork_closed(int fd) noexcept;

// While one lives, fork() in other threads waits. Held from the making of a descriptor until it is
// registered, and from its unregistering until it is closed: a child must not slip in between. Only
// over calls that do not block; may be nested.
class ForkPause {
 public:
  ForkPause() noexcept;
  ForkPause(const ForkPause&) = delete;
  ForkPause& operator=(const ForkPause&) = delete;
  ~ForkPause();
};

// Counts forks that this process is the child of: 0 in a process that was executed. State made
// before a fork (threads, connections) is not usable in the child; compare generations to notice.
// Counts from the first call of any function here: call it when the state is made.
unsigned fork_generation() noexcept;

// An object of a process: a forked child makes another, and leaves that of its parent alone, whose
// locks may be held for ever and whose contents are its parent's. Never destroyed. Thread-safe.
template <class T>
class PerProcess {
 public:
  T& get() {
    Made* made = current_.load(std::memory_order_acquire);
    while (!made || made->generation != fork_generation()) {
      // No lock: it could have been held when this process was forked.
      auto* const fresh = new Made;
      if (current_.compare_exchange_strong(made, fresh)) return fresh->object;
      delete fresh;
    }
    return made->object;
  }

 private:
  struct Made {
    const unsigned generation = fork_generation();
    T object;
  };
  std::atomic<Made*> current_{nullptr};
};

// The process that made an object. A forked child has a copy of the object, but neither its threads
// nor its connections, and its locks may be held by threads that are not there.
class HomeProcess {
 public:
  // False in a forked child of the process.
  bool is_here() const noexcept { return generation_ == fork_generation(); }

 private:
  unsigned generation_ = fork_generation();
};

// For a shared_ptr to such an object: a forked child leaves its copy alone, with all that it owns.
struct DeleteAtHome {
  template <class T>
  void operator()(T* object) const noexcept {
    if (home.is_here()) delete object;
  }

  HomeProcess home;
};

}  // namespace convoy
