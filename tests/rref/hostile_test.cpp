// What a worker of the same session may do to another by letters about references, and by
// references in calls: it is refused before it can fill the other's memory.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "convoy/error.h"
#include "net.h"
#include "rref/records.h"

namespace convoy::rref::test {
namespace {

// Worker 0 of `net` writes what it likes to worker 1.
class Hostile {
 public:
  explicit Hostile(Net& net) : net_(net) {}

  void send(const Record& record) {
    LetterHead head{.from = net_.incarnation(0),
                    .to = net_.incarnation(1),
                    .taken = taken_,
                    .first = next_++,
                    .count = 1};
    std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
    bytes += encode_record(record);
    net_.deliver({.from = 0, .to = 1, .bytes = bytes});
  }
  // From now on it says that it has taken whatever comes.
  void take_answers() {
    for (const Net::Letter& letter : net_.wire) {
      if (letter.to != 0) continue;
      const auto head = decode_letter(std::as_bytes(std::span(letter.bytes))).head;
      if (head.count != 0) taken_ = std::max(taken_, head.first + head.count - 1);
    }
    net_.wire.clear();
  }

 private:
  Net& net_;
  std::uint64_t next_ = 1;
  std::uint64_t taken_ = 0;
};

constexpr std::uint64_t kMany = 200'000;

// How often it could be done until it was refused.
std::uint64_t times_until_refused(const std::function<void(std::uint64_t)>& once) {
  for (std::uint64_t i = 0; i < kMany; ++i) {
    try {
      once(i);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument) << error.what();
      return i;
    }
  }
  return kMany;
}

RRefId id_at_1(WorkerId creator, Incarnation incarnation, std::uint64_t number) {
  return {.owner = 1, .creator = creator, .incarnation = incarnation, .number = number};
}

TEST(RRefHostile, RequestsForValuesOfUnknownWorkers) {
  Net net(3);
  Hostile hostile(net);
  EXPECT_LT(times_until_refused([&](std::uint64_t i) {
              hostile.send({.id = id_at_1(static_cast<WorkerId>(100 + i), 7, 1), .number = i + 1});
              hostile.take_answers();
            }),
            2000u);
  // Others are still heard.
  Entry* const user = net.created(2, 1);
  EXPECT_EQ(user->state, EntryState::kConfirmed);
  net.drop(2, user);
}

TEST(RRefHostile, RequestsForValuesThatNobodyCreates) {
  Net net(3);
  Hostile hostile(net);
  EXPECT_EQ(times_until_refused([&](std::uint64_t i) {
              hostile.send({.id = id_at_1(2, net.incarnation(2), 2 * i + 2), .number = i + 1});
              hostile.take_answers();
            }),
            kMany);
  EXPECT_LE(net[1].owned(), 70'000u);
  // Its creator can create them.
  Entry* const user = net.created(2, 1);
  net.drop(2, user);
  net[1].lost(0, net.incarnation(0), "killed");
  net.pump();
  EXPECT_LE(net[1].owned(), 1u);
}

TEST(RRefHostile, FetchesOfValuesThatNobodyCreates) {
  Net net(3);
  Told told;
  for (std::uint64_t i = 0; i < kMany; ++i) {
    net[1].when_value(0, id_at_1(2, net.incarnation(2), 2 * i + 2), told.value_callback());
    static_cast<void>(net[1].output().watch);
  }
  EXPECT_LE(net[1].owned(), 70'000u);
  net[1].lost(2, net.incarnation(2), "killed");
  net.pump();
  EXPECT_EQ(net[1].owned(), 0u);
}

TEST(RRefHostile, ManyReferencesToOneValue) {
  Net net(3);
  Hostile hostile(net);
  Entry* const user = net.created(2, 1);
  EXPECT_LT(times_until_refused([&](std::uint64_t i) {
              hostile.send({.id = user->id, .number = i + 1});
              hostile.take_answers();
            }),
            2000u);
  net.drop(2, user);
}

TEST(RRefHostile, QuestionsAboutNothing) {
  for (const std::uint64_t call : {0, 7}) {
    Net net(3);
    Hostile hostile(net);
    EXPECT_LT(times_until_refused([&](std::uint64_t i) {
                hostile.send({.type = RecordType::kClose, .number = 2 * i + 2, .call = call});
                hostile.take_answers();
              }),
              70'000u);
  }
}

TEST(RRefHostile, CreationsThatAreAbandoned) {
  Net net(3);
  Hostile hostile(net);
  EXPECT_LT(times_until_refused([&](std::uint64_t i) {
              hostile.send({.type = RecordType::kAbandon,
                            .id = id_at_1(0, net.incarnation(0), 2 * i + 2),
                            .number = 1});
              hostile.take_answers();
            }),
            70'000u);
}

TEST(RRefHostile, QuestionsWhoseAnswersAreNotTaken) {
  Net net(3);
  Hostile hostile(net);
  EXPECT_LT(times_until_refused([&](std::uint64_t i) {
              hostile.send({.type = RecordType::kClose, .number = i + 1});
              net.wire.clear();
            }),
            70'000u);
}

TEST(RRefHostile, ReferencesToValuesOfUnknownWorkers) {
  Net net(3);
  EXPECT_LT(times_until_refused([&](std::uint64_t i) {
              const auto owner = static_cast<WorkerId>(100 + i);
              Entry* const entry = net[1].take(
                  0, {.id = {owner, 0, 7, 1}, .owner_incarnation = 7, .passage = i + 1});
              net[1].drop(*entry);
              static_cast<void>(net[1].output().watch);
            }),
            2000u);
}

TEST(RRefHostile, ManyReferencesToValuesOfAnUnknownWorker) {
  Net net(3);
  EXPECT_LT(times_until_refused([&](std::uint64_t i) {
              Entry* const entry = net[1].take(
                  0, {.id = {100, 0, 7, i + 1}, .owner_incarnation = 7, .passage = i + 1});
              net[1].drop(*entry);
              static_cast<void>(net[1].output().watch);
            }),
            70'000u);
}

// Two references of one number, of which one is made here later, would be taken for each other.
TEST(RRefHostile, NumbersThatThisWorkerHasNotGivenYet) {
  Net net(3);
  const Passed others{
      .id = {2, 1, net.incarnation(1), 1}, .owner_incarnation = net.incarnation(2), .passage = 1};
  const Passed own{.id = id_at_1(1, net.incarnation(1), 1),
                   .owner_incarnation = net.incarnation(1),
                   .passage = 2};
  EXPECT_THROW(net[1].take(0, others), Error);
  EXPECT_THROW(net[1].take(0, own), Error);
  Entry* const user = net.created(1, 2);
  EXPECT_EQ(net[1].users(), 1u);
  net.drop(1, user);
  net.settle();
  EXPECT_EQ(net[1].users(), 0u);
  EXPECT_EQ(net.alive, 0);
}

// References to values of two incarnations of a worker that have the same number.
TEST(RRefHostile, TheSameNumberOfTwoIncarnations) {
  Net net(3);
  const RRefId id{.owner = 2, .creator = 0, .incarnation = net.incarnation(0), .number = 5};
  const Incarnation other = net.incarnation(2) + 1;
  Entry* const first =
      net[1].take(0, {.id = id, .owner_incarnation = net.incarnation(2), .passage = 1});
  Entry* const second = net[1].take(0, {.id = id, .owner_incarnation = other, .passage = 2});
  EXPECT_NE(first, second);
  EXPECT_EQ(net[1].users(), 2u);
  net[1].drop(*first);
  EXPECT_EQ(net[1].users(), 1u);
  net[1].lost(2, other, "it is not a worker of this session");
  EXPECT_EQ(second->state, EntryState::kDead);
  EXPECT_EQ(net[1].users(), 0u);
  net[1].drop(*second);
}

}  // namespace
}  // namespace convoy::rref::test
