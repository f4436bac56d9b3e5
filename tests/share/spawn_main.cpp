#include "convoy/spawn.h"
#include "support/main.h"

int main(int argc, char** argv) {
  convoy::start(argc, argv);
  return convoy::test::test_main(argc, argv);
}
