#pragma once

#include "convoy/reducer.h"

// Comm hooks for DistributedDataParallel and Reducer: see docs/ddp.md.
namespace convoy::hooks {

// The mean over all ranks: what happens without a hook.
HookResult all_reduce(const GradBucket& bucket);
// Gradients stay this rank's own.
HookResult noop(const GradBucket& bucket);

}  // namespace convoy::hooks
