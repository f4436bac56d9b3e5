// Ranks that shrink leaves out, stopped at random points. CONVOY_SEEDS=first:count runs others.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "ddp/excluded.h"

namespace convoy::test {
namespace {

TEST(ExcludedSoakTest, StoppedAtRandomPoints) {
  unsigned first = 0, count = 200;
  if (const char* const chosen = std::getenv("CONVOY_SEEDS")) {
    const std::string text = chosen;
    first = static_cast<unsigned>(std::stoul(text));
    count = static_cast<unsigned>(std::stoul(text.substr(text.find(':') + 1)));
  }
  for (unsigned seed = first; seed < first + count && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    run_excluded(kAllBefore[seed % std::size(kAllBefore)], seed);
  }
}

}  // namespace
}  // namespace convoy::test
