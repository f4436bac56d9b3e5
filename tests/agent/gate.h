#pragma once

#include <atomic>
#include <string>
#include <thread>

#include "agent/support.h"

namespace convoy::agent::test {

// Answers when it is told to.
struct Gate {
  std::atomic<bool> open{false};
  std::atomic<int> inside{0};
  std::atomic<int> most{0};

  TestFunction function_of(const std::string& name) {
    return function(name, [this](Request& request, const std::string& text) {
      const int now = ++inside;
      int seen = most.load();
      while (seen < now && !most.compare_exchange_weak(seen, now)) {
      }
      while (!open.load() && !request.cancelled()) std::this_thread::yield();
      --inside;
      return text;
    });
  }
};

}  // namespace convoy::agent::test
