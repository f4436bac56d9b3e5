// The endpoint of processes that share memory: a thread that serves and sleeps on epoll.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <semaphore>
#include <thread>

#include "base/unique_fd.h"
#include "shm_support.h"
#include "support/expect_error.h"

namespace convoy::transport::test {
namespace {

using namespace std::chrono_literals;
using convoy::test::expect_error;
using shm::shm_unwatch;
using shm::shm_watch;

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

}  // namespace
}  // namespace convoy::transport::test
