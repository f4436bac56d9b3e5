#include <gtest/gtest.h>

#include "scribble.h"

namespace convoy::coll::test {
namespace {

TEST(ScribbleAllTest, NonsenseInSharedMemoryIsAnError) {
  for (int first = 100; first < 700; first += 12) scribble(first, 12);
}

}  // namespace
}  // namespace convoy::coll::test
