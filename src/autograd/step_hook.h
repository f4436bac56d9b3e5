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

// The parameters of this worker that it has stepped; 0 if it has none of these optimizers.
using StepHook = std::size_t (*)(rpc::detail::SessionImpl& session,
                                 const std::vector<StepId>& optimizers, const Gradients& gradients);
// Before main().
bool set_step_hook(StepHook hook);
StepHook step_hook();

}  // namespace convoy::autograd::detail
