#include "processes.h"

#include <signal.h>
#include <unistd.h>

#include <thread>

#include "base/concat.h"
#include "base/random.h"
#include "support/rank_group.h"
#include "team.h"
#include "transport/faulty.h"
#include "transport/shm/fabric.h"
#include "transport/shm/shm_endpoint.h"

namespace convoy::rref::test {
namespace {

using namespace std::chrono_literals;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;

constexpr int kWorkers = 3;

agent::AgentOptions options_of(const Rank& rank) {
  return {.name = concat("worker", rank.id()), .rank = static_cast<WorkerId>(rank.id())};
}

void meet(Rank& rank, Worker& worker) {
  worker.agent().meet(*rank.store(), kWorkers, rank.deadline());
  worker.met_all();
  rank.barrier();
}

void expect_empty(const Rank& rank, Worker& worker) {
  while (!worker.is_empty() && !rank.deadline().expired()) std::this_thread::yield();
  EXPECT_EQ(worker.alive.load(), 0);
  EXPECT_EQ(worker.refs().leaks(), std::vector<std::string>{});
  EXPECT_EQ(worker.refs().debug_info().num_pending_users, 0u);
}

// Those who are left wait for each other, so that nobody leaves while others need it.
void wait_for_others(const Rank& rank, const std::string& what, int but) {
  rank.store()->set(concat(what, "/", rank.id()), "");
  for (int other = 0; other < kWorkers; ++other) {
    if (other != but) rank.store()->get(concat(what, "/", other), rank.deadline());
  }
}

void leave(Worker& worker) {
  worker.end();
  shm::Fabric::instance().close_door(Id{});
}

}  // namespace

void run_faulty(std::uint64_t seed) {
  RankGroup group(kWorkers, RankMode::kProcesses, {.limit = 100s});
  group.start([&](Rank& rank) {
    Random random(seed * 10 + static_cast<std::uint64_t>(rank.id()));
    auto options = options_of(rank);
    options.call_timeout = 100ms;
    const auto chance = [&](std::uint32_t most) {
      return static_cast<std::uint32_t>(random.below(most));
    };
    const transport::Faults faults{.seed = random.next(),
                                   .rules = {{.drop = chance(100'000),
                                              .duplicate = chance(100'000),
                                              .reorder = chance(100'000),
                                              .delay = chance(100'000)}}};
    options.make_endpoint = [&](transport::Inbox& inbox) {
      return transport::make_faulty(
          inbox, faults, [](transport::Inbox& inner) { return shm::make_shm_endpoint(inner); });
    };
    Worker worker(options);
    meet(rank, worker);
    {
      std::vector<Ref> held;
      for (int i = 0; i < 20; ++i) worker.act(held, random, /*faulty=*/true);
    }
    worker.keeps = false;
    wait_for_others(rank, "done", -1);
    expect_empty(rank, worker);
    wait_for_others(rank, "empty", -1);
    leave(worker);
  });
  convoy::test::report(group.collect());
}

void run_kill(std::uint64_t seed) {
  Random plan(seed);
  const int victim = static_cast<int>(plan.below(kWorkers));
  const bool in_function = plan.below(2) == 0;
  const std::uint64_t count = plan.below(40);
  RankGroup group(kWorkers, RankMode::kProcesses, {.limit = 100s});
  group.start([&](Rank& rank) {
    Random random(seed * 10 + static_cast<std::uint64_t>(rank.id()));
    Worker worker(options_of(rank));
    std::atomic<std::uint64_t> points{0};
    const auto reach = [&] {
      if (rank.id() == victim && points.fetch_add(1) == count) ::kill(::getpid(), SIGKILL);
    };
    if (in_function) worker.in_function = reach;
    meet(rank, worker);
    {
      std::vector<Ref> held;
      while (!worker.agent().is_lost(static_cast<WorkerId>(victim)) && !rank.deadline().expired()) {
        worker.act(held, random, /*faulty=*/true);
        if (!in_function) reach();
      }
      for (int i = 0; i < 20; ++i) worker.act(held, random, /*faulty=*/true);
    }
    worker.keeps = false;
    wait_for_others(rank, "done", victim);
    expect_empty(rank, worker);
    wait_for_others(rank, "empty", victim);
    leave(worker);
  });
  auto results = group.collect();
  if (results.empty()) return;
  if (!convoy::test::in_rank()) {
    EXPECT_EQ(results[static_cast<std::size_t>(victim)].status.signal, SIGKILL) << "seed " << seed;
  }
  results.erase(results.begin() + victim);
  convoy::test::report(results);
}

}  // namespace convoy::rref::test
