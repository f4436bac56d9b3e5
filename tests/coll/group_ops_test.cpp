// Every collective against plain arithmetic: types, operations, sizes, places, roots, forms.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/concat.h"
#include "coll/control.h"
#include "exercise.h"

namespace convoy::coll::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

constexpr std::uint64_t kAllPrivate = 0, kAllShared = ~std::uint64_t{0},
                        kMixed = 0x5a3c96e1d2b478f0;

using OpAndMode = std::tuple<Op, RankMode>;
class OpTest : public testing::TestWithParam<OpAndMode> {};
INSTANTIATE_TEST_SUITE_P(Each, OpTest,
                         testing::Combine(testing::ValuesIn(all_ops()),
                                          testing::Values(RankMode::kThreads,
                                                          RankMode::kProcesses)),
                         [](const auto& test) {
                           const bool threads = std::get<1>(test.param) == RankMode::kThreads;
                           return concat(name_of(std::get<0>(test.param)),
                                         threads ? "Threads" : "Processes");
                         });

void run(Group& group, const Step& step) {
  Exercise exercise(group, step);
  exercise.run();
  exercise.check();
}

// Around every boundary: inline, copied, payload, staged slices, several rounds, and direct reads.
TEST_P(OpTest, EverySizePlaceAndRoot) {
  const auto [op, mode] = GetParam();
  RankGroup(3, mode).run([op = op](Rank& r) {
    const auto group = make_group(r);
    const auto staged = make_group(r, "staged", {.threads = 2, .read_private = false});
    std::uint64_t salt = 0;
    std::vector<std::size_t> counts = {0, 1, 2, 3, 5, 6, 7, 1021, 2047, 2048, 2049};
    const Layout layout(r.size());
    for (const std::size_t bytes :
         {layout.eager_bytes(), layout.slice_bytes(), layout.stage_bytes()}) {
      for (const std::size_t n : {1, 3}) {
        if (kSanitized && n == 3) continue;
        counts.push_back(bytes / 4 / n + 1);
        if (!kSanitized) counts.insert(counts.end(), {bytes / 4 / n - 1, bytes / 4 / n});
      }
    }
    if (!kSanitized) counts.push_back(3 * layout.stage_bytes() / 4 + 17);
    for (const std::size_t count : counts) {
      for (const std::uint64_t places : {kAllPrivate, kAllShared, kMixed}) {
        ++salt;
        const Step step{.op = op,
                        .type = DataType::kF32,
                        .count = count,
                        .root = static_cast<int>(salt % 3),
                        .in_place = salt % 2 == 0,
                        .salt = salt,
                        .places = places};
        run(*group, step);
        if (!kSanitized || places == kAllPrivate) run(*staged, step);
      }
    }
  });
}

// Every type, and every operation that has a meaning for it.
TEST_P(OpTest, EveryTypeAndOperation) {
  const auto [op, mode] = GetParam();
  if (mode == RankMode::kProcesses && kSanitized) GTEST_SKIP() << "threads show the same";
  RankGroup(2, mode).run([op = op](Rank& r) {
    const auto group = make_group(r);
    std::uint64_t salt = 1000;
    for (int t = 0; t < kDataTypes; ++t) {
      for (int o = 0; o < (reduces(op) ? kReduceOps : 1); ++o) {
        const auto type = static_cast<DataType>(t);
        const auto reduce = static_cast<ReduceOp>(o);
        Step step{.op = op, .type = type, .reduce = reduce, .count = 301, .salt = ++salt};
        if (reduces(op) && !reference::has_meaning(type, reduce)) {
          step.count = 0;  // there is nothing to expect
          if (op > Op::kAllToAllV) continue;
          EXPECT_THAT(error_of([&] { run(*group, step); }),
                      AllOf(HasSubstr(std::string(to_string(type))),
                            HasSubstr(std::string(to_string(reduce)))));
          continue;
        }
        run(*group, step);
        if (kSanitized && o > 0) continue;
        step.count = 70'001 / size_of(type);
        step.places = kMixed;
        run(*group, step);
      }
    }
  });
}

TEST_P(OpTest, OneRankAndManyRanks) {
  const auto [op, mode] = GetParam();
  for (const int ranks : {1, 5, 8, 9}) {
    if (mode == RankMode::kProcesses && ranks == 9) continue;
    RankGroup(ranks, mode).run([op = op](Rank& r) {
      const auto group = make_group(r);
      std::uint64_t salt = 77;
      for (const std::size_t count : {0, 1, 300, 40'000}) {
        for (const std::uint64_t places : {kAllPrivate, kMixed}) {
          run(*group, {.op = op,
                       .type = DataType::kI16,
                       .count = count,
                       .root = r.size() / 2,
                       .in_place = places == kMixed,
                       .salt = ++salt,
                       .places = places});
        }
      }
    });
  }
}

// A rank that asks for something else: every rank is told, no data is touched, the group goes on.
TEST_P(OpTest, DisagreementIsAnErrorOnAllAndTheGroupGoesOn) {
  const auto [op, mode] = GetParam();
  RankGroup(3, mode).run([op = op](Rank& r) {
    const auto group = make_group(r);
    const Step step{.op = op, .type = DataType::kF32, .count = 1000, .salt = 5, .places = kMixed};
    for (int kind = 0; kind < 3; ++kind) {
      Step other = step;
      if (r.id() == 1) {
        if (kind == 0) other.op = op == Op::kBarrier ? Op::kMonitoredBarrier : Op::kBarrier;
        if (kind == 1) other.type = DataType::kI32;
        if (kind == 2) other.count = 999;
      }
      const bool barrier = op == Op::kBarrier || op == Op::kMonitoredBarrier;
      if (kind > 0 && barrier) continue;
      Exercise exercise(*group, other);
      EXPECT_THAT(error_of([&] { exercise.run(); }),
                  AllOf(HasSubstr("invalid argument"), HasSubstr("ranks disagree"),
                        HasSubstr("rank 1"), HasSubstr("no data was touched")));
      EXPECT_FALSE(group->broken());
    }
    run(*group, step);
  });
}

TEST_P(OpTest, Asynchronous) {
  const auto [op, mode] = GetParam();
  RankGroup(3, mode).run([op = op](Rank& r) {
    const auto group = make_group(r);
    std::vector<std::unique_ptr<Exercise>> exercises;
    std::vector<Work> works;
    std::atomic<int> called{0};
    for (std::uint64_t i = 0; i < 8; ++i) {
      exercises.push_back(
          std::make_unique<Exercise>(*group, Step{.op = op,
                                                  .count = i % 2 == 0 ? 10u : 50'000u,
                                                  .root = static_cast<int>(i % 3),
                                                  .salt = i,
                                                  .places = i * kMixed}));
      works.push_back(exercises.back()->start([&](const std::exception_ptr& error) {
        EXPECT_FALSE(error);
        ++called;
      }));
    }
    for (auto& work : works) work.wait();
    group->barrier();  // whose turn comes after all callbacks
    EXPECT_EQ(called, 8);
    for (const auto& exercise : exercises) exercise->check();
  });
}

// As many as a host can have; on most machines many more than cores.
TEST(MostRanks, SixtyFour) {
  RankGroup(64, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r);
    std::uint64_t salt = 0;
    for (const Op op : {Op::kBarrier, Op::kAllReduce, Op::kReduceScatter, Op::kAllGather,
                        Op::kBroadcast, Op::kAllToAllV}) {
      for (const std::size_t count : {3, 700}) {
        run(*group, {.op = op, .count = count, .root = 63, .salt = ++salt, .places = kMixed});
      }
    }
    int value = r.id(), got = -1;
    const std::array ring = {
        Message{Message::Kind::kSend, &value, 1, DataType::kI32, (r.id() + 1) % 64, 0},
        Message{Message::Kind::kReceive, &got, 1, DataType::kI32, (r.id() + 63) % 64, 0}};
    group->batch(ring);
    EXPECT_EQ(got, (r.id() + 63) % 64);
  });
}

class PieceTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, PieceTest, convoy::test::rank_modes(),
                         convoy::test::rank_mode_name);

TEST_P(PieceTest, CountsThatDoNotMatchAreNamed) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    float in[8] = {}, out[8] = {};
    const std::size_t expected = r.id() == 0 ? 2 : 3;
    const std::array inputs = {Piece{in, 2}, Piece{in + 2, 2}};
    const std::array outputs = {Piece{out, 2}, Piece{out + 2, expected}};
    EXPECT_THAT(
        error_of([&] { group->run(group->calls().all_to_all_v(inputs, outputs, DataType::kF32)); }),
        AllOf(HasSubstr("invalid argument"),
              HasSubstr("rank 1 sends 2 x f32 to rank 1, which expects 3")));
    group->barrier();
  });
}

TEST_P(PieceTest, HowCoalescedBuffersAreDividedMatters) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    float data[8] = {};
    const std::size_t first = r.id() == 0 ? 2 : 4;
    const std::array pieces = {Piece{data, first}, Piece{data + first, 6 - first}};
    EXPECT_THAT(error_of([&] {
                  group->run(group->calls().all_reduce_coalesced(pieces, pieces, DataType::kF32));
                }),
                AllOf(HasSubstr("ranks disagree"), HasSubstr("6 x f32 in 2 pieces")));
  });
}

TEST(ArgumentTest, AreCheckedBeforeTheOperationHasANumber) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r);
    float a[16] = {}, b[16] = {};
    const auto f32 = DataType::kF32;
    const std::array one = {Piece{a, 1}};
    const std::array two = {Piece{a, 1}, Piece{a + 1, 1}};
    const std::array twice = {Piece{b, 2}, Piece{b + 1, 2}};
    const std::array odd = {Piece{b, 3}};
    const auto refused = [&](const char* part, const auto& call) {
      EXPECT_THAT(error_of(call), AllOf(HasSubstr("invalid argument"), HasSubstr(part),
                                        HasSubstr(concat("rank ", r.id(), " of 2"))));
    };
    refused("there is no root 2", [&] { group->run(group->calls().gather(a, b, 1, f32, 2)); });
    refused("there is no root -1", [&] { group->run(group->calls().scatter(a, b, 1, f32, -1)); });
    refused("there is no root 9", [&] { group->run(group->calls().reduce(a, b, 1, f32, 9)); });
    refused("the input is null", [&] { group->all_gather(nullptr, b, 1, f32); });
    refused("the output is null",
            [&] { group->run(group->calls().all_to_all(a, nullptr, 1, f32)); });
    refused("overlap", [&] { group->run(group->calls().all_to_all(a, a, 1, f32)); });
    refused("overlap", [&] { group->all_gather(a + 5, a, 3, f32); });
    refused("overlap", [&] { group->run(group->calls().reduce_scatter(a, a + 1, 4, f32)); });
    refused("the count is too large", [&] { group->all_gather(a, b, SIZE_MAX / 8, f32); });
    refused("1 inputs for 2 ranks",
            [&] { group->run(group->calls().all_to_all_v(one, two, f32)); });
    refused("1 outputs for 2 ranks",
            [&] { group->run(group->calls().all_gather_v({b, 1}, one, f32)); });
    refused("two outputs overlap",
            [&] { group->run(group->calls().all_gather_v({a, 2}, twice, f32)); });
    refused("2 inputs, but 1 outputs",
            [&] { group->run(group->calls().all_reduce_coalesced(two, one, f32)); });
    refused("does not fit",
            [&] { group->run(group->calls().all_gather_coalesced(one, odd, f32)); });
    const std::array others = {Piece{a, 1}, Piece{b, 1}};
    const std::size_t other = r.id() == 0 ? 1 : 0;
    refused("overlap",
            [&] { group->run(group->calls().all_gather_v({others[other].data, 1}, others, f32)); });
    refused("overlap",
            [&] { group->run(group->calls().reduce_scatter_v(others, others[other], f32)); });
    const std::array swapped = {others[1], others[0]};
    refused("overlap",
            [&] { group->run(group->calls().all_reduce_coalesced(others, swapped, f32)); });
    refused("there is no buffer",
            [&] { group->run(group->calls().broadcast_coalesced({}, f32, 0)); });
    EXPECT_EQ(group->last_completed(), 0u);
    group->barrier();
    EXPECT_EQ(group->last_completed(), 1u);
  });
}

TEST_P(PieceTest, MonitoredBarrierNamesEveryMissingRank) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    group->run(group->calls().monitored_barrier());
    if (r.id() % 2 == 0) {
      EXPECT_THAT(
          error_of([&] { group->run(group->calls().monitored_barrier({.timeout = 300ms})); }),
          AllOf(HasSubstr("timeout"), HasSubstr("monitored_barrier #2"), HasSubstr("rank 1 (pid "),
                HasSubstr("rank 3 (pid ")));
    }
    r.barrier();
  });
}

}  // namespace
}  // namespace convoy::coll::test
