// The endpoint of processes that share memory: calls of the inbox that wait, in threads that wait.
#include <gtest/gtest.h>

#include <optional>
#include <semaphore>
#include <thread>

#include "base/error.h"
#include "shm_support.h"
#include "support/expect_error.h"

namespace convoy::transport::test {
namespace {

using namespace std::chrono_literals;
using convoy::test::expect_error;

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

}  // namespace
}  // namespace convoy::transport::test
