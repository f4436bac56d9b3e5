#pragma once

#include <cstdint>

namespace convoy::rref::test {

// Three processes create values at each other, pass references around and drop them. Afterwards no
// value is left, and nobody refers to any.

// Letters are lost, doubled, delayed, reordered.
void run_faulty(std::uint64_t seed);
// One of them is killed, at a point that follows from the seed.
void run_kill(std::uint64_t seed);

}  // namespace convoy::rref::test
