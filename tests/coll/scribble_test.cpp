// A rank that writes nonsense into the memory that the group shares gives the others errors: no
// hang, no crash. scribble_all_test.cpp has more seeds.
#include "scribble.h"

#include <gtest/gtest.h>

namespace convoy::coll::test {
namespace {

TEST(ScribbleTest, NonsenseInSharedMemoryIsAnError) {
  for (const int first : {0, 24}) scribble(first, 24);
}

}  // namespace
}  // namespace convoy::coll::test
