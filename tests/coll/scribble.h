#pragma once

namespace convoy::coll::test {

// Groups of three ranks, one for each seed from `first` on, all at once: while they use the group,
// one of them writes nonsense into the memory that they share. Each call must end, with values or
// with an Error; what else happens fails the test.
void scribble(int first, int seeds);

}  // namespace convoy::coll::test
