#pragma once

#include "support.h"

namespace convoy::share::test {

// One process sends and receives with `victims` others, which are killed at random points. It ends
// with nothing held.
void run_kills(int victims, unsigned seed);

}  // namespace convoy::share::test
