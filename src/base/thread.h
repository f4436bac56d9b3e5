#pragma once

#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace convoy {

// A new thread. Where the system has no room for one it throws kResource; std::thread itself throws
// what is no Error.
template <class Thread = std::thread, class Function>
Thread start_thread(Function&& function) {
  try {
    return Thread(std::forward<Function>(function));
  } catch (const std::system_error& error) {
    fail(ErrorKind::kResource, "starting a thread: ", error.what(),
         "; end some, or raise the limit on processes (ulimit -u, pids.max of the cgroup)");
  }
}

}  // namespace convoy
