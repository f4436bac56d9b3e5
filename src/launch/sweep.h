#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "base/loop.h"

namespace convoy::launch {

// Ends what ranks have left running below this process (a subreaper): background children, daemons.
// They get a moment to end of themselves, then SIGTERM, then SIGKILL until none is left. On the
// loop's thread.
class Sweep {
 public:
  explicit Sweep(Loop& loop) : loop_(loop) {}
  ~Sweep();

  // `kept` are children that are not to be reaped here; `done` is called once.
  void start(std::chrono::nanoseconds grace, std::set<pid_t> kept, std::function<void()> done);
  // No more patience, now or when it starts.
  void kill_now();
  // After each SIGCHLD.
  void child_ended();

  bool active() const { return stage_ != Stage::kIdle && stage_ != Stage::kDone; }
  // "sleep (pid 4711)": told to end, and those that did not.
  const std::vector<std::string>& ended() const { return ended_; }
  const std::vector<std::string>& unkillable() const { return unkillable_; }

 private:
  enum class Stage { kIdle, kWaiting, kAsked, kKilling, kDone };

  bool none_left();
  void next_stage();
  void kill_round();
  void finish();
  void set_timer(std::chrono::nanoseconds delay, void (Sweep::*step)());
  std::vector<std::string> describe_left() const;

  Loop& loop_;
  Stage stage_ = Stage::kIdle;
  bool merciless_ = false;
  std::chrono::nanoseconds grace_{};
  std::set<pid_t> kept_;
  std::function<void()> done_;
  Loop::TimerId timer_ = 0;
  Loop::TimerId round_ = 0;
  std::vector<std::string> ended_;
  std::vector<std::string> unkillable_;
};

}  // namespace convoy::launch
