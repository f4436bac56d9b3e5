#pragma once

#include <cstdint>

namespace convoy::agent::test {

// Random programs of calls in a simulated world, each of which follows from its seed: a few workers
// call each other, nested, with and without limits and large pieces, cancel some, and some crash.
// Letters are dropped, delayed, doubled and overtaken, and connections cut. Every call ends, with
// its own result or with an error that names a worker; none is executed twice; nothing is left.
void run_programs(std::uint64_t first_seed, std::uint64_t count);

}  // namespace convoy::agent::test
