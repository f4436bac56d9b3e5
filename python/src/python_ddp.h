#pragma once

#include <torch/csrc/utils/pybind.h>

namespace convoy::python {

// Adds Joinable, Join, DdpCore and JoinPart to the module: what convoy.DistributedDataParallel and
// convoy.Join are made of. After add_reducer().
void add_ddp(pybind11::module_& module);

}  // namespace convoy::python
