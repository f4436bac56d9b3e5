#pragma once

#include <cstdint>

namespace convoy::agent::test {

// Three workers, which are processes, call each other, also nested and with large pieces. One is
// killed at a point that follows from the seed: while it writes a call, in a handler, when an
// answer arrives, between two calls, or by somebody else at any time. Every call of the survivors
// to it ends, with its result or as lost, by name; calls between survivors go on.
void run_kill(std::uint64_t seed);

}  // namespace convoy::agent::test
