#pragma once

#include <cstdint>

namespace convoy::rref::test {

// Seeded programs: some workers create values at each other, pass references around, ask for
// values and drop them, over endpoints of a simulated world that lose, double, delay and reorder
// letters, cut connections, and crash. Stops at the first that goes wrong.
void run_programs(std::uint64_t first_seed, std::uint64_t count);

}  // namespace convoy::rref::test
