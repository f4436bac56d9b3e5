#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "base/concat.h"
#include "convoy/deadline.h"

namespace convoy::test {

// Whether a thread of this process sleeps.
inline bool is_asleep(pid_t tid) {
  std::ifstream file(concat("/proc/self/task/", tid, "/stat"));
  std::string text;
  std::getline(file, text);
  const std::size_t name = text.rfind(')');
  return name != std::string::npos && text.substr(name + 2, 1) == "S";
}
// Several times in a row: it does not only pass a lock.
inline void wait_until_asleep(const std::atomic<pid_t>& tid) {
  const Deadline limit = Deadline::after(std::chrono::seconds(20));
  for (int seen = 0; seen < 10 && !limit.expired(); std::this_thread::yield()) {
    seen = tid != 0 && is_asleep(tid) ? seen + 1 : 0;
  }
}

// A thread that will sleep.
class Sleeper {
 public:
  explicit Sleeper(const std::function<void()>& body)
      : thread_([this, body] {
          tid_ = ::gettid();
          body();
        }) {}
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;
  ~Sleeper() { thread_.join(); }

  void wait_until_asleep() const { convoy::test::wait_until_asleep(tid_); }

 private:
  std::atomic<pid_t> tid_{0};
  std::thread thread_;
};

}  // namespace convoy::test
