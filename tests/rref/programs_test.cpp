#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "programs.h"

namespace convoy::rref::test {
namespace {

// CONVOY_RREF_SEEDS=first:count runs others.
TEST(RRefPrograms, NoValueIsFreedWhileReferredToAndNoneStays) {
  std::uint64_t first = 1;
  std::uint64_t count = 6000;
  if (const char* const chosen = std::getenv("CONVOY_RREF_SEEDS")) {
    const std::string text = chosen;
    first = std::stoull(text);
    count = std::stoull(text.substr(text.find(':') + 1));
  }
  run_programs(first, count);
}

}  // namespace
}  // namespace convoy::rref::test
