#include "os/wait.h"

#include <sched.h>

#include "os/machine.h"

namespace convoy {

void yield_cpu() noexcept { sched_yield(); }

WaitPolicy WaitPolicy::for_ranks(int waiters) {
  if (waiters > usable_cores()) return {.spins = 0, .yields = 50};
  return {};
}

}  // namespace convoy
