#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

#include "convoy/deadline.h"

namespace convoy {

// A value that only the holder of its lock can reach.
//
//   Guarded<State> state_;
//   state_.lock()->count += 1;
//   auto state = state_.lock();
//   if (!state.wait(deadline, [&] { return state->ready; })) ...
template <class T>
class Guarded {
 public:
  class Lock {
   public:
    T& operator*() { return owner_->value_; }
    T* operator->() { return &owner_->value_; }

    // Releases the lock while waiting. False: the deadline passed and `ready` is still false.
    template <class Predicate>
    bool wait(const Deadline& deadline, Predicate ready) {
      return wait(owner_->changed_, deadline, ready);
    }
    // The same on a condition of the caller's own, for values that have many waiters of which a
    // change concerns one.
    template <class Predicate>
    bool wait(std::condition_variable& condition, const Deadline& deadline, Predicate ready) {
      if (deadline.is_never()) {
        condition.wait(lock_, ready);
        return true;
      }
      return condition.wait_until(lock_, deadline.when(), ready);
    }
    void unlock() { lock_.unlock(); }
    void relock() { lock_.lock(); }

   private:
    friend class Guarded;
    explicit Lock(Guarded* owner) : owner_(owner), lock_(owner->mutex_) {}

    Guarded* owner_;
    std::unique_lock<std::mutex> lock_;
  };

  template <class... Args>
  explicit Guarded(Args&&... args) : value_(std::forward<Args>(args)...) {}

  Lock lock() { return Lock(this); }
  // Wakes every waiter. Call it after a change, with or without the lock held.
  void notify() { changed_.notify_all(); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  T value_;
};

}  // namespace convoy
