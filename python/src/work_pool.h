#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>

#include "convoy/deadline.h"

namespace convoy::python {

// Runs work that may do anything, such as Python code that waits for calls. At most `size` tasks
// run at once, but for those that wait: a task counts no more while a call that it has made is
// under way (Waiting). If none has begun or ended for a moment (`stall`) while some are queued, the
// one that runs longest counts no more until it ends. So tasks that wait for other tasks never stop
// for good, whatever the size, and a long one does not hold up the others.
//
// Threads are made when they are needed, belong to nobody, and keep the pool: stop() ends them. A
// forked child has none of them. Thread-safe.
class WorkPool final : public std::enable_shared_from_this<WorkPool> {
 public:
  using Work = std::function<void()>;
  static constexpr std::chrono::milliseconds kStall{50};

  // Nothing runs before start().
  static std::shared_ptr<WorkPool> make(int size, std::chrono::milliseconds stall = kStall);
  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  void start();
  // False after stop(): it is dropped.
  bool submit(Work work);
  // What is queued is dropped, or run first; threads end then. True: all of them have.
  enum class Queued { kDrop, kRun };
  bool stop(Queued queued, const Deadline& deadline);
  // False in a forked child of the process that made it.
  bool is_at_home() const;

  // A call of the task that runs on this thread, from when it is made until it has ended. Of none
  // elsewhere. Copies are of the same call.
  class Waiting {
   public:
    Waiting();
    void ended() const;

   private:
    struct State;
    std::shared_ptr<State> state_;
  };

  struct Stats {
    int size = 0;
    int idle = 0;  // tasks that could begin at once
  };
  Stats stats() const;

 private:
  struct Task;

  WorkPool(int size, std::chrono::milliseconds stall);
  using Lock = std::unique_lock<std::mutex>;
  void dispatch(Lock& lock);
  void work();
  void run(Lock& lock);
  void watch();
  void pass_over_longest();
  void began_to_wait(Task& task);
  void waits_no_more(Task& task);

  const pid_t home_;
  const int size_;
  const std::chrono::milliseconds stall_;
  mutable std::mutex mutex_;
  std::condition_variable work_came_;
  std::condition_variable watch_;
  std::condition_variable ended_;
  // Guarded by mutex_:
  std::deque<Work> queue_;
  bool started_ = false;
  bool stopping_ = false;
  bool watching_ = false;                   // there is a thread that looks whether anything goes on
  bool watch_sleeps_ = false;               // it has nothing to look at
  std::list<std::shared_ptr<Task>> tasks_;  // that run, the oldest first
  int running_ = 0;                         // of these, those that count
  int idle_ = 0;                            // threads
  int threads_ = 0;                         // with the one that watches
  std::uint64_t changes_ = 0;               // tasks that began or ended
};

}  // namespace convoy::python
