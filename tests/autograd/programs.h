#pragma once

#include <cstdint>
#include <vector>

#include "convoy/autograd.h"

namespace convoy::autograd::programs {

// Random programs of calls, each of which follows from its seed: 2 to 4 workers compute with their
// parameters, call each other, nested and in cycles, with one tensor or several, use some results
// and drop others, work in place and on views. Gradients of what comes out are those of one
// process.

// In a simulated world. Faulty: letters of the backward passes are dropped, doubled and delayed,
// and workers crash; a pass is exact then, or fails with a worker's name and changes nothing.
void run_simulated(std::uint64_t first_seed, std::uint64_t count, bool faulty);

// As worker 0 of a session whose other workers only serve.
void run_as_root(const rpc::Session& session, std::uint64_t first_seed, std::uint64_t count);

}  // namespace convoy::autograd::programs
