#pragma once

#include <cstdint>

namespace convoy::transport::test {

// So many processes send each other letters of all shapes: everybody to everybody, or from 9 on
// everybody to rank 0 and back. One is killed at a point that follows from the seed: while it
// writes a letter into a ring, while it fills one that has gone, in a call of its inbox, after a
// letter, or by somebody else at any time. Every survivor that knew it hears of it, by name; what
// arrives is whole; nothing leaks.
void run_kill(int ranks, std::uint64_t seed);

}  // namespace convoy::transport::test
