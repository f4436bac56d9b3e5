// References of agents that talk by shared memory.
#include "rref/refs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/concat.h"
#include "base/random.h"
#include "convoy/rpc_error.h"
#include "team.h"
#include "transport/faulty.h"
#include "transport/shm/shm_endpoint.h"

namespace convoy::rref::test {
namespace {

using namespace std::chrono_literals;
using agent::test::error_text;
using testing::AllOf;
using testing::HasSubstr;

TEST(Refs, ValuesAreMadePassedFetchedAndDropped) {
  Team team(3);
  Ref ref = team[0].create(1, 42);
  EXPECT_TRUE(ref.confirmed());
  EXPECT_FALSE(ref.is_owner());
  EXPECT_EQ(team[0].fetch(ref), 42);
  team[0].give(2, {ref});
  team[0].give(1, {ref});
  team[0].give(0, {ref});
  const auto third = team[2].kept();
  const auto home = team[1].kept();
  ASSERT_EQ(third.size(), 1u);
  EXPECT_TRUE(third[0].confirmed());
  EXPECT_EQ(third[0].id(), ref.id());
  EXPECT_TRUE(home[0].is_owner());
  EXPECT_EQ(*static_cast<int*>(team[1].refs().value(home[0], Deadline::after(10s)).object.get()),
            42);
  EXPECT_EQ(team[0].kept()[0], ref);
  EXPECT_EQ(team[1].refs().debug_info().num_forks, 2u);
  EXPECT_EQ(team[1].refs().debug_info().num_owner_rrefs, 1u);
  EXPECT_EQ(team[1].refs().leaks().size(), 1u);
  ref = {};
  EXPECT_EQ(team[2].fetch(third[0]), 42);
}

TEST(Refs, NothingStaysWhenAllReferencesAreGone) {
  Team team(3);
  {
    std::vector<Ref> refs;
    for (int i = 0; i < 300; ++i) {
      refs.push_back(team[0].create(1, i));
      if (i % 100 == 99) team[0].give(2, {refs.end() - 100, refs.end()});
    }
    const Ref mine = team[0].refs().make({});
    team[0].give(1, {mine});
    team[0].give(2, {mine, mine});
    EXPECT_EQ(team[1].refs().debug_info().num_forks, 600u);
    for (std::size_t worker = 0; worker < 3; ++worker) team[worker].kept();
  }
  EXPECT_TRUE(team.becomes_empty());
}

TEST(Refs, CreationOnOneself) {
  Team team(1);
  const Ref ref = team[0].create(0, 5);
  EXPECT_TRUE(ref.is_owner());
  EXPECT_EQ(*static_cast<int*>(team[0].refs().value(ref, Deadline::after(10s)).object.get()), 5);
  const Ref failed = team[0].create(0, -1);
  const std::string text =
      error_text(ErrorKind::kRemote, [&] { team[0].refs().value(failed, Deadline::after(10s)); });
  EXPECT_THAT(text, HasSubstr("no such value"));
  team[0].give(0, {ref});
}

TEST(Refs, WhatAFunctionThrewIsThrownWhereTheValueIsWanted) {
  Team team(3);
  const Ref ref = team[0].create(1, -1);
  EXPECT_THAT(error_text(ErrorKind::kRemote, [&] { team[0].fetch(ref); }),
              HasSubstr("no such value"));
  team[0].give(2, {ref});
  const auto kept = team[2].kept();
  EXPECT_THAT(error_text(ErrorKind::kRemote, [&] { team[2].fetch(kept[0]); }),
              HasSubstr("no such value"));
}

TEST(Refs, ALostOwnerIsNamed) {
  Team team(3);
  const Ref ref = team[0].create(1, 1);
  std::atomic<int> told{0};
  ref.when_lost([&](const Failure*) { ++told; });
  team[1].end();
  const Deadline deadline = Deadline::after(60s);
  while (!ref.failure() && !deadline.expired()) std::this_thread::yield();
  ASSERT_TRUE(ref.failure());
  EXPECT_EQ(told.load(), 1);
  EXPECT_THAT(ref.failure()->text, AllOf(HasSubstr("worker1"), HasSubstr("owner")));
  EXPECT_THROW(team[0].give(2, {ref}), Error);
}

TEST(Refs, ALostUserHoldsNothing) {
  Team team(3);
  team[0].give(2, {team[0].create(1, 1)});
  EXPECT_EQ(team[1].alive.load(), 1);
  team[2].end();
  const Deadline deadline = Deadline::after(60s);
  while (team[1].alive.load() != 0 && !deadline.expired()) std::this_thread::yield();
  EXPECT_EQ(team[1].alive.load(), 0);
}

TEST(Refs, ShutdownEndsReferencesThatAreLeft) {
  Team team(3);
  const Ref ref = team[0].create(1, 1);
  team[0].give(2, {ref});
  const auto kept = team[2].kept();
  team.shutdown_all();
  EXPECT_EQ(team[1].alive.load(), 0);
  for (const Ref& each : {ref, kept[0]}) {
    ASSERT_TRUE(each.failure());
    EXPECT_THAT(each.failure()->text, HasSubstr("deleted"));
    EXPECT_FALSE(each.confirmed());
    EXPECT_THAT(error_text(ErrorKind::kInvalidArgument, [&] { team[0].refs().pass(each, 1); }),
                HasSubstr("deleted"));
  }
}

TEST(Refs, AShutdownThatTimesOutSaysWhoHoldsWhat) {
  Team team(3);
  const Ref ref = team[0].create(1, 1);
  team[0].give(2, {ref});
  // The others do not come.
  const std::string text =
      error_text(ErrorKind::kTimeout, [&] { team[1].agent().shutdown(Deadline::after(100ms)); });
  EXPECT_THAT(text, HasSubstr("RRef (worker1, #1 of worker0) is held by worker0, worker2"));
  EXPECT_EQ(team[0].fetch(ref), 1) << "the session goes on";
}

TEST(Refs, ReferencesOutliveTheirSession) {
  Ref ref;
  Ref mine;
  {
    Team team(2);
    ref = team[0].create(1, 1);
    mine = team[0].refs().make({});
  }
  ASSERT_TRUE(ref.failure());
  EXPECT_FALSE(ref.confirmed());
  std::atomic<int> told{0};
  ref.when_confirmed([&](const Failure* failure) { told += failure ? 1 : 100; });
  EXPECT_EQ(told.load(), 1);
  const Ref copy = ref;  // NOLINT(performance-unnecessary-copy-initialization)
  EXPECT_EQ(copy, ref);
}

// Many threads of many workers, and letters that meet faults.
class RefsUnderFaults : public testing::TestWithParam<int> {};

TEST_P(RefsUnderFaults, NothingStays) {
  const auto seed = static_cast<std::uint64_t>(GetParam());
  const bool faulty = GetParam() != 0;
  Team team(3, [&](agent::AgentOptions& options) {
    options.call_timeout = faulty ? 1s : 60s;
    if (!faulty) return;
    options.make_endpoint = [&, worker = options.rank](transport::Inbox& inbox) {
      return transport::make_faulty(
          inbox,
          {.seed = 100 * seed + worker,
           .rules = {{.drop = 30'000, .duplicate = 50'000, .reorder = 50'000, .delay = 50'000}}},
          [](transport::Inbox& inner) { return shm::make_shm_endpoint(inner); });
    };
  });
  std::vector<std::thread> threads;
  for (std::size_t worker = 0; worker < 3; ++worker) {
    for (std::uint64_t thread = 0; thread < 2; ++thread) {
      threads.emplace_back([&, worker, thread] {
        Random random(seed * 1000 + worker * 10 + thread);
        std::vector<Ref> refs;
        for (int i = 0; i < (faulty ? 25 : 250); ++i) team[worker].act(refs, random, faulty);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(team.becomes_empty());
}

INSTANTIATE_TEST_SUITE_P(Seeds, RefsUnderFaults, testing::Values(0, 1, 2), [](const auto& test) {
  return test.param == 0 ? std::string("NoFaults") : concat("Seed", test.param);
});

}  // namespace
}  // namespace convoy::rref::test
