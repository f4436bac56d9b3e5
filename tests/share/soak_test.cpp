// Kills at random points, with many seeds. CONVOY_SEEDS=first:count runs others.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "kill.h"

namespace convoy::share::test {
namespace {

TEST(ShareSoakTest, KilledAtRandomPoints) {
  unsigned first = 100, count = 25;  // of eight victims each
  if (const char* const chosen = std::getenv("CONVOY_SEEDS")) {
    std::string text = chosen;
    first = static_cast<unsigned>(std::stoul(text));
    count = static_cast<unsigned>(std::stoul(text.substr(text.find(':') + 1)));
  }
  for (unsigned seed = first; seed < first + count && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    run_kills(8, seed);
  }
}

}  // namespace
}  // namespace convoy::share::test
