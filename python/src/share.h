#pragma once

#include <torch/csrc/utils/pybind.h>

namespace convoy::python {

// Channels and shared memory: convoy/share.h as classes of the module.
void bind_share(pybind11::module_& module);

}  // namespace convoy::python
