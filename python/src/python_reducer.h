#pragma once

#include <torch/csrc/utils/pybind.h>

namespace convoy::python {

// Adds Reducer and GradBucket to the module: what convoy.DistributedDataParallel is made of.
void add_reducer(pybind11::module_& module);

}  // namespace convoy::python
