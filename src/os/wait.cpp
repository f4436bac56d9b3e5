#include "os/wait.h"

#include <sched.h>

namespace convoy {

void yield_cpu() noexcept { sched_yield(); }

WaitPolicy WaitPolicy::for_ranks(int waiters, int cores) {
  if (waiters > cores) return {.spins = 0, .yields = 50};
  return {};
}

}  // namespace convoy
