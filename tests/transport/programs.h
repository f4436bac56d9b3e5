#pragma once

#include <cstdint>

#include "support.h"

namespace convoy::transport::test {

// Random programs of letters, each of which follows from its seed: some endpoints send each other
// letters of all shapes, hold and drop what was lent, close, come back, and cut connections.
// Checked against what a model says: order, contents, once and only once, lost once and last, every
// on_sent called once.
void run_programs(NetKind kind, std::uint64_t first_seed, std::uint64_t count);

}  // namespace convoy::transport::test
