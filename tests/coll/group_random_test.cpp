// Random programs of mixed collectives on several groups, against a sequential model: every rank
// derives the whole program from the seed, so each knows what all must get.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <random>

#include "base/concat.h"
#include "support.h"

namespace convoy::coll::test {
namespace {

// One step of a program, the same on all ranks.
struct Step {
  int group = 0;
  enum class Kind { kAllReduce, kBroadcast, kBarrier } kind = Kind::kBarrier;
  DataType type = DataType::kI32;
  ReduceOp op = ReduceOp::kSum;
  std::size_t count = 0;
  int root = 0;
  bool asynchronous = false;
  bool drain = false;        // waits for all that is under way first
  std::uint64_t salt = 0;    // of the data
  std::uint64_t places = 0;  // a bit a rank: its buffer is in group memory
};

Step random_step(std::mt19937_64& random, int groups, int ranks) {
  constexpr std::array kTypes = {DataType::kF32, DataType::kI32, DataType::kBF16, DataType::kU8,
                                 DataType::kF64, DataType::kI64, DataType::kF16};
  constexpr std::array kOps = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax,
                               ReduceOp::kProduct};
  Step step;
  step.group = static_cast<int>(random() % static_cast<unsigned>(groups));
  const auto draw = random() % 10;
  step.kind = draw < 6   ? Step::Kind::kAllReduce
              : draw < 9 ? Step::Kind::kBroadcast
                         : Step::Kind::kBarrier;
  step.type = kTypes[random() % kTypes.size()];
  step.op = kOps[random() % kOps.size()];
  // Mostly small; now and then beyond the eager limit and beyond one staged round.
  const auto size = random() % 12;
  step.count = size < 6 ? random() % 8 : size < 10 ? random() % 5000 : random() % 90'000;
  step.root = static_cast<int>(random() % static_cast<unsigned>(ranks));
  step.asynchronous = random() % 2 == 0;
  step.drain = random() % 8 == 0;
  step.salt = random();
  step.places = random();
  return step;
}

struct Pending {
  std::unique_ptr<Region> region;
  Buffer expected;
  Work work;
  bool has_work = false;
};

void finish(std::vector<Pending>& pending) {
  for (auto& one : pending) {
    if (one.has_work) one.work.wait();
    EXPECT_TRUE(one.region->content() == one.expected);
  }
  pending.clear();
}

Pending run_step(Group& group, const Step& step, int rank) {
  Pending result;
  const std::size_t bytes = step.count * size_of(step.type);
  const Place place = step.places >> rank & 1 ? Place::kShared : Place::kPrivate;
  result.region = std::make_unique<Region>(group, place, bytes);
  std::byte* data = result.region->data();
  if (step.kind == Step::Kind::kBroadcast) {
    result.expected = input_of(step.root, step.salt, step.type, step.count);
    if (rank == step.root) result.region->fill(result.expected);
    if (step.asynchronous) {
      result.work = group.broadcast_async(data, data, step.count, step.type, step.root);
    } else {
      group.broadcast(data, data, step.count, step.type, step.root);
    }
  } else if (step.kind == Step::Kind::kAllReduce) {
    result.expected =
        expected_reduction(group.size(), step.salt, {.type = step.type, .op = step.op}, step.count);
    result.region->fill(input_of(rank, step.salt, step.type, step.count));
    if (step.asynchronous) {
      result.work = group.all_reduce_async(data, data, step.count, step.type, {.op = step.op});
    } else {
      group.all_reduce(data, data, step.count, step.type, {.op = step.op});
    }
  } else {
    result.expected = result.region->content();
    if (step.asynchronous) {
      result.work = group.barrier_async();
    } else {
      group.barrier();
    }
  }
  result.has_work = step.asynchronous;
  return result;
}

void run_program(const Rank& rank, std::uint64_t seed) {
  SCOPED_TRACE(concat("seed ", seed));
  std::mt19937_64 random(seed);
  const int groups = 1 + static_cast<int>(random() % 3);
  const int steps = 10 + static_cast<int>(random() % 20);
  std::vector<std::shared_ptr<Group>> all;
  for (int g = 0; g < groups; ++g) {
    all.push_back(make_group(rank, concat("seed", seed, "group", g),
                             {.threads = 1 + static_cast<int>(random() % 2)}));
  }
  std::vector<Pending> pending;
  for (int i = 0; i < steps; ++i) {
    const Step step = random_step(random, groups, rank.size());
    if (step.drain) finish(pending);
    pending.push_back(run_step(*all[static_cast<std::size_t>(step.group)], step, rank.id()));
  }
  finish(pending);
}

// CONVOY_SEEDS=first:count chooses others; the long run takes thousands.
std::pair<std::uint64_t, std::uint64_t> seeds(std::uint64_t count) {
  const char* text = std::getenv("CONVOY_SEEDS");
  if (!text) return {1, count};
  char* end = nullptr;
  const std::uint64_t first = std::strtoull(text, &end, 10);
  return {first, *end == ':' ? std::strtoull(end + 1, nullptr, 10) : 1};
}

class RandomProgram : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, RandomProgram, convoy::test::rank_modes(),
                         convoy::test::rank_mode_name);

TEST_P(RandomProgram, MatchesTheModel) {
  for (const int ranks : {2, 4, 8}) {
    RankGroup(ranks, GetParam()).run([](Rank& r) {
      const auto [first, count] = seeds(12);
      for (std::uint64_t i = 0; i < count; ++i) {
        run_program(r, (first + i) * 100 + static_cast<std::uint64_t>(r.size()));
      }
    });
  }
}

}  // namespace
}  // namespace convoy::coll::test
