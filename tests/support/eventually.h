// Polls what has no event of its own.
#pragma once

#include <chrono>
#include <thread>

#include "convoy/deadline.h"

namespace convoy::test {

// Whether the condition came to hold within half a minute.
template <class Condition>
bool eventually(Condition condition) {
  const auto deadline = Deadline::after(std::chrono::seconds(30));
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace convoy::test
