#pragma once

#include <functional>
#include <utility>

namespace convoy::share::test {

// What the queues of this process do at each step after which a process may end: end there, throw,
// count. Set before threads use them.
class QueueSteps {
 public:
  using Hook = std::function<void(const char* where)>;

  explicit QueueSteps(Hook hook) { current() = std::move(hook); }
  QueueSteps(const QueueSteps&) = delete;
  QueueSteps& operator=(const QueueSteps&) = delete;
  ~QueueSteps() { current() = nullptr; }

  static void reached(const char* where) {
    if (current()) current()(where);
  }

 private:
  static Hook& current() {
    static Hook hook;
    return hook;
  }
};

}  // namespace convoy::share::test
