#pragma once

#include <torch/csrc/utils/pybind.h>

#include "convoy/share.h"

namespace convoy::python {

// Channels and shared memory: convoy/share.h as classes of the module.
void bind_share(pybind11::module_& module);

// Lists of plain values, as _share.py makes them.
share::Message to_message(const pybind11::list& values);
pybind11::list to_list(const share::Message& message);

}  // namespace convoy::python
