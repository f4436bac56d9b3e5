#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "convoy/deadline.h"

namespace convoy::python {

// Runs work that may do anything, such as Python code that waits for calls. At most `size` tasks
// run at once, but for those that wait: a task counts no more while a call that it has made is
// under way (Waiting), and one more may run whenever none has begun or ended for a moment (`stall`)
// while some are queued. So tasks that wait for other tasks never stop for good, whatever the size.
//
// Threads are made when they are needed, belong to nobody, and keep the pool: stop() ends them.
// Thread-safe.
class WorkPool final : public std::enable_shared_from_this<WorkPool> {
 public:
  using Work = std::function<void()>;
  static constexpr std::chrono::milliseconds kStall{50};

  // Nothing runs before start().
  static std::shared_ptr<WorkPool> make(int size, std::chrono::milliseconds stall = kStall);
  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  void start();
  // After stop() it is dropped.
  void submit(Work work);
  // What is queued is dropped, or run first; threads end then. True: all of them have.
  enum class Queued { kDrop, kRun };
  bool stop(Queued queued, const Deadline& deadline);

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

  WorkPool(int size, std::chrono::milliseconds stall) : size_(size), stall_(stall) {}
  using Lock = std::unique_lock<std::mutex>;
  void dispatch(Lock& lock);
  void work();
  void run(Lock& lock);
  void watch();
  void began_to_wait(Task& task);
  void waits_no_more(Task& task);

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
  bool watching_ = false;      // there is a thread that looks whether anything goes on
  bool watch_sleeps_ = false;  // it has nothing to look at
  int extra_ = 0;              // may run besides `size`
  int running_ = 0;            // tasks that do not wait
  int idle_ = 0;               // threads
  int threads_ = 0;            // with the one that watches
  std::uint64_t changes_ = 0;  // tasks that began or ended
};

}  // namespace convoy::python
