#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <thread>
#include <vector>

#include "os/wait.h"

namespace convoy::coll {

// Threads that help the calling thread with one large operation. Started at the first use; asleep
// between operations. Not thread-safe: one caller at a time.
class Workers {
 public:
  explicit Workers(int threads) : threads_(threads < 1 ? 1 : threads) {}
  ~Workers();

  int threads() const { return threads_; }

  // Runs part(0), ..., part(threads - 1), part(0) on the calling thread; returns when all are done.
  // `part` must not throw.
  void run(const std::function<void(int)>& part);

  // Divides [0, count) into one range a thread, with boundaries at multiples of `unit`, and calls
  // part(begin, end) for each.
  template <class Part>
  void split(std::size_t count, std::size_t unit, const Part& part) {
    if (threads_ == 1) return part(std::size_t{0}, count);
    const std::size_t share = (count / static_cast<std::size_t>(threads_) + unit) / unit * unit;
    const auto one = [&](int index) {
      const std::size_t begin = std::min(count, share * static_cast<std::size_t>(index));
      const std::size_t end = index + 1 == threads_ ? count : std::min(count, begin + share);
      if (begin < end) part(begin, end);
    };
    run(std::ref(one));  // by reference: nothing is allocated
  }

 private:
  void start();
  void work(int index);

  const int threads_;
  std::vector<std::jthread> helpers_;  // as many as could be started
  bool started_ = false;
  const std::function<void(int)>* part_ = nullptr;  // published by round_, read by helpers
  WaitWord round_;  // grows by one a run (release by the caller); kStop ends the helpers
  WaitWord done_;   // helpers that have finished this round (fetch_add, release)
};

}  // namespace convoy::coll
