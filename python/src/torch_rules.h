#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "convoy/optimizer_rules.h"

namespace convoy::python {

// A group of one of torch.optim's classes as a rule. Throws kUnsupported for other classes, and
// Python's KeyError for a group without a value that its class has.
OptimizerRule rule_of(const std::string& kind, const pybind11::dict& group);

}  // namespace convoy::python
