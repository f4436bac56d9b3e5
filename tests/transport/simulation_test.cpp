// The simulated world: the same seed, the same run; its time; its threads; and faults.
#include "transport/simulation.h"

#include <gmock/gmock.h>

#include <set>

#include "base/concat.h"
#include "support.h"
#include "support/expect_error.h"

namespace convoy::transport::test {
namespace {

using namespace std::chrono_literals;
using convoy::test::expect_error;
using testing::ElementsAre;
using testing::HasSubstr;

// Three parties pass letters on at random; what happened, in one line.
std::string history(std::uint64_t seed, const Faults& faults = {}) {
  World world({.seed = seed});
  std::string text;
  struct Node : Inbox {
    World* world = nullptr;
    std::string* text = nullptr;
    char name = 0;
    std::unique_ptr<Endpoint> endpoint;
    std::vector<Remote*> others;

    void arrived(Remote& from, Arrival&& arrival) noexcept override {
      *text += concat(from.name(), name, arrival.kind, " ");
      if (arrival.kind == 0) return;
      others[world->random(others.size())]->try_send(
          {.kind = static_cast<LetterKind>(arrival.kind - 1)});
    }
    void lost(Remote& remote, const Error&) noexcept override {
      *text += concat("(", name, " lost ", remote.name(), ") ");
    }
  };
  std::array<Node, 3> nodes;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].world = &world;
    nodes[i].text = &text;
    nodes[i].name = static_cast<char>('a' + i);
    const auto make = [&](Inbox& inbox) {
      return world.join(inbox, std::string(1, nodes[i].name));
    };
    nodes[i].endpoint = make_faulty(nodes[i], faults, make);
  }
  for (auto& node : nodes) {
    for (auto& other : nodes) {
      if (&other != &node) node.others.push_back(&node.endpoint->remote(other.endpoint->address()));
    }
  }
  for (auto& node : nodes) node.others[0]->try_send({.kind = 20});
  world.run_out();
  return text;
}

TEST(SimulationTest, TheSameSeedIsTheSameRun) {
  std::set<std::string> all;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const std::string first = history(seed);
    EXPECT_EQ(history(seed), first);
    EXPECT_GT(first.size(), 200u);
    all.insert(first);
  }
  EXPECT_EQ(all.size(), 50u) << "another seed is another run";
}

TEST(SimulationTest, FaultsFollowFromTheirSeed) {
  const auto faults = [](std::uint64_t seed) {
    return Faults{
        seed,
        {{.drop = 50'000, .duplicate = 50'000, .reorder = 50'000, .delay = 50'000, .cut = 5'000}}};
  };
  std::set<std::string> all;
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const std::string first = history(1, faults(seed));
    EXPECT_EQ(history(1, faults(seed)), first);
    all.insert(first);
  }
  EXPECT_GT(all.size(), 25u);
}

TEST(SimulationTest, TimeIsItsOwn) {
  World world;
  Recorder inbox;
  const auto endpoint = world.join(inbox, "a");
  const auto start = world.now();
  const auto real = std::chrono::steady_clock::now();
  bool rang = false;
  endpoint->call_at(start + 24h, [&] { rang = true; });
  EXPECT_FALSE(endpoint->wait(Deadline::after(23h, world.now()), [&] { return rang; }));
  EXPECT_EQ(world.now() - start, 23h);
  EXPECT_TRUE(endpoint->wait(Deadline::after(23h, world.now()), [&] { return rang; }));
  EXPECT_EQ(world.now() - start, 24h);
  EXPECT_LT(std::chrono::steady_clock::now() - real, 1h);
}

TEST(SimulationTest, ACrashStopsTimersAndIsHeard) {
  World world;
  Recorder a_inbox, b_inbox;
  const auto a = world.join(a_inbox, "a");
  const auto b = world.join(b_inbox, "b");
  ASSERT_EQ(a->remote(b->address()).try_send({}), SendResult::kSent);
  world.run_out();
  ASSERT_EQ(b_inbox.letters(), 1u);
  a->call_at(world.now() + 1s, [] { ADD_FAILURE() << "the dead have no timers"; });
  Remote& to_a = *b_inbox.letter(0).from;
  world.crash(*a);
  EXPECT_EQ(a->remote(b->address()).try_send({}), SendResult::kLost);
  int told = 0;
  const Bytes data = some_bytes(100, 1);
  const Piece pieces[] = {{data, true}};
  EXPECT_EQ(to_a.try_send({.pieces = pieces}, [&](const Error* lost) { told += lost != nullptr; }),
            SendResult::kSent)
      << "it does not know yet";
  world.run_out();
  EXPECT_EQ(told, 1);
  ASSERT_EQ(b_inbox.state().lost.size(), 1u);
  EXPECT_THAT(b_inbox.state().lost[0].second, HasSubstr("a crashed"));
  expect_error(ErrorKind::kPeerLost, "no endpoint", [&] {
    Recorder inbox;
    world.join(inbox, "c")->remote(a->address());
  });
}

// A thread that waits gives the baton away, and has it back when its condition holds.
TEST(SimulationTest, ThreadsPassTheBaton) {
  std::set<std::string> all;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto run = [seed] {
      World world({.seed = seed});
      Recorder a_inbox, b_inbox;
      const auto a = world.join(a_inbox, "a");
      const auto b = world.join(b_inbox, "b");
      std::string order;  // no lock: one thread at a time runs
      b_inbox.on_arrived = [&](Remote& from, const Arrival& arrival) {
        from.try_send({.kind = arrival.kind, .reply = true});
      };
      std::array<int, 3> replies{};
      a_inbox.on_arrived = [&](Remote&, const Arrival& arrival) { ++replies.at(arrival.kind); };
      Remote& to_b = a->remote(b->address());
      for (LetterKind t = 0; t < 3; ++t) {
        world.start([&, t] {
          for (int i = 0; i < 5; ++i) {
            to_b.try_send({.kind = t});
            EXPECT_TRUE(a->wait(Deadline::after(1s, world.now()), [&] { return replies[t] > i; }));
            order += static_cast<char>('0' + t);
          }
        });
      }
      EXPECT_TRUE(world.run([&] { return world.running() == 0; }));
      b_inbox.on_arrived = nullptr;
      return order;
    };
    const std::string first = run();
    EXPECT_EQ(first.size(), 15u);
    EXPECT_EQ(run(), first);
    all.insert(first);
  }
  EXPECT_GT(all.size(), 5u);
}

TEST(SimulationTest, ThreadsThatWaitForEverAreFound) {
  std::string ended;
  {
    World world;
    Recorder inbox;
    const auto endpoint = world.join(inbox, "a");
    world.start([&] {
      try {
        endpoint->wait(Deadline::never(), [] { return false; });
      } catch (const Error& error) {
        ended = error.what();
        throw;
      }
    });
    world.start([&] {
      EXPECT_FALSE(endpoint->wait(Deadline::after(5s, world.now()), [] { return false; }));
    });
    EXPECT_FALSE(world.run([&] { return world.running() == 0; }));
    EXPECT_EQ(world.running(), 1u);
    world.start([] { fail(ErrorKind::kRemote, "thrown by a thread"); });
    expect_error(ErrorKind::kRemote, "thrown by a thread", [&] { world.run_out(); });
  }
  EXPECT_FALSE(ended.empty());  // with the endpoint
}

// --- the faulty endpoint ---

std::vector<LetterKind> kinds_after(const Fault& fault, int letters) {
  World world({.least_delay = 1us, .most_delay = 1us});
  Recorder a_inbox, b_inbox;
  const auto a =
      make_faulty(a_inbox, {1, {fault}}, [&](Inbox& inner) { return world.join(inner, "a"); });
  const auto b = world.join(b_inbox, "b");
  Remote& to_b = a->remote(b->address());
  int sent = 0;
  for (int i = 0; i < letters; ++i) {
    if (to_b.try_send({.kind = static_cast<LetterKind>(i)}, [&](const Error*) { ++sent; }) !=
        SendResult::kSent) {
      break;
    }
    EXPECT_EQ(sent, i + 1);
  }
  world.run_out();
  std::vector<LetterKind> kinds;
  for (const auto& letter : b_inbox.state().letters) kinds.push_back(letter.kind);
  if (fault.cut != 0) {
    EXPECT_EQ(a_inbox.state().lost.size(), 1u);
    EXPECT_EQ(b_inbox.state().lost.size(), 1u);
  }
  return kinds;
}

constexpr std::uint32_t kAlways = 1'000'000;

TEST(FaultyTest, EachFault) {
  EXPECT_THAT(kinds_after({}, 4), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(kinds_after({.first_kind = 1, .last_kind = 2, .drop = kAlways}, 4),
              ElementsAre(0, 3));
  auto doubled = kinds_after({.first_kind = 1, .last_kind = 1, .duplicate = kAlways}, 3);
  std::ranges::sort(doubled);
  EXPECT_THAT(doubled, ElementsAre(0, 1, 1, 2));
  EXPECT_THAT(kinds_after({.first_kind = 1, .last_kind = 1, .reorder = kAlways}, 4),
              ElementsAre(0, 2, 1, 3));
  EXPECT_THAT(kinds_after({.first_kind = 3, .last_kind = 3, .reorder = kAlways}, 4),
              ElementsAre(0, 1, 2, 3))
      << "nothing comes to overtake it";
  EXPECT_THAT(kinds_after({.first_kind = 1, .last_kind = 1, .delay = kAlways}, 4),
              ElementsAre(0, 2, 3, 1));
  EXPECT_THAT(kinds_after({.first_kind = 2, .last_kind = 2, .cut = kAlways}, 4), ElementsAre(0, 1));
}

TEST(FaultyTest, LettersStayWhole) {
  World world;
  Recorder a_inbox, b_inbox;
  const Fault fault{.duplicate = 300'000, .reorder = 300'000, .delay = 300'000};
  const auto a =
      make_faulty(a_inbox, {7, {fault}}, [&](Inbox& inner) { return world.join(inner, "a"); });
  const auto b = world.join(b_inbox, "b");
  Remote& to_b = a->remote(b->address());
  for (LetterKind kind = 0; kind < 40; ++kind) {
    const Bytes data = some_bytes(kind * 100, kind);
    const Piece pieces[] = {{data, kind % 2 == 0}, {}};
    const Bytes head = some_bytes(kind, kind);
    int sent = 0;
    ASSERT_EQ(
        to_b.try_send({.kind = kind, .head = std::span<const std::byte>(head), .pieces = pieces},
                      [&](const Error*) { ++sent; }),
        SendResult::kSent);
    EXPECT_TRUE(world.run([&] { return sent == 1; })) << "then the memory is free";
  }
  world.run_out();
  std::set<LetterKind> kinds;
  for (const auto& letter : b_inbox.state().letters) {
    kinds.insert(letter.kind);
    EXPECT_EQ(letter.head, to_text(some_bytes(letter.kind, letter.kind)));
    ASSERT_EQ(letter.parts.size(), 2u);
    EXPECT_TRUE(std::ranges::equal(letter.parts[0].bytes,
                                   some_bytes(std::size_t{letter.kind} * 100, letter.kind)));
  }
  EXPECT_EQ(kinds.size(), 40u);
}

// Over shared memory, with its threads.
TEST(FaultyTest, DelaysAndDuplicatesOverSharedMemory) {
  const Fault fault{.duplicate = 300'000, .delay = 300'000, .most_delay = 1ms};
  Party b;
  b.endpoint = shm::make_shm_endpoint(b.inbox);
  b.inbox.wakes = b.endpoint.get();
  Party a;
  a.endpoint = make_faulty(a.inbox, {3, {fault}},
                           [](Inbox& inner) { return shm::make_shm_endpoint(inner); });
  Remote& to_b = a.to(b);
  for (LetterKind kind = 0; kind < 200; ++kind) {
    ASSERT_EQ(to_b.try_send({.kind = kind}), SendResult::kSent);
  }
  const auto all = [&] {
    std::set<LetterKind> kinds;
    for (const auto& letter : b.inbox.state().letters) kinds.insert(letter.kind);
    return kinds.size() == 200;
  };
  EXPECT_TRUE(b.endpoint->wait(Deadline::after(30s), all));
}

}  // namespace
}  // namespace convoy::transport::test
