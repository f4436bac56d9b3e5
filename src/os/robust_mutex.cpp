#include "os/robust_mutex.h"

#include <sched.h>
#include <time.h>

#include <algorithm>

#include "base/error.h"

namespace convoy {
namespace {

[[maybe_unused]] timespec to_timespec(std::chrono::nanoseconds since_epoch) {
  const auto count = std::max<std::int64_t>(since_epoch.count(), 0);
  return {static_cast<time_t>(count / 1'000'000'000), static_cast<long>(count % 1'000'000'000)};
}

int lock_until(pthread_mutex_t* mutex, const Deadline& deadline) {
#if defined(__SANITIZE_THREAD__)
  // ThreadSanitizer does not know pthread_mutex_clocklock, and of pthread_mutex_timedlock not that
  // the holder may have died; so it is tried until the deadline.
  for (;;) {
    const int result = pthread_mutex_trylock(mutex);
    if (result != EBUSY) return result;
    if (deadline.expired()) break;
    sched_yield();
  }
  const timespec past{};
  return pthread_mutex_timedlock(mutex, &past);  // tells whether it is this thread's own
#else
  const timespec until = to_timespec(deadline.when().time_since_epoch());
  return pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &until);
#endif
}

}  // namespace

void RobustMutex::init() {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK);
  const int result = pthread_mutex_init(&mutex_, &attributes);
  pthread_mutexattr_destroy(&attributes);
  CONVOY_CHECK(result == 0, errno_text(result));
}

std::optional<RobustMutex::Taken> RobustMutex::taken(int result) {
  switch (result) {
    case 0: return Taken::kFree;
    case EOWNERDEAD:
      // At once: if this thread ends before it has put things right, the next one is told again.
      pthread_mutex_consistent(&mutex_);
      return Taken::kFromDead;
    case EBUSY:
    case ETIMEDOUT: return std::nullopt;
    case EDEADLK: fail(ErrorKind::kInvalidArgument, "this thread holds the lock already");
    default: fail(ErrorKind::kPeerLost, "a lock in shared memory is damaged: ", errno_text(result));
  }
}

std::optional<RobustMutex::Taken> RobustMutex::lock(const Deadline& deadline) {
  if (deadline.is_never()) return taken(pthread_mutex_lock(&mutex_));
  return taken(lock_until(&mutex_, deadline));
}

std::optional<RobustMutex::Taken> RobustMutex::try_lock() {
  return taken(pthread_mutex_trylock(&mutex_));
}

void RobustMutex::unlock() {
  const int result = pthread_mutex_unlock(&mutex_);
  if (result != 0) {
    fail(ErrorKind::kInvalidArgument,
         "this thread does not hold the lock that it gives back: ", errno_text(result));
  }
}

}  // namespace convoy
