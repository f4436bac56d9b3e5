// Many random distributed programs. CONVOY_SEED: which ones; CONVOY_SEEDS: how many simulated ones.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "kill.h"
#include "programs.h"
#include "support/rank_group.h"

namespace convoy::autograd::programs {
namespace {

using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using namespace std::chrono_literals;

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}
std::uint64_t first_soak_seed() { return from_environment("CONVOY_SEED", 10'000); }
std::uint64_t soak_seeds() { return from_environment("CONVOY_SEEDS", 20'000); }

TEST(AutogradSoakTest, Simulated) { run_simulated(first_soak_seed(), soak_seeds(), false); }

TEST(AutogradSoakTest, SimulatedWithFaults) {
  const SentLetters letters = run_simulated(first_soak_seed(), soak_seeds(), true);
  for (const auto& [name, sent] : letters) {
    std::cout << name << ": " << sent.lost << " of " << sent.all << " lost\n";
  }
  EXPECT_EQ(never_lost(letters), std::vector<std::string>());
}

TEST(AutogradSoakTest, Processes) {
  for (const int workers : {2, 3, 4}) {
    RankGroup(workers, RankMode::kProcesses, {.limit = 1000s}).run([](Rank& r) {
      rpc::Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
      if (r.id() == 0) run_as_root(session, first_soak_seed(), 700);
      session.shutdown({.timeout = 1000s});
    });
  }
}

TEST(AutogradSoakTest, KilledWorkers) {
  for (const int first : {1, 5, 9}) kill_test::kill_workers_with_letters(first, first + 3);
}

}  // namespace
}  // namespace convoy::autograd::programs
