#pragma once

namespace convoy::test {

// What the main of every test program does: leak oracle, ranks, stack dumps, a temporary folder of
// its own. For programs whose main must do more (MPI_Init).
int test_main(int argc, char** argv);

}  // namespace convoy::test
