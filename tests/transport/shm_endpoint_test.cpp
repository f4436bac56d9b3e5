// What is particular to the endpoint of processes that share memory.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <semaphore>
#include <sstream>
#include <thread>

#include "base/concat.h"
#include "support.h"
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
using shm::make_shm_endpoint;
using shm::shm_stats;
using shm::shm_trim;
using shm::shm_unwatch;
using shm::shm_watch;
using shm::ShmEndpointOptions;
using testing::HasSubstr;

constexpr auto kLimit = 30s;

std::unique_ptr<Party> join(const ShmEndpointOptions& options = {}) {
  auto party = std::make_unique<Party>();
  party->endpoint = make_shm_endpoint(party->inbox, options);
  party->inbox.wakes = party->endpoint.get();
  return party;
}

bool until(Party& party, FunctionRef<bool()> ready) {
  return party.endpoint->wait(Deadline::after(kLimit), ready);
}

// The thread that serves stands in a call; replies arrive nevertheless, for the thread that waits
// takes them itself. Nothing else is given to that thread.
TEST(ShmEndpointTest, WhoWaitsTakesRepliesAndNothingElse) {
  const auto a = join();
  const auto b = join();
  std::binary_semaphore blocked{0};
  std::binary_semaphore go_on{0};
  std::atomic<std::thread::id> served{};
  const auto waiting = std::this_thread::get_id();
  a->inbox.on_arrived = [&](Remote&, const Arrival& arrival) {
    if (arrival.reply) return;
    EXPECT_NE(std::this_thread::get_id(), waiting);
    served = std::this_thread::get_id();
    if (arrival.kind == 1) {
      blocked.release();
      go_on.acquire();
    }
  };
  Remote& to_a = b->to(*a);
  ASSERT_EQ(to_a.try_send({.kind = 1}), SendResult::kSent);
  blocked.acquire();
  for (LetterKind kind = 2; kind < 100; ++kind) {
    ASSERT_EQ(to_a.try_send({.kind = kind, .reply = kind % 2 == 0}), SendResult::kSent);
  }
  const Bytes data = some_bytes(1 << 20, 1);
  const Piece pieces[] = {{data}};
  ASSERT_EQ(to_a.try_send({.kind = 100, .reply = true, .pieces = pieces}), SendResult::kSent);
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 50; }));
  for (const auto& letter : a->inbox.state().letters) EXPECT_TRUE(letter.reply);
  a->inbox.clear();
  go_on.release();
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 50; }));
  const auto letters = a->inbox.state().letters;
  EXPECT_EQ(letters[0].kind, 1);
  for (std::size_t i = 1; i < letters.size(); ++i) EXPECT_EQ(letters[i].kind, 2 * i + 1);
  a->inbox.on_arrived = nullptr;
}

// Many threads wait for replies of their own; each gets them, whoever takes them out of the ring.
TEST(ShmEndpointTest, ManyThreadsWait) {
  const auto a = join();
  const auto b = join();
  b->inbox.on_arrived = [](Remote& from, const Arrival& arrival) {
    while (from.try_send({.kind = arrival.kind, .reply = true}) == SendResult::kWouldBlock) {
      std::this_thread::yield();
    }
  };
  constexpr int kThreads = 4;
  constexpr int kCalls = 2000;
  std::array<std::atomic<int>, kThreads> replies{};
  a->inbox.on_arrived = [&](Remote&, const Arrival& arrival) { ++replies.at(arrival.kind); };
  Remote& to_b = a->to(*b);
  std::vector<std::jthread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kCalls; ++i) {
        ASSERT_EQ(to_b.try_send({.kind = static_cast<LetterKind>(t)}), SendResult::kSent);
        ASSERT_TRUE(until(*a, [&] { return replies[static_cast<std::size_t>(t)] > i; }));
      }
    });
  }
  threads.clear();
  b->inbox.on_arrived = nullptr;
}

// Calls in both directions at once, each answered by the other side's serving thread.
TEST(ShmEndpointTest, CrossingCalls) {
  const auto a = join();
  const auto b = join();
  std::atomic<int> replies[2] = {};
  const auto handle = [](std::atomic<int>& count) {
    return [&count](Remote& from, const Arrival& arrival) {
      if (arrival.reply) {
        ++count;
      } else {
        ASSERT_EQ(from.try_send({.reply = true}), SendResult::kSent);
      }
    };
  };
  a->inbox.on_arrived = handle(replies[0]);
  b->inbox.on_arrived = handle(replies[1]);
  const auto call = [](Party& from, Party& to, std::atomic<int>& count) {
    Remote& remote = from.to(to);
    for (int i = 0; i < 3000; ++i) {
      ASSERT_EQ(remote.try_send({}), SendResult::kSent);
      ASSERT_TRUE(until(from, [&] { return count > i; }));
    }
  };
  std::jthread other([&] { call(*b, *a, replies[1]); });
  call(*a, *b, replies[0]);
}

// Somebody new sends a reply at once; the thread that waits must not be given it before joined().
TEST(ShmEndpointTest, AReplyDoesNotOvertakeTheGreeting) {
  const auto a = join();
  const auto b = join({.service_thread = false});
  std::atomic<std::size_t> greeted = 0;
  b->inbox.on_arrived = [&](Remote&, const Arrival& arrival) {
    EXPECT_TRUE(arrival.reply);
    greeted = b->inbox.state().joined.size();
  };
  Remote& to_b = a->to(*b);
  const Bytes data = some_bytes(100'000, 13);
  const Piece pieces[] = {{data}};
  ASSERT_EQ(to_b.try_send({.kind = 1, .reply = true}), SendResult::kSent);
  ASSERT_EQ(to_b.try_send({.kind = 2, .reply = true, .pieces = pieces}), SendResult::kSent);
  // Long enough for all that a thread in wait() would do.
  b->endpoint->wait(Deadline::after(20ms), [&] { return b->inbox.letters() != 0; });
  EXPECT_EQ(b->inbox.letters(), 0u);
  const Deadline limit = Deadline::after(kLimit);
  while (b->inbox.letters() < 2 && !limit.expired()) b->endpoint->poll(Endpoint::Serve::kAll);
  EXPECT_EQ(b->inbox.letters(), 2u);
  EXPECT_EQ(greeted, 1u);
  b->inbox.on_arrived = nullptr;
  b->inbox.clear();
}

// A call of the inbox may wait: requests, losses and timers go on meanwhile.
TEST(ShmEndpointTest, ACallThatWaitsKeepsNobodyFromBeingServed) {
  const auto a = join();
  auto b = join();
  std::atomic<bool> second = false;
  std::atomic<bool> timer = false;
  std::atomic<int> returned = 0;
  Endpoint* const endpoint = a->endpoint.get();
  a->inbox.on_arrived = [&](Remote&, const Arrival& arrival) {
    if (arrival.kind == 1) {
      endpoint->call_at(endpoint->now(), [&] {
        timer = true;
        endpoint->wake();
      });
      EXPECT_TRUE(until(*a, [&] { return second && timer && !a->inbox.state().lost.empty(); }));
      ++returned;
    }
    if (arrival.kind == 2) second = true;
  };
  Remote& to_a = b->to(*a);
  ASSERT_EQ(to_a.try_send({.kind = 1}), SendResult::kSent);
  ASSERT_EQ(to_a.try_send({.kind = 2}), SendResult::kSent);
  ASSERT_TRUE(until(*a, [&] { return second.load(); }));
  b.reset();
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 2; }));
  EXPECT_EQ(returned, 1);
  // The one that was handed over to goes on.
  const auto c = join();
  ASSERT_EQ(c->to(*a).try_send({.kind = 3}), SendResult::kSent);
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 3; }));
  a->inbox.on_arrived = nullptr;
}

// A call that stands still without wait(): another thread says so.
TEST(ShmEndpointTest, HandsOverWhenAskedTo) {
  const auto a = join();
  const auto b = join();
  std::binary_semaphore blocked{0};
  std::counting_semaphore<8> go_on{0};
  a->inbox.on_arrived = [&](Remote&, const Arrival& arrival) {
    if (arrival.kind != 1) return;
    blocked.release();
    go_on.acquire();
  };
  Remote& to_a = b->to(*a);
  for (LetterKind round = 0; round < 3; ++round) {
    ASSERT_EQ(to_a.try_send({.kind = 1}), SendResult::kSent);
    blocked.acquire();
    a->endpoint->hand_over();
    ASSERT_EQ(to_a.try_send({.kind = 2}), SendResult::kSent);
    ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == round + 1u; }));
  }
  go_on.release(3);
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 6; }));
  a->endpoint->hand_over();  // also when nobody stands in a call
  ASSERT_EQ(to_a.try_send({.kind = 3}), SendResult::kSent);
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 7; }));
  a->inbox.on_arrived = nullptr;
}

// A thread in wait_aside() takes nothing, replies neither, and looks again when it is woken.
TEST(ShmEndpointTest, WhoWaitsAsideTakesNothing) {
  const auto a = join();
  const auto b = join();
  const auto waiting = std::this_thread::get_id();
  std::atomic<int> letters = 0;
  a->inbox.on_arrived = [&](Remote&, const Arrival&) {
    EXPECT_NE(std::this_thread::get_id(), waiting);
    ++letters;
  };
  Remote& to_a = b->to(*a);
  for (int round = 1; round <= 200; ++round) {
    ASSERT_EQ(to_a.try_send({.kind = 1, .reply = round % 2 == 0}), SendResult::kSent);
    ASSERT_TRUE(a->endpoint->wait_aside(Deadline::after(kLimit), [&] { return letters == round; }));
  }
  EXPECT_FALSE(a->endpoint->wait_aside(Deadline::after(1ms), [] { return false; }));
  a->inbox.on_arrived = nullptr;
}

// Threads that come to wait() again and again take replies themselves; one that comes later, when
// nobody is there, arrives nevertheless.
TEST(ShmEndpointTest, AReplyArrivesThoughNobodyWaits) {
  const auto a = join();
  const auto b = join();
  std::binary_semaphore came{0};
  std::atomic<int> replies = 0;
  a->inbox.on_arrived = [&](Remote&, const Arrival& arrival) {
    ++replies;
    if (arrival.kind == 2) came.release();
  };
  b->inbox.on_arrived = [](Remote& from, const Arrival& arrival) {
    from.try_send({.kind = arrival.kind, .reply = true});
  };
  Remote& to_b = a->to(*b);
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 100; ++i) {
      const int before = replies;
      ASSERT_EQ(to_b.try_send({.kind = 1}), SendResult::kSent);
      ASSERT_TRUE(until(*a, [&] { return replies > before; }));
    }
    ASSERT_EQ(to_b.try_send({.kind = 2}), SendResult::kSent);
    ASSERT_TRUE(came.try_acquire_for(kLimit)) << "round " << round;
  }
  a->inbox.on_arrived = nullptr;
  b->inbox.on_arrived = nullptr;
}

// Counts up to what somebody waits for. Made before the parties: who adds may still be inside when
// that somebody goes on.
class Count {
 public:
  void add() {
    ++*count_.lock();
    count_.notify();
  }
  bool reaches(std::size_t number) {
    auto count = count_.lock();
    return count.wait(Deadline::after(kLimit), [&] { return *count >= number; });
  }

 private:
  Guarded<std::size_t> count_{0};
};

// Whoever says that it will wait takes the answer itself, also if that comes before the wait. (The
// thread that serves may be awake by chance, and in the middle of a look.)
TEST(ShmEndpointTest, AnAttentiveThreadTakesItsAnswer) {
  Count answers;
  std::atomic<std::thread::id> taker{};
  const auto a = join();
  const auto b = join();
  b->inbox.on_arrived = [&](Remote& from, const Arrival&) {
    EXPECT_EQ(from.try_send({.kind = 2, .reply = true}), SendResult::kSent);
    answers.add();
  };
  a->inbox.on_arrived = [&](Remote&, const Arrival&) { taker = std::this_thread::get_id(); };
  Remote& to_b = a->to(*b);
  int own = 0;
  // The first one also needs what the other side sends for the connection.
  ASSERT_EQ(to_b.try_send({.kind = 1}), SendResult::kSent);
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 1; }));
  for (std::size_t i = 2; i <= 50; ++i) {
    const Endpoint::Attention attention(*a->endpoint);
    const Endpoint::Attention another(*a->endpoint);  // changes nothing
    ASSERT_EQ(to_b.try_send({.kind = 1}), SendResult::kSent);
    ASSERT_TRUE(answers.reaches(i));
    ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == i; }));
    if (taker.load() == std::this_thread::get_id()) ++own;
  }
  EXPECT_GT(own, 40);
}

// What it has not taken when its attention ends is taken by the thread that serves.
TEST(ShmEndpointTest, WhatAnAttentiveThreadLeavesArrivesAnyway) {
  Count answers;
  Count arrivals;
  const auto a = join();
  const auto b = join();
  b->inbox.on_arrived = [&](Remote& from, const Arrival&) {
    EXPECT_EQ(from.try_send({.kind = 2, .reply = true}), SendResult::kSent);
    answers.add();
  };
  a->inbox.on_arrived = [&](Remote&, const Arrival&) { arrivals.add(); };
  Remote& to_b = a->to(*b);
  // The first one also needs what the other side sends for the connection.
  ASSERT_EQ(to_b.try_send({.kind = 1}), SendResult::kSent);
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 1; }));
  for (std::size_t i = 2; i <= 50; ++i) {
    {
      const Endpoint::Attention attention(*a->endpoint);
      ASSERT_EQ(to_b.try_send({.kind = 1}), SendResult::kSent);
      ASSERT_TRUE(answers.reaches(i));
    }
    ASSERT_TRUE(arrivals.reaches(i));
  }
}

// One remote after the other has its ring watched; all the others knock.
TEST(ShmEndpointTest, WatchedRingsTakeTurns) {
  const auto hub = join();
  constexpr std::size_t kSenders = 4;
  constexpr std::size_t kLetters = 3000;
  std::atomic<std::size_t> sent = 0;
  std::vector<std::unique_ptr<Party>> parties;
  std::vector<std::jthread> threads;
  for (std::size_t s = 0; s < kSenders; ++s) {
    parties.push_back(join());
    threads.emplace_back([&, s] {
      Remote& to = parties[s]->to(*hub);
      for (std::size_t i = 0; i < kLetters; ++i) {
        while (to.try_send({.kind = static_cast<LetterKind>(s), .reply = i % 3 == 0}) !=
               SendResult::kSent) {
          std::this_thread::yield();
        }
        ++sent;
        if (i % (7 + s) == 0) std::this_thread::yield();
      }
    });
  }
  EXPECT_TRUE(until(*hub, [&] { return hub->inbox.letters() == kSenders * kLetters; }));
  threads.clear();
  EXPECT_EQ(sent, kSenders * kLetters);
}

// The thread that serves takes several requests at once. If the first one's
// call waits, the others go on, in their order.
TEST(ShmEndpointTest, RequestsThatWereTakenWithOneThatWaitsGoOn) {
  const auto a = join();
  const auto b = join();
  constexpr LetterKind kLast = 12;
  std::binary_semaphore blocked{0};
  std::binary_semaphore go_on{0};
  std::binary_semaphore returned{0};
  std::atomic<int> came = 0;
  std::vector<LetterKind> order;  // of the thread that serves, whichever it is
  a->inbox.on_arrived = [&](Remote&, const Arrival& arrival) {
    if (arrival.kind == 1) {
      blocked.release();
      go_on.acquire();
      return;
    }
    if (arrival.kind == 2) {
      EXPECT_TRUE(until(*a, [&] { return came == kLast - 2; }));
      returned.release();
      return;
    }
    order.push_back(arrival.kind);
    ++came;
    a->endpoint->wake();
  };
  Remote& to_a = b->to(*a);
  for (int round = 0; round < 20; ++round) {
    came = 0;
    order.clear();
    ASSERT_EQ(to_a.try_send({.kind = 1}), SendResult::kSent);
    blocked.acquire();
    for (LetterKind kind = 2; kind <= kLast; ++kind) {
      ASSERT_EQ(to_a.try_send({.kind = kind}), SendResult::kSent);
    }
    go_on.release();
    // Not in wait(): who waits there takes requests, too, and puts them aside.
    ASSERT_TRUE(returned.try_acquire_for(kLimit));
    ASSERT_EQ(order.size(), kLast - 2u);
    for (std::size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], i + 3);
  }
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 20 * kLast; }));
  a->inbox.on_arrived = nullptr;
}

// A thread in wait() delivers a reply of a remote that is lost meanwhile:
// lost() comes after it.
TEST(ShmEndpointTest, LostComesAfterTheReplyThatIsBeingDelivered) {
  const auto a = join();
  auto b = join();
  std::atomic<bool> inside = false;
  std::atomic<int> lost_inside = 0;
  a->inbox.on_arrived = [&](Remote& from, const Arrival& arrival) {
    if (!arrival.reply) return;
    inside = true;
    b.reset();
    const Deadline limit = Deadline::after(kLimit);
    while (!from.lost() && !limit.expired()) std::this_thread::yield();
    EXPECT_TRUE(from.lost());
    // The thread that serves has done all that was to do when these have run, one after another.
    for (int i = 0; i < 50; ++i) {
      std::binary_semaphore ran{0};
      a->endpoint->call_at(a->endpoint->now(), [&] { ran.release(); });
      EXPECT_TRUE(ran.try_acquire_for(kLimit));
      lost_inside += static_cast<int>(a->inbox.state().lost.size());
    }
    inside = false;
  };
  b->inbox.on_arrived = [](Remote& from, const Arrival&) {
    EXPECT_EQ(from.try_send({.reply = true}), SendResult::kSent);
  };
  // Two threads wait: one stands in the call, the other takes what happens meanwhile.
  std::jthread second(
      [&] { EXPECT_TRUE(until(*a, [&] { return !a->inbox.state().lost.empty(); })); });
  ASSERT_EQ(a->to(*b).try_send({}), SendResult::kSent);
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 1; }));
  EXPECT_EQ(lost_inside, 0);
  ASSERT_TRUE(until(*a, [&] { return !a->inbox.state().lost.empty(); }));
  EXPECT_FALSE(inside);
  a->inbox.on_arrived = nullptr;
}

// --- calls of the inbox that wait, in a thread that waits ---

// Sends it a moment later, when whoever waits for it sleeps.
void send_later(Party& from, Party& to, LetterKind kind, bool reply) {
  Remote& remote = from.to(to);
  from.endpoint->call_at(from.endpoint->now() + 20ms, [&remote, kind, reply] {
    EXPECT_EQ(remote.try_send({.kind = kind, .reply = reply}), SendResult::kSent);
  });
}

TEST(ShmEndpointTest, WhoIsGivenAReplyMayWaitForAnother) {
  const auto a = join();
  const auto b = join();
  std::atomic<int> second = 0;
  std::atomic<int> returned = 0;
  a->inbox.on_arrived = [&](Remote&, const Arrival& arrival) {
    if (arrival.kind == 2) ++second;
    if (arrival.kind != 1) return;
    const int before = second;
    send_later(*b, *a, 2, /*reply=*/true);
    EXPECT_TRUE(until(*a, [&] { return second > before; }));
    ++returned;
    a->endpoint->wake();
  };
  Remote& to_a = b->to(*a);
  for (int i = 1; i <= 5; ++i) {
    ASSERT_EQ(to_a.try_send({.kind = 1, .reply = true}), SendResult::kSent);
    ASSERT_TRUE(until(*a, [&] { return returned == i; }));
  }
  a->inbox.on_arrived = nullptr;
}

// Nobody else looks at what comes to the first endpoint, whichever thread was given the reply.
TEST(ShmEndpointTest, WhoIsGivenAReplyMayWaitElsewhere) {
  const auto a = join();
  const auto b = join();
  const auto c = join();
  Remote& to_a = b->to(*a);
  for (int round = 0; round < 6; ++round) {
    const bool aside = round % 2 == 1;
    std::atomic<bool> served = false;
    std::atomic<bool> returned = false;
    a->inbox.on_arrived = [&](Remote&, const Arrival& arrival) {
      if (!arrival.reply) {
        served = true;
        (aside ? a : c)->endpoint->wake();
        return;
      }
      send_later(*b, *a, 2, /*reply=*/false);
      const auto ready = [&] { return served.load(); };
      EXPECT_TRUE(aside ? a->endpoint->wait_aside(Deadline::after(kLimit), ready)
                        : until(*c, ready));
      returned = true;
      a->endpoint->wake();
    };
    ASSERT_EQ(to_a.try_send({.kind = 1, .reply = true}), SendResult::kSent);
    const Deadline limit = Deadline::after(kLimit);
    // Not in wait(): the thread that serves is given it.
    while (round < 2 && !returned && !limit.expired()) std::this_thread::yield();
    ASSERT_TRUE(until(*a, [&] { return returned && a->inbox.letters() == 2u * round + 2; }));
  }
  a->inbox.on_arrived = nullptr;
}

// Replies are taken several at a time.
TEST(ShmEndpointTest, WhoIsGivenAReplyMayWaitForThoseBehindIt) {
  std::binary_semaphore blocked{0};
  std::binary_semaphore go_on{0};
  std::binary_semaphore served{0};
  const auto a = join();
  const auto b = join();
  Remote& to_a = b->to(*a);
  for (const bool aside : {false, true}) {
    std::vector<LetterKind> order;
    a->inbox.on_arrived = [&](Remote&, const Arrival& arrival) {
      if (!arrival.reply) {  // on the thread that serves
        if (arrival.kind == 9) return served.release();
        blocked.release();
        go_on.acquire();
        return;
      }
      const auto ready = [&] { return !order.empty() && order.back() > arrival.kind; };
      if (arrival.kind == 1 && aside) {
        EXPECT_TRUE(a->endpoint->wait_aside(Deadline::after(kLimit), ready));
      } else if (arrival.kind % 2 == 1) {
        EXPECT_TRUE(until(*a, ready));
      }
      order.push_back(arrival.kind);
    };
    ASSERT_EQ(to_a.try_send({}), SendResult::kSent);
    blocked.acquire();
    for (LetterKind kind = 1; kind <= 4; ++kind) {
      ASSERT_EQ(to_a.try_send({.kind = kind, .reply = true}), SendResult::kSent);
    }
    {
      std::optional<Endpoint::Attention> attention;
      if (aside) attention.emplace(*a->endpoint);
      ASSERT_TRUE(until(*a, [&] { return order.size() == 4; }));
    }
    EXPECT_EQ(order, (std::vector<LetterKind>{2, 4, 3, 1}));
    go_on.release();
    ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 5; }));
    // Nobody is thought to be in wait() any more.
    send_later(*b, *a, 9, /*reply=*/false);
    ASSERT_TRUE(served.try_acquire_for(kLimit));
    ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 6; }));
    a->inbox.clear();
  }
  a->inbox.on_arrived = nullptr;
}

// Also while it waits at another endpoint: another thread waits for them here.
TEST(ShmEndpointTest, WhoWaitsElsewhereKeepsNoRepliesFromOthers) {
  const auto a = join();
  const auto b = join();
  const auto c = join();
  std::binary_semaphore blocked{0};
  std::binary_semaphore go_on{0};
  std::atomic<bool> heard = false;
  a->inbox.on_arrived = [&](Remote&, const Arrival& arrival) {
    if (!arrival.reply) {  // on the thread that serves
      blocked.release();
      go_on.acquire();
    } else if (arrival.kind == 1) {
      EXPECT_TRUE(until(*c, [&] { return heard.load(); }));
    }
  };
  Remote& to_a = b->to(*a);
  ASSERT_EQ(to_a.try_send({}), SendResult::kSent);
  blocked.acquire();
  for (LetterKind kind = 1; kind <= 4; ++kind) {
    ASSERT_EQ(to_a.try_send({.kind = kind, .reply = true}), SendResult::kSent);
  }
  // One of the two is given the first reply, and the other waits for those behind it.
  std::jthread other([&] {
    EXPECT_TRUE(until(*a, [&] { return a->inbox.letters() >= 3; }));
    heard = true;
    c->endpoint->wake();
  });
  EXPECT_TRUE(until(*a, [&] { return a->inbox.letters() >= 3; }));
  heard = true;
  c->endpoint->wake();
  go_on.release();
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 5; }));
  other.join();
  a->inbox.on_arrived = nullptr;
}

// Replies and requests, small and large.
TEST(ShmEndpointTest, WhoIsGivenALetterMayWaitForTheLossOfItsSender) {
  const auto a = join();
  const Bytes data = some_bytes(200'000, 3);
  for (std::size_t round = 0; round < 8; ++round) {
    auto b = join();
    std::binary_semaphore sent{0};
    std::atomic<bool> returned = false;
    a->inbox.on_arrived = [&](Remote&, const Arrival&) {
      sent.acquire();
      b.reset();
      EXPECT_TRUE(until(*a, [&] { return a->inbox.losses() == round + 1; }));
      returned = true;
      a->endpoint->wake();
    };
    const Piece pieces[] = {{std::span(data).first(round % 4 < 2 ? 100 : data.size())}};
    ASSERT_EQ(b->to(*a).try_send({.reply = round % 2 == 0, .pieces = pieces}), SendResult::kSent);
    sent.release();
    ASSERT_TRUE(until(*a, [&] { return returned.load(); })) << "round " << round;
    ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == round + 1; }));
  }
  a->inbox.on_arrived = nullptr;
}

// What is asked for may throw, also by a thread that is about to sleep.
TEST(ShmEndpointTest, AWaitThatThrowsLeavesNothingBehind) {
  const auto a = join();
  const auto b = join();
  for (int round = 0; round < 100; ++round) {
    int calls = 0;
    const auto ready = [&] {
      if (++calls == round % 3 + 1) fail(ErrorKind::kRemote, "enough");
      return false;
    };
    // Waits in vain: those after them do not spin.
    EXPECT_FALSE(a->endpoint->wait(Deadline::after(1ms), [] { return false; }));
    expect_error(ErrorKind::kRemote, "enough",
                 [&] { a->endpoint->wait(Deadline::after(kLimit), ready); });
  }
  send_later(*b, *a, 1, /*reply=*/true);
  EXPECT_TRUE(until(*a, [&] { return a->inbox.letters() == 1; }));
  std::binary_semaphore came{0};
  a->inbox.on_arrived = [&](Remote&, const Arrival&) { came.release(); };
  send_later(*b, *a, 1, /*reply=*/true);
  EXPECT_TRUE(came.try_acquire_for(kLimit)) << "nobody was woken for it";
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 2; }));
  a->inbox.on_arrived = nullptr;
}

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

// --- descriptors ---

// A pipe whose writing end is somebody's who has something to tell.
struct Pipe {
  UniqueFd from, to;

  Pipe() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
    from = UniqueFd(ends[0]);
    to = UniqueFd(ends[1]);
  }
  void put() const { EXPECT_EQ(::write(to.get(), "x", 1), 1); }
  void take() const {
    char byte = 0;
    EXPECT_EQ(::read(from.get(), &byte, 1), 1);
  }
};

// The thread that serves sleeps on epoll. Nobody is in wait(): letters,
// descriptors and timers each have to wake it, one at a time and all at once.
TEST(ShmEndpointTest, LettersDescriptorsAndTimersWakeWhoSleepsOnEpoll) {
  const auto a = join({.descriptors = true});
  const auto b = join();
  const Pipe pipe;
  std::counting_semaphore<> letters{0};
  std::counting_semaphore<> bytes{0};
  std::atomic<std::thread::id> server{};
  a->inbox.on_arrived = [&](Remote&, const Arrival&) {
    server = std::this_thread::get_id();
    letters.release();
  };
  const auto id = shm_watch(*a->endpoint, pipe.from.get(), EPOLLIN, [&](std::uint32_t events) {
    EXPECT_EQ(events, EPOLLIN);
    EXPECT_EQ(server.load(), std::this_thread::get_id());
    pipe.take();
    bytes.release();
  });
  Remote& to_a = b->to(*a);
  const auto send = [&](bool reply) {
    ASSERT_EQ(to_a.try_send({.kind = 1, .reply = reply}), SendResult::kSent);
  };
  for (int round = 0; round < 1000; ++round) {
    send(round % 3 == 0);
    ASSERT_TRUE(letters.try_acquire_for(kLimit)) << "round " << round;
    pipe.put();
    ASSERT_TRUE(bytes.try_acquire_for(kLimit)) << "round " << round;
    if (round % 50 == 0) {
      std::binary_semaphore ran{0};
      a->endpoint->call_at(a->endpoint->now() + 1ms, [&] { ran.release(); });
      ASSERT_TRUE(ran.try_acquire_for(kLimit)) << "round " << round;
    }
  }
  {
    std::jthread other([&] {
      for (int i = 0; i < 5000; ++i) {
        pipe.put();
        ASSERT_TRUE(bytes.try_acquire_for(kLimit)) << i;
      }
    });
    for (int i = 0; i < 5000; ++i) {
      send(i % 2 == 0);
      ASSERT_TRUE(letters.try_acquire_for(kLimit)) << i;
    }
  }
  shm_unwatch(*a->endpoint, id);
  EXPECT_FALSE(shm_unwatch(*a->endpoint, id));
  pipe.put();
  send(false);
  ASSERT_TRUE(letters.try_acquire_for(kLimit));
  EXPECT_FALSE(bytes.try_acquire()) << "it is not watched any more";
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 6001; }));
  a->inbox.on_arrived = nullptr;
}

// Somebody who waits takes its replies itself, as always.
TEST(ShmEndpointTest, CallsBetweenEndpointsThatSleepOnEpoll) {
  const auto a = join({.descriptors = true});
  const auto b = join({.descriptors = true});
  std::atomic<int> replies = 0;
  a->inbox.on_arrived = [&](Remote&, const Arrival&) { ++replies; };
  b->inbox.on_arrived = [](Remote& from, const Arrival&) {
    EXPECT_EQ(from.try_send({.reply = true}), SendResult::kSent);
  };
  Remote& to_b = a->to(*b);
  for (int i = 1; i <= 3000; ++i) {
    ASSERT_EQ(to_b.try_send({}), SendResult::kSent);
    ASSERT_TRUE(until(*a, [&] { return replies == i; }));
  }
  for (Party* const party : {a.get(), b.get()}) {
    ASSERT_TRUE(until(*party, [&] { return party->inbox.letters() == 3000; }));
    party->inbox.on_arrived = nullptr;
  }
}

// Threads that serve sleep on the same epoll for a moment when one hands over
// to the next: what wakes the wrong one is passed on.
TEST(ShmEndpointTest, HandsOverWhileItSleepsOnEpoll) {
  const auto a = join({.descriptors = true});
  const auto b = join();
  const Pipe pipe;
  std::counting_semaphore<> letters{0};
  std::counting_semaphore<> bytes{0};
  a->inbox.on_arrived = [&](Remote&, const Arrival&) { letters.release(); };
  const auto id = shm_watch(*a->endpoint, pipe.from.get(), EPOLLIN, [&](std::uint32_t) {
    pipe.take();
    bytes.release();
  });
  Remote& to_a = b->to(*a);
  for (int round = 0; round < 500; ++round) {
    a->endpoint->hand_over();
    ASSERT_EQ(to_a.try_send({.kind = 1}), SendResult::kSent);
    pipe.put();
    ASSERT_TRUE(letters.try_acquire_for(kLimit)) << "round " << round;
    ASSERT_TRUE(bytes.try_acquire_for(kLimit)) << "round " << round;
  }
  shm_unwatch(*a->endpoint, id);
  ASSERT_TRUE(until(*a, [&] { return a->inbox.letters() == 500; }));
  a->inbox.on_arrived = nullptr;
}

// A descriptor's call may wait, and is not made again meanwhile.
TEST(ShmEndpointTest, ADescriptorsCallMayWait) {
  const auto a = join({.descriptors = true});
  const auto b = join();
  const Pipe pipe;
  std::atomic<int> calls = 0;
  std::atomic<int> done = 0;
  const auto id = shm_watch(*a->endpoint, pipe.from.get(), EPOLLIN, [&](std::uint32_t) {
    EXPECT_EQ(++calls, 1);
    EXPECT_TRUE(until(*a, [&] { return a->inbox.letters() == 1; }));
    --calls;
    pipe.take();
    ++done;
    a->endpoint->wake();
  });
  pipe.put();
  pipe.put();
  ASSERT_EQ(b->to(*a).try_send({.kind = 1}), SendResult::kSent);
  ASSERT_TRUE(until(*a, [&] { return done == 2; }));
  shm_unwatch(*a->endpoint, id);
}

TEST(ShmEndpointTest, WatchesNoDescriptorsUnlessMadeForThem) {
  const auto a = join();
  const Pipe pipe;
  expect_error(ErrorKind::kInvalidArgument, "ShmEndpointOptions::descriptors",
               [&] { shm_watch(*a->endpoint, pipe.from.get(), EPOLLIN, [](std::uint32_t) {}); });
  const auto b = join({.descriptors = true});
  expect_error(ErrorKind::kInvalidArgument, "descriptor",
               [&] { shm_watch(*b->endpoint, -1, EPOLLIN, [](std::uint32_t) {}); });
}

// --- large letters ---

// Of the mapping that holds this address, in page tables of this process.
std::size_t resident_kilobytes(const void* address) {
  std::ifstream in("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  bool here = false;
  for (std::string line; std::getline(in, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream words(line);
    if (words >> std::hex >> begin >> dash >> end && dash == '-') {
      here = begin <= wanted && wanted < end;
    } else if (here && line.starts_with("Rss:")) {
      return std::stoul(line.substr(4));
    }
  }
  ADD_FAILURE() << "no such mapping";
  return 0;
}

// The receiver's page tables are filled by what it reads, and not before.
TEST(ShmEndpointTest, LentMemoryIsMappedLazily) {
  const auto a = join();
  const auto b = join();
  constexpr std::size_t kBytes = std::size_t{32} << 20;
  const Bytes data = some_bytes(kBytes, 21);
  const Piece pieces[] = {{data}};
  ASSERT_EQ(a->to(*b).try_send({.pieces = pieces}), SendResult::kSent);
  ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
  {
    const Part part = b->inbox.letter(0).parts[0];
    ASSERT_EQ(part.where, Part::Where::kLent);
    EXPECT_LT(resident_kilobytes(part.bytes.data()), kBytes / 1024 / 4);
    EXPECT_TRUE(std::ranges::equal(part.bytes, data));
    EXPECT_GE(resident_kilobytes(part.bytes.data()), kBytes / 1024);
  }
  b->inbox.clear();
}

TEST(ShmEndpointTest, LentMemoryIsNotCopiedAndIsGivenBack) {
  const auto a = join();
  auto b = join();
  Remote& to_b = a->to(*b);
  const Bytes data = some_bytes(5 << 20, 2);
  const Piece pieces[] = {{data}};
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(to_b.try_send({.pieces = pieces}), SendResult::kSent);
    ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
    EXPECT_EQ(b->inbox.letter(0).parts[0].where, Part::Where::kLent);
    EXPECT_TRUE(std::ranges::equal(b->inbox.letter(0).parts[0].bytes, data));
    EXPECT_EQ(shm_stats(*a->endpoint).lent_bytes, data.size());
    b->inbox.clear();
    EXPECT_EQ(shm_stats(*a->endpoint).lent_bytes, 0u);
  }
  EXPECT_LT(shm_stats(*a->endpoint).heap_bytes, 3 * data.size()) << "memory is used again";
  EXPECT_GE(shm_trim(*a->endpoint), data.size());
  EXPECT_EQ(shm_stats(*a->endpoint).heap_bytes, 0u);
  // New memory after that is known to the remote, too.
  ASSERT_EQ(to_b.try_send({.pieces = pieces}), SendResult::kSent);
  ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
  // A part outlives both endpoints.
  const Part part = b->inbox.letter(0).parts[0];
  b->inbox.clear();
  b.reset();
  ASSERT_TRUE(until(*a, [&] { return !a->inbox.state().lost.empty(); }));
  EXPECT_EQ(shm_stats(*a->endpoint).limbo_loans, 1u) << "it may still be read";
  EXPECT_TRUE(std::ranges::equal(part.bytes, data));
}

TEST(ShmEndpointTest, LoansOfALivingRemoteAreFreedWhenItGivesThemBack) {
  const auto a = join();
  auto b = join();
  const Bytes data = some_bytes(100'000, 3);
  const Piece pieces[] = {{data}};
  ASSERT_EQ(a->to(*b).try_send({.pieces = pieces}), SendResult::kSent);
  ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
  Part part = b->inbox.letter(0).parts[0];
  b->inbox.clear();
  b.reset();
  ASSERT_TRUE(until(*a, [&] { return !a->inbox.state().lost.empty(); }));
  EXPECT_EQ(shm_stats(*a->endpoint).limbo_loans, 1u);
  part = {};
  EXPECT_EQ(shm_stats(*a->endpoint).limbo_loans, 0u);
}

TEST(ShmEndpointTest, QuotaBoundsWhatARemoteHolds) {
  const auto a = join({.quota = 3 << 20});
  const auto b = join();
  Remote& to_b = a->to(*b);
  const Bytes data = some_bytes(1 << 20, 4);
  const Piece one[] = {{data}};
  for (int i = 0; i < 3; ++i) ASSERT_EQ(to_b.try_send({.pieces = one}), SendResult::kSent);
  EXPECT_EQ(to_b.try_send({.pieces = one}), SendResult::kWouldBlock);
  // Small letters go on.
  EXPECT_EQ(to_b.try_send({.kind = 9}), SendResult::kSent);
  ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 4; }));
  EXPECT_EQ(to_b.try_send({.pieces = one}), SendResult::kWouldBlock);
  EXPECT_EQ(a->inbox.state().rooms[&to_b], 0);
  b->inbox.clear();
  ASSERT_TRUE(until(*a, [&] { return a->inbox.state().rooms[&to_b] > 0; }));
  EXPECT_EQ(to_b.try_send({.pieces = one}), SendResult::kSent);
  const Bytes more(4 << 20);
  const Piece too_much[] = {{more}};
  expect_error(ErrorKind::kInvalidArgument, "quota", [&] { to_b.try_send({.pieces = too_much}); });
}

TEST(ShmEndpointTest, LargePiecesThatStayAreReadWhereTheyAre) {
  std::atomic<int> sent = 0;
  const auto a = join({.least_direct = 1 << 20});
  Endpoint* const endpoint = a->endpoint.get();
  const auto b = join();
  Remote& to_b = a->to(*b);
  ASSERT_EQ(to_b.try_send({}), SendResult::kSent);
  ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
  b->inbox.clear();
  const Bytes data = some_bytes(5 << 20, 5);
  const Piece pieces[] = {{data, true}};
  for (const bool places : {false, true}) {
    b->inbox.places = places;
    sent = 0;
    ASSERT_EQ(to_b.try_send({.pieces = pieces},
                            [&](const Error* lost) {
                              EXPECT_EQ(lost, nullptr);
                              ++sent;
                              endpoint->wake();
                            }),
              SendResult::kSent);
    ASSERT_TRUE(until(*b, [&] { return b->inbox.letters() == 1; }));
    EXPECT_TRUE(std::ranges::equal(b->inbox.letter(0).parts[0].bytes, data));
    EXPECT_NE(b->inbox.letter(0).parts[0].where, Part::Where::kLent);
    ASSERT_TRUE(until(*a, [&] { return sent == 1; }));
    b->inbox.clear();
  }
  EXPECT_EQ(shm_stats(*a->endpoint).heap_bytes, 0u) << "nothing was copied by the sender";
}

// Whoever gives a letter up while its memory is read says so before it changes that memory: what it
// says arrives first.
TEST(ShmEndpointTest, WhatWasSentDuringAReadArrivesBeforeIt) {
  struct GivingUp : Recorder {
    Remote* sender = nullptr;
    std::span<std::byte> place(Remote&, const Arrival&, std::size_t,
                               std::size_t) noexcept override {
      for (int i = 0; i < 100; ++i) EXPECT_EQ(sender->try_send({.kind = 2}), SendResult::kSent);
      return {};
    }
  } inbox;
  std::atomic<int> sent = 0;
  const auto a = join({.least_direct = 1 << 16});
  Endpoint* const endpoint = a->endpoint.get();
  const auto b = make_shm_endpoint(inbox);
  inbox.wakes = b.get();
  Remote& to_b = a->endpoint->remote(b->address());
  inbox.sender = &to_b;
  const auto arrived = [&](std::size_t letters) {
    return b->wait(Deadline::after(kLimit), [&] { return inbox.letters() == letters; });
  };
  ASSERT_EQ(to_b.try_send({.kind = 3}), SendResult::kSent);
  ASSERT_TRUE(arrived(1));
  const Bytes data = some_bytes(200'000, 14);
  const Piece pieces[] = {{data, true}};
  ASSERT_EQ(to_b.try_send({.kind = 1, .pieces = pieces},
                          [&](const Error*) {
                            ++sent;
                            endpoint->wake();
                          }),
            SendResult::kSent);
  ASSERT_TRUE(arrived(102));
  const auto letters = inbox.state().letters;
  EXPECT_EQ(letters.back().kind, 1);
  EXPECT_TRUE(std::ranges::equal(letters.back().parts[0].bytes, data));
  ASSERT_TRUE(until(*a, [&] { return sent == 1; }));
}

// The large one is being copied, 1 MiB at a time; small ones behind it in the ring do not wait.
TEST(ShmEndpointTest, SmallLettersOvertakeLargeOnes) {
  const auto a = join();
  const auto b = join({.service_thread = false});
  b->inbox.places = true;
  Remote& to_b = a->to(*b);
  const Bytes data = some_bytes(32 << 20, 6);
  const Piece pieces[] = {{data}};
  ASSERT_EQ(to_b.try_send({.kind = 1, .pieces = pieces}), SendResult::kSent);
  ASSERT_EQ(to_b.try_send({.kind = 2}), SendResult::kSent);
  const Deadline limit = Deadline::after(kLimit);
  while (b->inbox.letters() < 2 && !limit.expired()) b->endpoint->poll(Endpoint::Serve::kAll);
  ASSERT_EQ(b->inbox.letters(), 2u);
  EXPECT_EQ(b->inbox.letter(0).kind, 2);
  EXPECT_EQ(b->inbox.letter(1).kind, 1);
}

// Two remotes send large letters: neither waits until the other's is copied.
TEST(ShmEndpointTest, LargeLettersTakeTurns) {
  std::atomic<int> sent = 0;
  const auto a = join({.least_direct = 1 << 20});
  const auto b = join();
  const auto receiver = join({.service_thread = false});
  const Bytes data = some_bytes(16 << 20, 7);
  const Piece pieces[] = {{data}};
  Recorder& inbox = receiver->inbox;
  inbox.places = false;
  const auto poll = [&](std::size_t letters) {
    const Deadline limit = Deadline::after(kLimit);
    while (inbox.letters() < letters && !limit.expired()) {
      receiver->endpoint->poll(Endpoint::Serve::kAll);
    }
    return inbox.letters() == letters;
  };
  ASSERT_EQ(a->to(*receiver).try_send({.kind = 1}), SendResult::kSent);
  ASSERT_EQ(b->to(*receiver).try_send({.kind = 1}), SendResult::kSent);
  ASSERT_TRUE(poll(2));
  inbox.clear();
  inbox.places = true;
  const Piece stays[] = {{data, true}};
  ASSERT_EQ(a->to(*receiver).try_send({.kind = 2, .pieces = stays}, [&](const Error*) { ++sent; }),
            SendResult::kSent);
  ASSERT_EQ(b->to(*receiver).try_send({.kind = 3, .pieces = pieces}), SendResult::kSent);
  ASSERT_TRUE(poll(2));
  EXPECT_TRUE(std::ranges::equal(inbox.letter(0).parts[0].bytes, data));
  EXPECT_TRUE(std::ranges::equal(inbox.letter(1).parts[0].bytes, data));
  EXPECT_THAT(inbox.state().order, HasSubstr("placed placed arrived arrived"));
  ASSERT_TRUE(until(*a, [&] { return sent == 1; }));
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

// --- processes ---

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
