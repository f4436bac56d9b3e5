#pragma once

#include <chrono>

#include "convoy/deadline.h"

namespace convoy::test {

// Far enough away that only a hang reaches it, also on a busy machine.
inline Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }
// Passed, for calls that shall not wait.
inline Deadline at_once() { return Deadline::after(std::chrono::seconds(0)); }

}  // namespace convoy::test
