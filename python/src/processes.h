#pragma once

#include <torch/csrc/utils/pybind.h>

namespace convoy::python {

// Processes, published tensors and slots: convoy/spawn.h, published.h and slots.h as classes of the
// module.
void bind_processes(pybind11::module_& module);

}  // namespace convoy::python
