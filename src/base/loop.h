#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/guarded.h"
#include "base/unique_fd.h"
#include "convoy/deadline.h"

namespace convoy {

// An epoll loop: descriptors, timers and posted functions, all run on the one thread inside run()
// or run_once(). Time is that of Deadline::Clock.
//
// post(), stop(), run_once() and in_loop() may be called from any thread; everything else only on
// the loop's thread, or while no thread is in it. Handlers must not throw: run() lets what they
// throw end the loop and reach the caller of run(), which may run() again: nothing posted is lost.
// A handler may remove any watch or timer, its own included.
class Loop {
 public:
  using Callback = std::function<void()>;
  using IoCallback = std::function<void(std::uint32_t events)>;  // EPOLLIN, EPOLLHUP, ...
  using WatchId = std::uint64_t;
  using TimerId = std::uint64_t;

  Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Runs handlers until stop(). Functions posted before stop() have run when it returns; those
  // posted later wait for the next run().
  void run();
  // What run() does, once: runs what is there, or what comes first by the deadline. For threads
  // that take turns in the loop. False: another one is in it.
  bool run_once(const Deadline& deadline);
  // Ends the run() under way, or the next one.
  void stop();
  // Wakes the loop only for the first function that it has not seen yet.
  void post(Callback function);
  bool in_loop() const {
    return std::this_thread::get_id() == thread_.load(std::memory_order_relaxed);
  }

  // Calls `callback` when `fd` has one of `events` (EPOLLIN, EPOLLOUT; errors and hang-ups always).
  // The caller keeps the descriptor open until unwatch().
  WatchId watch(int fd, std::uint32_t events, IoCallback callback);
  void modify(WatchId id, std::uint32_t events);
  void unwatch(WatchId id);

  TimerId call_at(Deadline::Clock::time_point when, Callback callback);
  void cancel(TimerId id);  // O(log n)

 private:
  struct Watch {
    int fd;
    IoCallback callback;
  };
  struct Inbox {
    std::vector<Callback> functions;
    bool stop = false;
  };

  class Presence;
  void wake();
  void wait_on_loop(const Deadline& deadline);
  void run_timers_on_loop();
  void handle_on_loop(std::uint64_t id, std::uint32_t events);
  void run_batch_on_loop(std::vector<Callback> functions);
  bool run_inbox_on_loop();  // false: stop was asked for

  UniqueFd epoll_;
  UniqueFd wake_;  // eventfd
  Guarded<Inbox> inbox_;
  std::unordered_map<WatchId, std::shared_ptr<Watch>> watches_;
  std::map<std::pair<Deadline::Clock::time_point, TimerId>, Callback> timers_;
  std::unordered_map<TimerId, Deadline::Clock::time_point> due_;  // of each timer
  std::uint64_t next_id_ = 1;
  // Who is in it. Taken in acquire order and given back in release order: what the last one did is
  // seen by the next. Else only the thread itself must see its own entry: relaxed.
  std::atomic<std::thread::id> thread_{};
};

// A Loop on a thread of its own, named for debuggers; stopped and joined by the destructor.
class LoopThread {
 public:
  explicit LoopThread(const std::string& name);
  ~LoopThread();  // NOLINT(bugprone-exception-escape): see there

  Loop& loop() { return loop_; }
  // Runs `function` on the loop and waits for it; rethrows what it throws. From the loop itself it
  // runs at once. Throws kInternal after join().
  void call(const std::function<void()>& function);
  // Ends and joins the thread (idempotent). Not from the loop itself.
  void join();

 private:
  Loop loop_;
  Guarded<bool> ended_{false};
  const pid_t owner_ = ::getpid();
  std::jthread thread_;
};

// Shown by ps, gdb and top; at most 15 characters are kept.
void set_thread_name(const std::string& name);

}  // namespace convoy
