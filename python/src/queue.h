#pragma once

#include <torch/csrc/utils/pybind.h>

namespace convoy::python {

// Queues and events, and Shared, which both are.
void bind_queue(pybind11::module_& module);

}  // namespace convoy::python
