#pragma once

#include <chrono>

#include "convoy/deadline.h"

namespace convoy::python {

// Python's times are seconds, as numbers.
inline Deadline deadline_of(double seconds) {
  return Deadline::after(std::chrono::duration<double>(seconds));
}

}  // namespace convoy::python
