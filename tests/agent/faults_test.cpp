// Calls over faulty endpoints, in simulated worlds: see programs.h.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "programs.h"

namespace convoy::agent::test {
namespace {

// CONVOY_AGENT_SEEDS=first:count runs others.
TEST(AgentFaultsTest, CallsEndAndAreExecutedOnceAtMost) {
  std::uint64_t first = 1;
  std::uint64_t count = 1000;
  if (const char* const chosen = std::getenv("CONVOY_AGENT_SEEDS")) {
    const std::string text = chosen;
    first = std::stoull(text);
    count = std::stoull(text.substr(text.find(':') + 1));
  }
  run_programs(first, count);
}

}  // namespace
}  // namespace convoy::agent::test
