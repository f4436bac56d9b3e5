// Groups that lose and gain members, with real deaths.
#include <gmock/gmock.h>

#include <csignal>
#include <iostream>

#include "base/concat.h"
#include "convoy/error.h"
#include "convoy/init.h"
#include "group/fake_backend.h"
#include "group/support.h"

namespace convoy::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

ProcessGroup make_group(const Rank& r, int rank, int size, const std::string& name) {
  return new_group("convoy",
                   {.timeout = 60s, .store = r.store(), .rank = rank, .size = size, .name = name});
}

// Exact: every rank of the group adds its number among all processes.
void expect_exact(const ProcessGroup& group, int id, std::int64_t sum_of_ids) {
  for (const std::int64_t elements : {1, 5000, 300'000}) {
    auto tensor = at::full({elements}, id, at::kLong);
    group.all_reduce(tensor);
    ASSERT_TRUE(tensor.eq(sum_of_ids).all().item<bool>());
  }
}

// Until the group says that somebody died.
std::string work_until_death(const ProcessGroup& group) {
  return text_of([&] {
    for (;;) group.all_reduce(full(1, {20'000}));
  });
}

// Eight ranks; one after another is killed in the middle of collectives, until one is left.
TEST(ShrinkTest, SevenKillsInARow) {
  static constexpr int kRanks = 8;
  RankGroup ranks(kRanks, RankMode::kProcesses, {.limit = 110s});
  ranks.start([](Rank& r) {
    auto group = make_group(r, r.id(), r.size(), "world");
    for (int dead = 0; dead < kRanks - 1; ++dead) {
      r.mark(concat("round ", dead));
      if (r.id() == dead) {
        work_until_death(group);  // its own
        FAIL() << "rank " << dead << " should have been killed";
      }
      EXPECT_THAT(work_until_death(group), HasSubstr("SIGKILL"));
      const auto old = group;
      group = old.shrink();
      EXPECT_EQ(group.size(), kRanks - 1 - dead);
      EXPECT_EQ(group.rank(), r.id() - 1 - dead);
      expect_exact(group, r.id(), (kRanks - 1 + dead + 1) * (kRanks - 1 - dead) / 2);
      EXPECT_THROW(old.barrier(), Error);  // fenced
      r.store()->add(concat("shrunk ", dead), 1);
    }
    EXPECT_EQ(group.size(), 1);
  });
  for (int dead = 0; dead < kRanks - 1; ++dead) {
    for (int r = dead; r < kRanks; ++r) ranks.wait_mark(concat("round ", dead), r);
    ranks.kill(dead, SIGKILL);
  }
  ranks.join();
}

// Two die at once, one of them while the others meet.
TEST(ShrinkTest, DeathsDuringTheShrink) {
  RankGroup ranks(5, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto group = make_group(r, r.id(), r.size(), "world");
    r.mark("here");
    EXPECT_THAT(work_until_death(group), HasSubstr("rank 1"));
    if (r.id() == 3) {
      r.mark("does not shrink");
      r.wait_for("never");
    }
    r.mark("shrinks");
    const auto left = group.shrink();
    EXPECT_EQ(left.size(), 3);
    expect_exact(left, r.id(), 0 + 2 + 4);
  });
  ranks.wait_mark("here");
  ranks.kill(1, SIGKILL);
  for (const int r : {0, 2, 4}) ranks.wait_mark("shrinks", r);
  ranks.wait_mark("does not shrink", 3);
  ranks.kill(3, SIGKILL);
  ranks.join();
}

// One that died does not come to a split: the group out of which that is made knows.
TEST(SplitTest, ADeathBeforeItIsToldByName) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto group = make_group(r, r.id(), r.size(), "world");
    r.mark("here");
    if (r.id() == 1) r.wait_for("never");
    r.wait_for("killed");
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_THAT(text_of([&] { group.split({2, 1, 0}, {.timeout = 50s}); }),
                AllOf(HasSubstr("making group"), HasSubstr("rank 1 (pid "), HasSubstr("SIGKILL")));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s);
  });
  ranks.wait_mark("here");
  ranks.kill(1, SIGKILL);
  ranks.post("killed");
  ranks.join();
}

// Ranks that live and are left out, busy or asleep.
TEST(ShrinkTest, WhoIsLeftOutIsKilled) {
  RankGroup ranks(4, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto group = make_group(r, r.id(), r.size(), "world");
    r.mark("here");
    if (r.id() == 1) {
      for (;;) {
        try {
          group.barrier();
        } catch (const Error&) {
        }
      }
    }
    if (r.id() == 2) r.wait_for("never");
    const auto two = group.shrink({0, 3});
    EXPECT_EQ(two.size(), 2);
    expect_exact(two, r.id(), 3);
  });
  for (const int left_out : {1, 2}) ranks.kill(left_out, SIGCONT);  // they may end in any way
  const auto results = ranks.join();
  for (const std::size_t left_out : {1, 2}) EXPECT_EQ(results[left_out].status.signal, SIGKILL);
}

// Halves that leave each other out: one of them goes on, the others are told or killed.
TEST(ShrinkTest, OneGroupDoesNotShrinkToTwo) {
  RankGroup ranks(4, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto group = make_group(r, r.id(), r.size(), "world");
    const int first = r.id() / 2 * 2;
    try {
      const auto half = group.shrink({first, first + 1});
      expect_exact(half, r.id(), 2 * first + 1);
      std::cout << "went on" << std::endl;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("cannot shrink to two"));
    }
  });
  for (int r = 0; r < 4; ++r) ranks.kill(r, SIGCONT);  // they may end in any way
  const auto results = ranks.join();
  const auto went_on = [&](std::size_t r) {
    return results[r].status.success() && results[r].output.find("went on") != std::string::npos;
  };
  EXPECT_EQ(went_on(0), went_on(1));
  EXPECT_EQ(went_on(2), went_on(3));
  EXPECT_NE(went_on(0), went_on(2));
}

// The same for a group of which a stopped rank is no member any more.
TEST(ReconfigureTest, WhoIsLeftOutIsKilled) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto group = make_group(r, r.id(), r.size(), "world");
    r.mark("here");
    r.wait_for("go");
    const auto two = reconfigure(
        group,
        {.timeout = 60s, .store = r.store(), .rank = r.id(), .size = 2, .name = "without 2"});
    expect_exact(two, r.id(), 1);
  });
  ranks.wait_mark("here");
  ranks.stop(2);
  ranks.post("go", 0);
  ranks.post("go", 1);
  EXPECT_EQ(ranks.join()[2].status.signal, SIGKILL);
}

// Eight places, ten kills in a row; each time a spare process takes the place of the dead.
TEST(ReconfigureTest, TenKillsWithNewcomers) {
  static constexpr int kPlaces = 8, kKills = 10;
  RankGroup ranks(kPlaces + kKills, RankMode::kProcesses, {.limit = 115s});
  ranks.start([](Rank& r) {
    // Who sits where in each round: the dead of round k is process k.
    const auto place_in = [](int id, int round) {
      const int first = round;  // processes [round, round + 8) are alive and in
      return id < first || id >= first + kPlaces ? -1 : id - first;
    };
    const int joins = std::max(0, r.id() - kPlaces + 1);
    if (joins > 0) r.wait_for(concat("round ", joins));
    auto group = make_group(r, place_in(r.id(), joins), kPlaces, concat("epoch ", joins));
    for (int round = joins;; ++round) {
      std::int64_t sum = 0;
      for (int id = round; id < round + kPlaces; ++id) sum += id;
      expect_exact(group, r.id(), sum);
      if (round == kKills) break;
      r.mark(concat("worked ", round));
      EXPECT_THAT(work_until_death(group), HasSubstr("SIGKILL"));
      r.mark(concat("told ", round));
      group = reconfigure(group, {.timeout = 60s,
                                  .store = r.store(),
                                  .rank = place_in(r.id(), round + 1),
                                  .size = kPlaces,
                                  .name = concat("epoch ", round + 1)});
    }
  });
  for (int round = 0; round < kKills; ++round) {
    for (int r = round; r < round + kPlaces; ++r) ranks.wait_mark(concat("worked ", round), r);
    ranks.kill(round, SIGKILL);
    ranks.post(concat("round ", round + 1));
  }
  ranks.join();
}

class MembershipTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, MembershipTest, rank_modes(), rank_mode_name);

// Threads of the process of a survivor are left out alive; processes are not.
TEST_P(MembershipTest, MergeAndVoluntaryShrink) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    const auto half = make_group(r, r.id() % 2, 2, r.id() < 2 ? "low" : "high");
    const auto all = half.merge(with_prefix(r.store(), "meeting"), 4, {.name = "all"});
    EXPECT_EQ(all.size(), 4);
    EXPECT_EQ(all.rank() % 2, r.id() % 2);
    EXPECT_EQ(all.name(), "all");
    expect_exact(all, r.id(), 6);
    expect_exact(half, r.id(), r.id() < 2 ? 1 : 5);  // goes on
    // Two of them go on without the others, who live.
    const auto ids = all.all_gather(at::full({1}, r.id(), at::kLong));
    const bool stays = all.rank() != 1 && all.rank() != 2;
    if (r.mode() == RankMode::kProcesses) {
      if (const auto two = all.split({0, 3})) {
        expect_exact(*two, r.id(), ids[0].item<std::int64_t>() + ids[3].item<std::int64_t>());
      }
      all.barrier();
    } else if (stays) {
      const auto two = all.shrink({0, 3});
      EXPECT_EQ(two.size(), 2);
      expect_exact(two, r.id(), ids[0].item<std::int64_t>() + ids[3].item<std::int64_t>());
    } else {
      EXPECT_THAT(text_of([&] {
                    for (;;) all.barrier();
                  }),
                  HasSubstr("abort"));
    }
    EXPECT_THAT(text_of([&] { half.merge(nullptr, 4); }), HasSubstr("no store"));
    EXPECT_THAT(text_of([&] { half.merge(r.store(), 1); }), HasSubstr("size must be at least 2"));
    EXPECT_THAT(text_of([&] { half.shrink({1 - half.rank()}); }), HasSubstr("not among"));
    EXPECT_THAT(text_of([&] { half.shrink({0, 0}); }), HasSubstr("rank 0 is in the list twice"));
    EXPECT_THAT(text_of([&] { half.shrink({0, 7}); }), HasSubstr("there is no rank 7"));
    const auto foreign = ProcessGroup::from(c10::make_intrusive<FakeBackend>(
        c10::make_intrusive<ConvoyBackend>(make_local_store(), 0, 1)));
    EXPECT_THAT(text_of([&] { foreign.shrink(); }), HasSubstr("does not report dead ranks"));
    EXPECT_THAT(text_of([&] { reconfigure(half, {}); }), HasSubstr("say .store"));
    r.barrier();
  });
}

// One that lives and does not come is named at the deadline.
TEST(ShrinkTest, WhoDoesNotComeIsNamed) {
  RankGroup(3, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r, r.id(), r.size(), "world");
    if (r.id() != 2) {
      EXPECT_THAT(text_of([&] { group.shrink({.timeout = 200ms}); }),
                  AllOf(HasSubstr(" Timed out "), HasSubstr("have not called it: 2")));
    }
    r.barrier();
  });
}

}  // namespace
}  // namespace convoy::test
