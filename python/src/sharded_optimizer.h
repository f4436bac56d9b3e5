#pragma once

#include <torch/csrc/utils/pybind.h>

namespace convoy::python {

// ShardedOptimizer, over the reducer of add_reducer().
void add_sharded_optimizer(pybind11::module_& module);

}  // namespace convoy::python
