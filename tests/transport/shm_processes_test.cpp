// The endpoint of processes that share memory: connections, forked children, other processes.
#include <gmock/gmock.h>
#include <signal.h>

#include <thread>

#include "base/concat.h"
#include "shm_support.h"
#include "support/expect_error.h"
#include "support/forked.h"
#include "support/rank_group.h"
#include "transport/shm/fabric.h"

namespace convoy::transport::test {
namespace {

using namespace std::chrono_literals;
using convoy::test::expect_error;
using convoy::test::in_forked_child;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using convoy::test::Refusals;
using shm::shm_stats;
using testing::HasSubstr;

// Both sides may have dialed. When one of the connections ends the remote is lost, and the other
// one ends, too: what still comes there must not reach an endpoint that is gone.
TEST(ShmEndpointTest, ALostRemoteKeepsNoConnection) {
  auto party = join();
  auto& fabric = shm::Fabric::instance();
  const Address other{Id::random(), fabric.self().encode()};
  std::atomic<int> notes = 0;
  const auto dial = [&] {
    return fabric.dial(
        fabric.self(), party->endpoint->address().id, other.encode(),
        [&](shm::Peer&, const shm::Frame&, UniqueFd) { ++notes; }, Deadline::after(kLimit));
  };
  // Each look is a round of the watch thread.
  const auto comes = [&](FunctionRef<bool()> ready) {
    const Deadline limit = Deadline::after(kLimit);
    while (!ready() && !limit.expired()) fabric.close_door(Id{});
    return ready();
  };
  const auto first = dial();
  const auto second = dial();
  EXPECT_TRUE(comes([&] { return notes == 2; })) << "the doorbell, over each";
  fabric.hang_up({first});
  EXPECT_TRUE(until(*party, [&] { return party->inbox.losses() == 1; }));
  const auto late = dial();
  EXPECT_TRUE(comes([&] { return late->lost(); }));
  party.reset();
  EXPECT_TRUE(second->try_note(7, 0, -1));
  EXPECT_TRUE(comes([&] { return second->lost(); }));
  fabric.hang_up({second, late});
}

TEST(ShmEndpointTest, ReadsNothingInAForkedChildAndIsNotDisturbedByIt) {
  RankGroup(1, RankMode::kProcesses).run([](Rank&) {
    const auto a = join();
    auto b = join();
    Remote& to_b = a->to(*b);
    const Bytes data = some_bytes(100'000, 8);
    const Piece pieces[] = {{data}};
    ASSERT_EQ(to_b.try_send({.kind = 1, .pieces = pieces}), SendResult::kSent);
    ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
    EXPECT_EQ(in_forked_child([&] {
                Refusals refusals;
                refusals.expect("send", [&] { return to_b.try_send({}); });
                refusals.expect("poll", [&] { return a->endpoint->poll(Endpoint::Serve::kAll); });
                refusals.expect("remote", [&] { return &a->to(*b); });
                refusals.expect("wait", [&] {
                  return a->endpoint->wait(Deadline::after(1s), [] { return false; });
                });
                refusals.expect("new", [&] { return join() != nullptr; });
                b->inbox.clear();  // the loan is the parent's
                b.reset();
                return refusals.text();
              }),
              "");
    EXPECT_EQ(shm_stats(*a->endpoint).lent_bytes, data.size());
    ASSERT_EQ(to_b.try_send({.kind = 2}), SendResult::kSent);
    ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 2; }));
    EXPECT_TRUE(std::ranges::equal(b->inbox.letter(0).parts[0].bytes, data));
    EXPECT_TRUE(a->inbox.state().lost.empty());
    b->inbox.clear();
  });
}

Remote& meet(Rank& rank, Party& party, int other) {
  return party.endpoint->remote(
      Address::decode(rank.store()->get(concat("address/", other), rank.deadline())));
}

void publish(Rank& rank, Party& party) {
  rank.store()->set(concat("address/", rank.id()), party.endpoint->address().encode());
}

TEST(ShmEndpointTest, AllToAllBetweenProcesses) {
  RankGroup(4, RankMode::kProcesses).run([](Rank& rank) {
    std::atomic<int> sent = 0;
    const auto me = join();
    Endpoint* const endpoint = me->endpoint.get();
    publish(rank, *me);
    const Bytes data = some_bytes(300'000 + static_cast<std::size_t>(rank.id()), 9);
    const Piece pieces[] = {{data, rank.id() % 2 == 0}};
    for (int other = 0; other < rank.size(); ++other) {
      Remote& remote = meet(rank, *me, other);
      for (int i = 0; i < 100; ++i) {
        const auto kind = static_cast<LetterKind>(100 * rank.id() + i);
        const Letter letter{.kind = kind, .pieces = std::span(pieces, i % 10 == 0 ? 1 : 0)};
        for (;;) {
          const auto result = remote.try_send(letter, [&](const Error*) {
            ++sent;
            endpoint->wake();
          });
          if (result == SendResult::kSent) break;
          ASSERT_EQ(result, SendResult::kWouldBlock);
          std::this_thread::yield();
        }
      }
    }
    ASSERT_TRUE(until(*me, [&] { return me->inbox.letters() == 400; }));
    for (const auto& letter : me->inbox.state().letters) {
      if (letter.parts.empty()) continue;
      const int from = letter.kind / 100;
      EXPECT_TRUE(std::ranges::equal(letter.parts[0].bytes,
                                     some_bytes(300'000 + static_cast<std::size_t>(from), 9)));
    }
    me->inbox.clear();
    ASSERT_TRUE(until(*me, [&] { return sent == 400; }));
    rank.barrier();
  });
}

// Also while nobody sends: the survivor sleeps.
TEST(ShmEndpointTest, AKilledProcessIsLostByName) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([](Rank& rank) {
    const auto me = join();
    publish(rank, *me);
    rank.barrier();
    if (rank.id() == 2) {
      const Bytes data = some_bytes(200'000, 10);
      const Piece pieces[] = {{data}};
      for (int other = 0; other < 2; ++other) {
        ASSERT_EQ(meet(rank, *me, other).try_send({.pieces = pieces}), SendResult::kSent);
      }
      rank.mark("sent");
      rank.wait_for("never");
    }
    ASSERT_TRUE(until(*me, [&] { return me->inbox.letters() == 1; }));
    Remote& victim = *me->inbox.letter(0).from;
    const Bytes data = some_bytes(100'000, 11);
    const Piece pieces[] = {{data}};
    ASSERT_EQ(victim.try_send({.pieces = pieces}), SendResult::kSent);
    rank.mark("ready");
    ASSERT_TRUE(until(*me, [&] { return !me->inbox.state().lost.empty(); }));
    const auto told = std::chrono::steady_clock::now().time_since_epoch().count();
    rank.store()->set(concat("told/", rank.id()), std::to_string(told));
    EXPECT_THAT(me->inbox.state().lost[0].second,
                testing::AllOf(HasSubstr(victim.name()), HasSubstr("SIGKILL")));
    EXPECT_EQ(victim.try_send({}), SendResult::kLost);
    EXPECT_EQ(shm_stats(*me->endpoint).lent_bytes, 0u) << "loans of the dead are free";
    EXPECT_EQ(shm_stats(*me->endpoint).limbo_loans, 0u);
    // What it has lent is still there.
    EXPECT_TRUE(std::ranges::equal(me->inbox.letter(0).parts[0].bytes, some_bytes(200'000, 10)));
    me->inbox.clear();
    expect_error(ErrorKind::kPeerLost, "", [&] {
      const auto next = join();
      meet(rank, *next, 2);
    });
  });
  ranks.wait_mark("sent", 2);
  ranks.wait_mark("ready", 0);
  ranks.wait_mark("ready", 1);
  const auto killed = std::chrono::steady_clock::now().time_since_epoch().count();
  ranks.kill(2, SIGKILL);
  for (int r = 0; r < 2; ++r) {
    const auto told = std::stoll(ranks.store()->get(concat("told/", r), Deadline::after(20s)));
    EXPECT_LT(std::chrono::nanoseconds(told - killed), 2s) << "it is an event, not a time-out";
  }
  ranks.join();
}

// A process that stands still is not lost, and keeps nobody from others.
TEST(ShmEndpointTest, AStoppedProcessIsWaitedFor) {
  RankGroup ranks(2, RankMode::kProcesses);
  ranks.start([](Rank& rank) {
    const auto me = join();
    publish(rank, *me);
    rank.barrier();
    if (rank.id() == 1) {
      rank.mark("there");
      ASSERT_TRUE(until(*me, [&] { return me->inbox.letters() == 101; }));
      rank.store()->set("all there", "");
      rank.barrier();
      return;
    }
    rank.wait_for("stopped");
    Remote& remote = meet(rank, *me, 1);
    const Bytes data = some_bytes(5000, 12);
    const Piece pieces[] = {{data}};
    for (int i = 0; i < 100; ++i) ASSERT_EQ(remote.try_send({}), SendResult::kSent);
    ASSERT_EQ(remote.try_send({.pieces = pieces}), SendResult::kSent);
    rank.mark("sent");
    rank.store()->get("all there", rank.deadline());
    EXPECT_TRUE(me->inbox.state().lost.empty());
    rank.barrier();
  });
  ranks.wait_mark("there", 1);
  ranks.stop(1);
  ranks.post("stopped");
  ranks.wait_mark("sent", 0);
  ranks.resume(1);
  ranks.join();
}

}  // namespace
}  // namespace convoy::transport::test
