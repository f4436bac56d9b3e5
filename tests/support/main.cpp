#include "support/main.h"

int main(int argc, char** argv) { return convoy::test::test_main(argc, argv); }
