#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/guarded.h"
#include "convoy/deadline.h"
#include "mpi/header.h"

namespace convoy::mpi {

// What must stop when MPI ends.
class Stoppable {
 public:
  virtual ~Stoppable() = default;
  // No thread of it calls MPI after that.
  virtual void stop() noexcept = 0;
};

// This process's MPI. Lives forever. All methods may be called from any thread.
//
// Which thread calls MPI: whoever runs the operation. With MPI_THREAD_MULTIPLE they do so at will;
// with MPI_THREAD_SERIALIZED one after the other, each call under a lock (Turn). That suffices,
// because with SERIALIZED no call of ours waits: operations are begun and then tested again and
// again, which is also how they get a deadline.
class Library {
 public:
  // Initialises MPI unless the program has. Throws kUnsupported for a thread level below
  // SERIALIZED, and after MPI_Finalize.
  static Library& instance();
  // The same, but the program must have initialised it.
  static Library& of_host();

  // Held around calls of MPI that do not wait.
  class Turn {
   public:
    Turn() : lock_(mutex_, std::defer_lock) {
      if (serialized_.load(std::memory_order_relaxed)) lock_.lock();
    }

   private:
    std::unique_lock<std::mutex> lock_;
  };

  // Held while a thread works with MPI. Throws kPeerLost once MPI is ending.
  class Inside {
   public:
    Inside();
    ~Inside() { inside_.fetch_sub(1, std::memory_order_release); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
  };

  // Threads may call MPI at the same time, so that one of them may wait in it.
  static bool may_wait() { return !serialized_.load(std::memory_order_relaxed); }

  static bool ended() { return ended_.load(std::memory_order_acquire); }
  void stop_at_end(const std::shared_ptr<Stoppable>& user);
  // A request that cannot be cancelled, and memory that it uses: both are kept forever.
  void abandon(MPI_Request request, std::shared_ptr<void> memory);

  // Only one thread at a time may make communicators of one parent.
  std::mutex& making() { return making_; }

 private:
  Library();
  static int end(MPI_Comm, int, void*, void*);
  void watch_for_end();

  struct Abandoned {
    MPI_Request request;
    std::shared_ptr<void> memory;
  };

  // NOLINTBEGIN(readability-identifier-naming): members, though clang-tidy 14 takes them for
  // globals
  static inline std::atomic<bool> serialized_{false};
  static inline std::atomic<bool> ended_{false};
  static inline std::atomic<int> inside_{0};
  static inline std::mutex mutex_;
  // NOLINTEND(readability-identifier-naming)
  std::mutex making_;
  Guarded<std::vector<std::weak_ptr<Stoppable>>> users_;
  Guarded<std::vector<Abandoned>> abandoned_;
};

// What an error code of MPI means to the caller, and its text.
ErrorKind error_kind(int code);
std::string error_text(int code);

// Throws what a call of MPI returned; `parts` say what was being done.
template <class... Parts>
void check(int code, const Parts&... parts) {
  if (code == MPI_SUCCESS) [[likely]]
    return;
  throw Error(error_kind(code), concat(parts..., ": ", error_text(code)));
}

// How waiting goes on while nothing happens: test at once again, then let others run, then sleep.
// MPI has no way to sleep until something happens.
class Patience {
 public:
  explicit Patience(bool crowded) : eager_(crowded ? 0 : kEager) {}
  void pause();

 private:
  static constexpr int kEager = 20'000;  // some ms
  static constexpr int kYields = 2'000;

  int eager_;
  int times_ = 0;
};

// More ranks here than cores, as far as the launcher tells.
bool is_crowded();

enum class Finish { kDone, kLate, kStopped };
// Tests the requests until all are done, the deadline passes or `stop` is set. Throws Error of the
// first that fails. Null requests are done. `statuses`, unless empty, has one for each of them.
Finish finish(std::span<MPI_Request> requests, const Deadline& deadline,
              const std::atomic<bool>& stop, std::span<MPI_Status> statuses = {});

// A communicator of our own.
class Communicator {
 public:
  Communicator() = default;
  explicit Communicator(MPI_Comm handle);  // takes it over; its errors are returned from now on
  Communicator(Communicator&& other) noexcept : handle_(other.handle_) {
    other.handle_ = MPI_COMM_NULL;
  }
  Communicator& operator=(Communicator&&) = delete;
  ~Communicator();

  // Collective. A copy of anybody's.
  static Communicator copy_of(MPI_Comm other, const Deadline& deadline);

  MPI_Comm get() const { return handle_; }
  int rank() const;
  int size() const;

 private:
  MPI_Comm handle_ = MPI_COMM_NULL;
};

}  // namespace convoy::mpi
