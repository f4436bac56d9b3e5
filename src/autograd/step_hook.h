#pragma once

#include <cstddef>
#include <vector>

#include "convoy/autograd.h"

namespace convoy::rpc::detail {
class SessionImpl;
}

// Where optimizers meet backward passes: the layer above sets what a worker does at the end of its
// part of a pass that has BackwardOptions::optimizers.
namespace convoy::autograd::detail {

// Steps all parameters of this worker that have a gradient, or none and throws; none, if it has
// none of these optimizers. Counts in `begun` those that it begins with, also if it throws in the
// middle.
using StepHook = void (*)(rpc::detail::SessionImpl& session, const std::vector<StepId>& optimizers,
                          const Gradients& gradients, std::size_t& begun);
// Before main().
bool set_step_hook(StepHook hook);
StepHook step_hook();

}  // namespace convoy::autograd::detail
