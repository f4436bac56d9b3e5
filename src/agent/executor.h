#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "convoy/error.h"

namespace convoy::agent {

// Something to do on a thread of an Executor.
class Task {
 public:
  Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

 protected:
  ~Task() = default;

 private:
  friend class Executor;
  virtual void run_task() noexcept = 0;
  // Instead of it, if the executor has ended.
  virtual void discard() noexcept = 0;
  // Instead of it, if there is no thread for it, and none that would come by later.
  virtual void refuse(const Error& error) noexcept = 0;

  Task* next_ = nullptr;
};

struct ExecutorStats {
  int size = 0;
  int running = 0;  // that do not wait
  int waiting = 0;  // in a wait of ours
  int threads = 0;
  std::size_t queued = 0;
};

// Runs tasks, of which at most `size` run at once. One that waits (Executor::Waiting) does not
// count: another one runs meanwhile, on another thread. So tasks that wait for what other tasks do
// never keep these from running, whatever the size. When its wait is over it goes on at once, even
// if there are `size` others then.
//
// Threads are made when they are needed; those above `size` end when there is nothing for them.
class Executor {
 public:
  // Starts a thread that the executor does not join, and that ends when there is nothing to do: in
  // a simulation. Nullptr: its own threads.
  using Starter = std::function<void(std::function<void()>)>;

  explicit Executor(int size, Starter starter = nullptr);
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  ~Executor();

  // In order, as there is room. After stop() it is discarded. If no more threads can be made it
  // waits for one that runs; if there is none, or all of them wait, it is refused.
  void submit(Task& task) noexcept;

  // A task that runs right here, on a thread that is not the executor's. False: there are `size`
  // others, or some wait for their turn.
  bool try_enter() noexcept;
  void leave() noexcept;

  // While one lives, the task of this thread waits. Elsewhere it does nothing.
  class Waiting {
   public:
    Waiting() noexcept;
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    ~Waiting();

   private:
    Executor* const executor_;
  };

  // Whether this thread runs a task of this executor.
  bool is_here() const noexcept;
  // Whether it runs one of any executor's that waits: this is a callback then.
  static bool is_waiting() noexcept;

  // What is queued is discarded; waits for tasks that run. Not in one of them.
  void stop() noexcept;

  ExecutorStats stats() const;

 private:
  class Here;

  void begin_waiting() noexcept;
  void end_waiting() noexcept;
  using Lock = std::unique_lock<std::mutex>;
  void dispatch(Lock& lock) noexcept;
  void refuse_all(Lock& lock, const Error& error) noexcept;
  void work() noexcept;
  Task* pop() noexcept;

  const int size_;
  const Starter starter_;
  mutable std::mutex mutex_;
  std::condition_variable work_came_;
  std::condition_variable thread_ended_;
  // Guarded by mutex_:
  Task* first_ = nullptr;
  Task* last_ = nullptr;
  std::size_t queued_ = 0;
  int running_ = 0;  // tasks that do not wait, and threads that are on their way to one
  int waiting_ = 0;
  int idle_ = 0;     // threads
  int called_ = 0;   // of the idle ones: have a place in running_, and are being woken
  int threads_ = 0;  // that have not ended
  bool stopping_ = false;
  std::map<std::thread::id, std::thread> own_;
  std::vector<std::thread> ended_;  // to be joined
};

}  // namespace convoy::agent
