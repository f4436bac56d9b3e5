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
  Ref ref = team.create(0, 1, 42);
  EXPECT_TRUE(ref.confirmed());
  EXPECT_FALSE(ref.is_owner());
  EXPECT_EQ(team.fetch(0, ref), 42);
  team.give(0, 2, {ref});
  team.give(0, 1, {ref});
  team.give(0, 0, {ref});
  const auto third = team.kept(2);
  const auto home = team.kept(1);
  ASSERT_EQ(third.size(), 1u);
  EXPECT_TRUE(third[0].confirmed());
  EXPECT_EQ(third[0].id(), ref.id());
  EXPECT_TRUE(home[0].is_owner());
  EXPECT_EQ(*static_cast<int*>(team[1].value(home[0], Deadline::after(10s)).object.get()), 42);
  EXPECT_EQ(team.kept(0)[0], ref);
  EXPECT_EQ(team[1].debug_info().num_forks, 2u);
  EXPECT_EQ(team[1].debug_info().num_owner_rrefs, 1u);
  EXPECT_EQ(team[1].leaks().size(), 1u);
  ref = {};
  EXPECT_EQ(team.fetch(2, third[0]), 42);
}

TEST(Refs, NothingStaysWhenAllReferencesAreGone) {
  Team team(3);
  {
    std::vector<Ref> refs;
    for (int i = 0; i < 300; ++i) {
      refs.push_back(team.create(0, 1, i));
      if (i % 100 == 99) team.give(0, 2, {refs.end() - 100, refs.end()});
    }
    const Ref mine = team[0].make({});
    team.give(0, 1, {mine});
    team.give(0, 2, {mine, mine});
    EXPECT_EQ(team[1].debug_info().num_forks, 600u);
    for (std::size_t worker = 0; worker < 3; ++worker) team.kept(worker);
  }
  EXPECT_TRUE(team.becomes_empty());
}

TEST(Refs, CreationOnOneself) {
  Team team(1);
  const Ref ref = team.create(0, 0, 5);
  EXPECT_TRUE(ref.is_owner());
  EXPECT_EQ(*static_cast<int*>(team[0].value(ref, Deadline::after(10s)).object.get()), 5);
  const Ref failed = team.create(0, 0, -1);
  const std::string text =
      error_text(ErrorKind::kRemote, [&] { team[0].value(failed, Deadline::after(10s)); });
  EXPECT_THAT(text, HasSubstr("no such value"));
  team.give(0, 0, {ref});
}

TEST(Refs, WhatAFunctionThrewIsThrownWhereTheValueIsWanted) {
  Team team(3);
  const Ref ref = team.create(0, 1, -1);
  EXPECT_THAT(error_text(ErrorKind::kRemote, [&] { team.fetch(0, ref); }),
              HasSubstr("no such value"));
  team.give(0, 2, {ref});
  const auto kept = team.kept(2);
  EXPECT_THAT(error_text(ErrorKind::kRemote, [&] { team.fetch(2, kept[0]); }),
              HasSubstr("no such value"));
}

TEST(Refs, ALostOwnerIsNamed) {
  Team team(3);
  const Ref ref = team.create(0, 1, 1);
  std::atomic<int> told{0};
  ref.when_lost([&](const Failure*) { ++told; });
  team.end(1);
  const Deadline deadline = Deadline::after(60s);
  while (!ref.failure() && !deadline.expired()) std::this_thread::yield();
  ASSERT_TRUE(ref.failure());
  EXPECT_EQ(told.load(), 1);
  EXPECT_THAT(ref.failure()->text, AllOf(HasSubstr("worker1"), HasSubstr("owner")));
  EXPECT_THROW(team.give(0, 2, {ref}), Error);
}

TEST(Refs, ALostUserHoldsNothing) {
  Team team(3);
  team.give(0, 2, {team.create(0, 1, 1)});
  EXPECT_EQ(team.alive.load(), 1);
  team.end(2);
  const Deadline deadline = Deadline::after(60s);
  while (team.alive.load() != 0 && !deadline.expired()) std::this_thread::yield();
  EXPECT_EQ(team.alive.load(), 0);
}

TEST(Refs, ShutdownEndsReferencesThatAreLeft) {
  Team team(3);
  const Ref ref = team.create(0, 1, 1);
  team.give(0, 2, {ref});
  const auto kept = team.kept(2);
  team.shutdown_all();
  EXPECT_EQ(team.alive.load(), 0);
  for (const Ref& each : {ref, kept[0]}) {
    ASSERT_TRUE(each.failure());
    EXPECT_THAT(each.failure()->text, HasSubstr("deleted"));
    EXPECT_FALSE(each.confirmed());
    EXPECT_THAT(error_text(ErrorKind::kInvalidArgument, [&] { team[0].pass(each, 1); }),
                HasSubstr("deleted"));
  }
}

TEST(Refs, AShutdownThatTimesOutSaysWhoHoldsWhat) {
  Team team(3);
  const Ref ref = team.create(0, 1, 1);
  team.give(0, 2, {ref});
  // The others do not come.
  const std::string text =
      error_text(ErrorKind::kTimeout, [&] { team.agent(1).shutdown(Deadline::after(100ms)); });
  EXPECT_THAT(text, HasSubstr("RRef (worker1, #1 of worker0) is held by worker0, worker2"));
  EXPECT_EQ(team.fetch(0, ref), 1) << "the session goes on";
}

TEST(Refs, ReferencesOutliveTheirSession) {
  Ref ref;
  Ref mine;
  {
    Team team(2);
    ref = team.create(0, 1, 1);
    mine = team[0].make({});
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
        for (int i = 0; i < (faulty ? 20 : 200); ++i) {
          try {
            switch (random.below(4)) {
              case 0: refs.push_back(team.create(worker, random.below(3), i)); break;
              case 1:
                if (!refs.empty()) {
                  team.give(worker, random.below(3), {refs[random.below(refs.size())]});
                }
                break;
              case 2:
                for (Ref& ref : team.kept(worker)) refs.push_back(std::move(ref));
                break;
              default:
                if (refs.size() > 3) refs.erase(refs.begin(), refs.begin() + 2);
                break;
            }
          } catch (const Error& error) {
            EXPECT_TRUE(faulty) << error.what();
          }
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t worker = 0; worker < 3; ++worker) team.kept(worker);
  // A call that its caller gave up may still have brought some.
  const Deadline deadline = Deadline::after(60s);
  while (!deadline.expired()) {
    bool empty = team.alive.load() == 0;
    for (std::size_t worker = 0; worker < 3; ++worker) {
      team.kept(worker);
      const DebugInfo info = team[worker].debug_info();
      empty = empty && info.num_forks + info.num_owner_rrefs + info.num_pending_users == 0;
    }
    if (empty) return;
    std::this_thread::yield();
  }
  ADD_FAILURE() << team.alive.load() << " values stay";
}

INSTANTIATE_TEST_SUITE_P(Seeds, RefsUnderFaults, testing::Values(0, 1, 2));

}  // namespace
}  // namespace convoy::rref::test
