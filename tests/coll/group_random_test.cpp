// Random programs of mixed collectives on several groups, against a sequential model: every rank
// derives the whole program from the seed, so each knows what all must get.
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <random>

#include "base/concat.h"
#include "exercise.h"

namespace convoy::coll::test {
namespace {

// A step, and how it is run.
struct Turn {
  int group = 0;
  bool asynchronous = false;
  bool drain = false;  // waits for all that is under way first
  Step step;
};

Turn random_turn(std::mt19937_64& random, int groups, int ranks) {
  Turn turn;
  turn.group = static_cast<int>(random() % static_cast<unsigned>(groups));
  turn.asynchronous = random() % 2 == 0;
  turn.drain = random() % 8 == 0;
  Step& step = turn.step;
  step.op = static_cast<Op>(random() % kOps);
  do {
    step.type = static_cast<DataType>(random() % kDataTypes);
    step.reduce = static_cast<ReduceOp>(random() % kReduceOps);
  } while (!reference::has_meaning(step.type, step.reduce) || step.reduce == ReduceOp::kPremulSum);
  // Mostly small; now and then beyond the eager limit and beyond one staged round.
  const auto size = random() % 12;
  step.count = size < 6 ? random() % 8 : size < 10 ? random() % 3000 : random() % 60'000;
  step.root = static_cast<int>(random() % static_cast<unsigned>(ranks));
  step.in_place = random() % 2 == 0;
  step.salt = random();
  step.places = random();
  return turn;
}

struct Pending {
  std::unique_ptr<Exercise> exercise;
  std::optional<Work> work;
};

// A message of this rank's, until the end of the program.
struct Letter {
  std::unique_ptr<Region> region;
  Buffer expected;
  Work work;
};

void finish(std::vector<Pending>& pending) {
  for (auto& one : pending) {
    if (one.work) one.work->wait();
    one.exercise->check();
  }
  pending.clear();
}

// Messages between random ranks, which are on their way while the collectives run.
void send_some(Group& group, std::mt19937_64& random, std::uint64_t turn,
               std::vector<Letter>& letters) {
  const auto ranks = static_cast<unsigned>(group.size());
  for (std::uint64_t i = 0; i < 3; ++i) {
    const int from = static_cast<int>(random() % ranks), to = static_cast<int>(random() % ranks);
    const std::size_t bytes = random() % 4 == 0 ? random() % 400'000 : random() % 5000;
    const Place place = random() % 2 == 0 ? Place::kShared : Place::kPrivate;
    const bool any = random() % 4 == 0;
    const std::uint64_t tag = turn * 4 + i;
    const Buffer content = input_of(from, tag, DataType::kU8, bytes);
    if (group.rank() == from) {
      auto region = std::make_unique<Region>(group, place, bytes);
      region->fill(content);
      Work work = group.send_async(region->data(), bytes, DataType::kU8, to, {.tag = tag});
      letters.push_back({std::move(region), content, work});
    }
    if (group.rank() == to) {
      auto region = std::make_unique<Region>(group, place, bytes);
      Work work = group.recv_async(region->data(), bytes, DataType::kU8, any ? kAnyRank : from,
                                   {.tag = tag});
      letters.push_back({std::move(region), content, work});
    }
  }
}

void run_program(const Rank& rank, std::uint64_t seed) {
  SCOPED_TRACE(concat("seed ", seed));
  std::mt19937_64 random(seed);
  const int groups = 1 + static_cast<int>(random() % 3);
  const int steps = 10 + static_cast<int>(random() % 20);
  std::vector<std::shared_ptr<Group>> all;
  for (int g = 0; g < groups; ++g) {
    all.push_back(make_group(
        rank, concat("seed", seed, "group", g),
        {.threads = 1 + static_cast<int>(random() % 2), .read_private = random() % 2 == 0}));
  }
  std::vector<Pending> pending;
  std::vector<Letter> letters;
  for (int i = 0; i < steps; ++i) {
    const Turn turn = random_turn(random, groups, rank.size());
    if (turn.drain) finish(pending);
    Group& group = *all[static_cast<std::size_t>(turn.group)];
    if (random() % 4 == 0) send_some(group, random, static_cast<std::uint64_t>(i), letters);
    Pending next{std::make_unique<Exercise>(group, turn.step), std::nullopt};
    if (turn.asynchronous) {
      next.work = next.exercise->start();
    } else {
      next.exercise->run();
    }
    pending.push_back(std::move(next));
  }
  finish(pending);
  for (auto& letter : letters) {
    letter.work.wait();
    EXPECT_TRUE(same(letter.region->content(), letter.expected));
  }
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
      const auto [first, count] = seeds(kSanitized ? 4 : 34);  // 200 over all sizes and modes
      for (std::uint64_t i = 0; i < count; ++i) {
        run_program(r, (first + i) * 100 + static_cast<std::uint64_t>(r.size()));
      }
    });
  }
}

}  // namespace
}  // namespace convoy::coll::test
