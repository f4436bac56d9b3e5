#pragma once

#include "launch/options.h"

namespace convoy::launch {

// `convoy run`: the process the user started. Forks the supervisor, passes signals and standard
// input on to it, and relays its exit status. If the supervisor is killed, ends what is left of the
// job. To be called before the process has threads.
int run_guardian(RunOptions options);

}  // namespace convoy::launch
