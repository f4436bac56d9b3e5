// The endpoint of processes that share memory: who takes what arrives, and who serves.
#include <gtest/gtest.h>

#include <semaphore>
#include <thread>

#include "base/guarded.h"
#include "shm_support.h"

namespace convoy::transport::test {
namespace {

using namespace std::chrono_literals;

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

}  // namespace
}  // namespace convoy::transport::test
