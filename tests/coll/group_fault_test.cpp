// A dead, late or leaving rank is an event: every other rank's pending and later operations fail,
// naming it, long before any deadline.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <thread>

#include "base/concat.h"
#include "coll/control.h"
#include "coll/mesh.h"
#include "coll/shared_memory.h"
#include "exercise.h"

namespace convoy::coll::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::MatchesRegex;
using Clock = std::chrono::steady_clock;

enum class Phase { kBarrier, kSmall, kShared, kPrivate, kBroadcast, kAsync, kOutside };
constexpr std::array kPhases = {Phase::kBarrier,   Phase::kSmall, Phase::kShared, Phase::kPrivate,
                                Phase::kBroadcast, Phase::kAsync, Phase::kOutside};

std::string_view name_of(Phase phase) {
  constexpr std::array kNames = {"Barrier",   "Small", "Shared", "Private",
                                 "Broadcast", "Async", "Outside"};
  return kNames[static_cast<std::size_t>(phase)];
}
void PrintTo(Phase phase, std::ostream* out) { *out << name_of(phase); }

// One operation of the kind; big ones take long enough to be hit in the middle.
void operate(Group& group, Phase phase, Region& shared, Region& priv) {
  constexpr std::size_t kBig = std::size_t{1} << 20;
  float small[4] = {};
  switch (phase) {
    case Phase::kBarrier:
    case Phase::kOutside: return group.barrier();
    case Phase::kSmall: return group.all_reduce(small, small, 4, DataType::kF32);
    case Phase::kShared:
      return group.all_reduce(shared.data(), shared.data(), kBig, DataType::kF32);
    case Phase::kPrivate: return group.all_reduce(priv.data(), priv.data(), kBig, DataType::kF32);
    case Phase::kBroadcast:
      return group.broadcast(priv.data(), priv.data(), kBig, DataType::kF32, 1);
    case Phase::kAsync:
      group.start(group.calls().all_reduce(priv.data(), priv.data(), kBig, DataType::kF32)).wait();
      return;
  }
}

class KillTest : public testing::TestWithParam<std::tuple<Phase, int>> {};
INSTANTIATE_TEST_SUITE_P(Phases, KillTest,
                         testing::Combine(testing::ValuesIn(kPhases), testing::Values(0, 2)),
                         [](const auto& test) {
                           return concat(name_of(std::get<0>(test.param)), "Rank",
                                         std::get<1>(test.param));
                         });

// Every rank loops over the operation; one is killed somewhere in it. Survivors must agree on the
// last completed number.
TEST_P(KillTest, SurvivorsAreToldWhoDied) {
  const auto [phase, victim] = GetParam();
  RankGroup ranks(4, RankMode::kProcesses);
  ranks.start([phase = phase, victim = victim](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    Region shared(*group, Place::kShared, std::size_t{4} << 20);
    Region priv(*group, Place::kPrivate, std::size_t{4} << 20);
    for (int i = 0; i < 5; ++i) operate(*group, phase, shared, priv);
    r.mark("looping");
    if (phase == Phase::kOutside && r.id() == victim) r.wait_for("never");
    const std::string text = error_of([&] {
      for (;;) operate(*group, phase, shared, priv);
    });
    const auto told = Clock::now();
    EXPECT_THAT(text, AllOf(HasSubstr("peer lost"), HasSubstr("group \"world\""),
                            HasSubstr(concat("rank ", victim, " (pid ")), HasSubstr("SIGKILL"),
                            HasSubstr("last completed #")));
    EXPECT_TRUE(group->broken());
    r.store()->set(concat("last/", r.id()), std::to_string(group->last_completed()));
    r.store()->set(concat("told/", r.id()), std::to_string(told.time_since_epoch().count()));
    // Later operations fail at once, with the same cause.
    const auto before = Clock::now();
    EXPECT_THAT(error_of([&] { group->barrier(); }),
                AllOf(HasSubstr(concat("rank ", victim, " (pid ")), HasSubstr("is broken since")));
    EXPECT_LT(Clock::now() - before, kEventLimit);
  });
  ranks.wait_mark("looping");
  const auto killed = Clock::now().time_since_epoch().count();
  ranks.kill(victim, SIGKILL);
  std::string last;
  for (int r = 0; r < 4; ++r) {
    if (r == victim) continue;
    const std::string mine = ranks.store()->get(concat("last/", r), Deadline::after(20s));
    if (last.empty()) last = mine;
    EXPECT_EQ(mine, last) << "survivors disagree on what has completed";
    const auto told = std::stoll(ranks.store()->get(concat("told/", r), Deadline::after(20s)));
    EXPECT_LT(std::chrono::nanoseconds(told - killed), kEventLimit);
  }
  ranks.join();
}

// The same over all collectives, in group memory, private memory and both.
class KillInTest : public testing::TestWithParam<std::tuple<Op, int>> {};
INSTANTIATE_TEST_SUITE_P(Each, KillInTest,
                         testing::Combine(testing::ValuesIn(all_ops()), testing::Values(0, 2)),
                         [](const auto& test) {
                           return concat(name_of(std::get<0>(test.param)), "Rank",
                                         std::get<1>(test.param));
                         });

TEST_P(KillInTest, SurvivorsAreToldWhoDiedAndAgree) {
  const auto [op, victim] = GetParam();
  RankGroup ranks(4, RankMode::kProcesses);
  ranks.start([op = op, victim = victim](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    std::vector<std::unique_ptr<Exercise>> exercises;
    for (const std::uint64_t places : {0x0ull, ~0x0ull, 0x5a3c96e1d2b478f0ull}) {
      for (const std::size_t count : {std::size_t{3}, std::size_t{60'000}}) {
        exercises.push_back(std::make_unique<Exercise>(
            *group, Step{.op = op, .count = count, .root = 1, .salt = 3, .places = places}));
      }
    }
    for (const auto& exercise : exercises) exercise->run();
    r.mark("looping");
    const std::string text = error_of([&] {
      for (std::size_t i = 0;; ++i) exercises[i % exercises.size()]->run();
    });
    EXPECT_THAT(text, AllOf(HasSubstr("peer lost"), HasSubstr(concat("rank ", victim, " (pid ")),
                            HasSubstr("SIGKILL")));
    r.store()->set(concat("last/", r.id()), std::to_string(group->last_completed()));
  });
  ranks.wait_mark("looping");
  const auto killed = Clock::now();
  ranks.kill(victim, SIGKILL);
  std::string last;
  for (int r = 0; r < 4; ++r) {
    if (r == victim) continue;
    const std::string mine = ranks.store()->get(concat("last/", r), Deadline::after(20s));
    if (last.empty()) last = mine;
    EXPECT_EQ(mine, last) << "survivors disagree on what has completed";
  }
  EXPECT_LT(Clock::now() - killed, kEventLimit);
  ranks.join();
}

// A rank dies after it has arrived, and another one is late: whoever waits is told of the death
// when it happens, not when the late rank comes. All agree on what has completed.
enum class Late { kInUserCode, kStopped };
std::string_view name_of(Late late) { return late == Late::kStopped ? "Stopped" : "InUserCode"; }
void PrintTo(Late late, std::ostream* out) { *out << name_of(late); }
class LateTest : public testing::TestWithParam<Late> {};
INSTANTIATE_TEST_SUITE_P(Kinds, LateTest, testing::Values(Late::kInUserCode, Late::kStopped),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(LateTest, ADeathIsToldAtOnce) {
  RankGroup ranks(4, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    group->barrier();
    if (r.id() == 2) {
      Work arrived = group->start(group->calls().barrier());
      const auto& slot = Layout(4)
                             .rank(mesh_of(*group->medium())->control().data(), 2)
                             .slots[arrived.number() & 1];
      while (slot.arrived.load() < arrived.number()) std::this_thread::yield();
      r.mark("arrived");
      r.wait_for("never");
    }
    if (r.id() == 3) {
      r.mark("late");
      r.wait_for("come");
    }
    r.mark("waiting");
    EXPECT_THAT(error_of([&] { group->barrier(); }),
                AllOf(HasSubstr("peer lost"), HasSubstr("rank 2 (pid "), HasSubstr("SIGKILL"),
                      HasSubstr("last completed #1")));
    const auto told = Clock::now().time_since_epoch().count();
    EXPECT_EQ(group->last_completed(), 1u);
    r.store()->set(concat("told/", r.id()), std::to_string(told));
  });
  ranks.wait_mark("arrived", 2);
  ranks.wait_mark("late", 3);
  ranks.wait_mark("waiting", 0);
  ranks.wait_mark("waiting", 1);
  if (GetParam() == Late::kStopped) ranks.stop(3);
  const auto killed = Clock::now().time_since_epoch().count();
  ranks.kill(2, SIGKILL);
  for (const int r : {0, 1}) {
    const auto told = std::stoll(ranks.store()->get(concat("told/", r), Deadline::after(20s)));
    EXPECT_LT(std::chrono::nanoseconds(told - killed), kEventLimit);
  }
  if (GetParam() == Late::kStopped) ranks.resume(3);
  ranks.post("come", 3);
  ranks.join();
}

// Ranks that come at random times, killed at random: nobody completes what another gave up.
TEST(LateTest, SurvivorsAgree) {
  for (int round = 0; round < 6; ++round) {
    RankGroup ranks(4, RankMode::kProcesses);
    ranks.start([round](Rank& r) {
      const auto group = make_group(r, "world", {.timeout = kFar});
      std::mt19937 random(static_cast<unsigned>(100 * round + r.id()));
      std::vector<float> data(40'000);
      r.mark("looping");
      const std::string text = error_of([&] {
        for (;;) {
          const auto until = Clock::now() + std::chrono::microseconds(random() % 300);
          while (Clock::now() < until) std::this_thread::yield();
          group->all_reduce(data.data(), data.data(), group->last_completed() % 2 ? 2 : data.size(),
                            DataType::kF32);
        }
      });
      EXPECT_THAT(text, AllOf(HasSubstr("rank 1 (pid "), HasSubstr("SIGKILL")));
      r.store()->set(concat("last/", r.id()), std::to_string(group->last_completed()));
    });
    if (convoy::test::in_rank()) continue;
    ranks.wait_mark("looping");
    ranks.kill(1, SIGKILL);
    const auto last = [&](int r) {
      return ranks.store()->get(concat("last/", r), Deadline::after(20s));
    };
    EXPECT_EQ(last(0), last(2));
    EXPECT_EQ(last(0), last(3));
    ranks.join();
  }
}

// A forked child keeps a dead rank's descriptors and memory alive; it must not hide the death.
TEST(GroupFaultTest, AForkedChildDoesNotHideADeath) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    group->barrier();
    if (r.id() == 1) {
      const pid_t child = fork();
      if (child == 0) {
        pause();
        _exit(0);
      }
      r.store()->set("child", std::to_string(child));
      r.mark("forked");
      r.wait_for("never");
    }
    r.mark("forked");
    EXPECT_THAT(error_of([&] { group->barrier(); }),
                AllOf(HasSubstr("rank 1 (pid "), HasSubstr("SIGKILL")));
    r.mark("told");
  });
  ranks.wait_mark("forked");
  const pid_t child = std::stoi(ranks.store()->get("child"));
  ranks.kill(1, SIGKILL);
  ranks.wait_mark("told", 0);
  ranks.wait_mark("told", 2);
  ::kill(child, SIGKILL);
  ranks.join();
}

TEST(GroupFaultTest, AForkedChildCannotUseTheGroup) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    const auto group = make_group(r);
    group->barrier();
    const pid_t child = fork();
    if (child == 0) {
      bool refused = false;
      try {
        group->allocate(1);
      } catch (const Error& error) {
        refused = error.kind() == ErrorKind::kUnsupported;
      }
      _exit(refused ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    group->barrier();
  });
}

TEST(GroupFaultTest, ARankThatExitsEarlyIsNamed) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    // Leaked: the process ends without the destructor.
    auto* group = new std::shared_ptr<Group>(make_group(r, "world", {.timeout = kFar}));
    (*group)->barrier();
    if (r.id() == 2) {
      r.store()->set("leaving", "");
      _exit(7);
    }
    r.store()->get("leaving");
    EXPECT_THAT(error_of([&] { (*group)->barrier(); }),
                AllOf(HasSubstr("rank 2 (pid "), HasSubstr("exited with exit code 7"),
                      HasSubstr("waited in #2"), HasSubstr("last completed #1")));
    delete group;
  });
  const auto results = ranks.collect();
  EXPECT_EQ(results[2].status.code, 7);
  for (const int r : {0, 1}) {
    EXPECT_FALSE(results[static_cast<std::size_t>(r)].failed())
        << results[static_cast<std::size_t>(r)].output;
  }
}

class GroupEndTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, GroupEndTest, convoy::test::rank_modes(),
                         convoy::test::rank_mode_name);

TEST_P(GroupEndTest, ARankThatLeavesIsNamed) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    auto group = make_group(r, "world", {.timeout = kFar});
    group->barrier();
    if (r.id() == 1) {
      group.reset();
      return;
    }
    EXPECT_THAT(error_of([&] { group->barrier(); }),
                AllOf(HasSubstr("rank 1 (pid "), HasSubstr("left the group after #1")));
  });
}

TEST_P(GroupEndTest, AbortReachesEveryRank) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    group->barrier();
    if (r.id() == 2) group->abort("the data set is broken");
    EXPECT_THAT(error_of([&] { group->barrier(); }),
                HasSubstr("rank 2 aborted the group: the data set is broken"));
    EXPECT_TRUE(group->broken());
  });
}

TEST_P(GroupEndTest, ClosingEndsWhatIsUnderWay) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    float value = 1;
    if (r.id() == 0) {
      std::vector<Work> works;
      for (int i = 0; i < 5; ++i) {
        works.push_back(group->start(group->calls().all_reduce(&value, &value, 1, DataType::kF32)));
      }
      group->close();
      for (auto& work : works) {
        EXPECT_TRUE(work.done());
        EXPECT_THAT(error_of([&] { work.wait(); }), HasSubstr("closed"));
      }
      EXPECT_THAT(error_of([&] { group->barrier(); }), HasSubstr("was closed"));
    }
    r.barrier();
    if (r.id() == 1) {
      // Rank 0 may have arrived at the first before it closed.
      EXPECT_THAT(error_of([&] {
                    for (int i = 0; i < 2; ++i) {
                      group->all_reduce(&value, &value, 1, DataType::kF32);
                    }
                  }),
                  HasSubstr("rank 0"));
    }
  });
}

TEST_P(GroupEndTest, TheDeadlineNamesWhoIsLate) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    // Before any rank can call the operation that times out: the first to do so ends it for all.
    const auto start = Clock::now();
    group->barrier();
    if (r.id() == 1) {
      r.store()->get("over", r.deadline());
      return;
    }
    EXPECT_THAT(error_of([&] { group->barrier({.timeout = 200ms}); }),
                AllOf(HasSubstr("timeout"), HasSubstr("barrier #2"), HasSubstr(" Timed out "),
                      HasSubstr("rank 1 (pid "), HasSubstr("has not called it")));
    EXPECT_GE(Clock::now() - start, 200ms);
    if (r.store()->add("late", 1) == 2) r.store()->set("over", "");
  });
}

TEST(GroupFaultTest, AStoppedRankIsCalledStopped) {
  RankGroup ranks(2, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    group->barrier();
    r.mark("ready");
    r.wait_for("go");
    if (r.id() == 1) return;
    EXPECT_THAT(error_of([&] { group->barrier({.timeout = 300ms}); }),
                AllOf(HasSubstr("timeout"), HasSubstr("rank 1 (pid "), HasSubstr("is stopped")));
    r.mark("told");
  });
  ranks.wait_mark("ready");
  ranks.stop(1);
  ranks.post("go", 0);
  ranks.wait_mark("told", 0);
  ranks.resume(1);
  ranks.post("go", 1);
  ranks.join();
}

// Memory of a failed operation is not handed out again while a living peer may still write to it.
TEST(GroupFaultTest, MemoryOfAFailedOperationIsKeptApart) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto group = make_group(r, "world", {.timeout = kFar});
    const std::size_t bytes = std::size_t{2} << 20;
    shm::Location location;
    {
      auto block = group->allocate(bytes);
      location = block.location();
      group->barrier();
      r.mark("ready");
      if (r.id() == 2) return r.wait_for("never");
      EXPECT_THAT(
          error_of([&] { group->all_reduce(block.data(), block.data(), bytes, DataType::kU8); }),
          HasSubstr("rank 2"));
    }
    // Both survivors have given up: the block comes back once this process has itself seen the
    // death, of which it may have heard from the other survivor.
    r.store()->barrier("survivors", 2, r.deadline());
    const auto kept_apart = [] { return shm::Fabric::instance().stats().quarantined_blocks; };
    while (kept_apart() != 0 && !r.deadline().expired()) std::this_thread::yield();
    EXPECT_EQ(kept_apart(), 0u);
  });
  ranks.wait_mark("ready");
  ranks.kill(2, SIGKILL);
  ranks.join();
}

}  // namespace
}  // namespace convoy::coll::test
