// Random distributed programs beside one process.
#include <gtest/gtest.h>

#include <cstdlib>

#include "programs.h"
#include "support/rank_group.h"

namespace convoy::autograd::programs {
namespace {

using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}
// CONVOY_SEED and CONVOY_SEEDS: which ones, and how many.
std::uint64_t first_seed() { return from_environment("CONVOY_SEED", 0); }
std::uint64_t seeds(std::uint64_t otherwise) { return from_environment("CONVOY_SEEDS", otherwise); }

TEST(AutogradRandomTest, Simulated) { run_simulated(first_seed(), seeds(150), false); }

TEST(AutogradRandomTest, SimulatedWithFaults) { run_simulated(first_seed(), seeds(150), true); }

TEST(AutogradRandomTest, Processes) {
  RankGroup(3, RankMode::kProcesses).run([](Rank& r) {
    rpc::Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
    if (r.id() == 0) run_as_root(session, first_seed(), seeds(50));
    session.shutdown();
  });
}

}  // namespace
}  // namespace convoy::autograd::programs
