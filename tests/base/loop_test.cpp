#include "base/loop.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>

#include "support/expect_error.h"

namespace convoy {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::expect_error;
using Clock = Deadline::Clock;

UniqueFd make_event(unsigned value = 0) {
  return UniqueFd(::eventfd(value, EFD_CLOEXEC | EFD_NONBLOCK));
}
void drain_event(const UniqueFd& event) {
  std::uint64_t value = 0;
  ASSERT_EQ(::read(event.get(), &value, sizeof value), static_cast<ssize_t>(sizeof value));
}

TEST(LoopTest, PostedFunctionsRunInOrderOnTheLoop) {
  Loop loop;
  std::vector<int> order;
  for (int i = 0; i < 5; ++i) {
    loop.post([&, i] {
      EXPECT_TRUE(loop.in_loop());
      order.push_back(i);
    });
  }
  loop.stop();
  EXPECT_FALSE(loop.in_loop());
  loop.run();
  EXPECT_FALSE(loop.in_loop());
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
}

TEST(LoopTest, StopEndsALoopThatSleeps) {
  Loop loop;
  std::jthread stopper([&] { loop.stop(); });
  loop.run();
}

// Once the loop took a post and a stop at one go, and then slept for ever.
TEST(LoopTest, StopRightBehindAPostEndsTheLoop) {
  for (int round = 0; round < 200; ++round) {
    Loop loop;
    std::atomic<bool> ran = false;
    std::jthread runner([&] { loop.run(); });
    loop.post([&] { ran = true; });
    loop.stop();
    runner.join();
    EXPECT_TRUE(ran);
  }
}

TEST(LoopTest, PostAfterStopWaitsForTheNextRun) {
  Loop loop;
  int runs = 0;
  loop.post([&] {
    ++runs;
    loop.stop();
    loop.post([&] { ++runs; });
  });
  // The stop comes while the first batch runs: the post behind it may run in this run() or in the
  // next, but is not lost.
  loop.run();
  loop.stop();
  loop.run();
  EXPECT_EQ(runs, 2);
}

TEST(LoopTest, FunctionThatPostsItselfDoesNotHoldUpTheStop) {
  Loop loop;
  std::function<void()> again = [&] { loop.post(again); };
  loop.post(again);
  std::jthread stopper([&] { loop.stop(); });
  loop.run();
}

TEST(LoopTest, ManyThreadsPost) {
  Loop loop;
  constexpr int kThreads = 4;
  constexpr int kPosts = 2000;
  int sum = 0;  // only the loop's thread counts
  std::jthread runner([&] { loop.run(); });
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < kPosts; ++i) loop.post([&] { ++sum; });
        EXPECT_FALSE(loop.in_loop());
      });
    }
  }
  loop.stop();
  runner.join();
  EXPECT_EQ(sum, kThreads * kPosts);
}

TEST(LoopTest, WatchCallsUntilUnwatched) {
  Loop loop;
  const UniqueFd event = make_event(1);
  int calls = 0;
  Loop::WatchId id = 0;
  id = loop.watch(event.get(), EPOLLIN, [&](std::uint32_t events) {
    EXPECT_TRUE(events & EPOLLIN);
    if (++calls == 3) {  // level-triggered: it stays readable
      loop.unwatch(id);  // its own watch, from inside
      loop.stop();
    }
  });
  loop.run();
  EXPECT_EQ(calls, 3);
  loop.unwatch(id);  // once more is harmless
}

TEST(LoopTest, HandlerMayRemoveOthersOfTheSameBatch) {
  Loop loop;
  const UniqueFd a = make_event(1);
  const UniqueFd b = make_event(1);
  int calls = 0;
  Loop::WatchId first = 0;
  Loop::WatchId second = 0;
  const auto handler = [&](std::uint32_t) {
    ++calls;
    loop.unwatch(first);
    loop.unwatch(second);
    loop.stop();
  };
  first = loop.watch(a.get(), EPOLLIN, handler);
  second = loop.watch(b.get(), EPOLLIN, handler);
  loop.run();
  EXPECT_EQ(calls, 1);
}

TEST(LoopTest, DescriptorNumberReusedInTheSameBatchIsNotMistaken) {
  Loop loop;
  UniqueFd a = make_event(1);
  UniqueFd b = make_event(1);
  int old_calls = 0;
  int new_calls = 0;
  Loop::WatchId ids[2] = {0, 0};
  UniqueFd fresh;
  const auto replace = [&](UniqueFd& other, Loop::WatchId other_id) {
    ++old_calls;
    loop.unwatch(other_id);
    const int number = other.get();
    other.reset();
    fresh = make_event(0);
    ASSERT_EQ(fresh.get(), number);  // the lowest free number
    loop.watch(fresh.get(), EPOLLIN, [&](std::uint32_t) { ++new_calls; });
    loop.stop();
  };
  ids[0] = loop.watch(a.get(), EPOLLIN, [&](std::uint32_t) { replace(b, ids[1]); });
  ids[1] = loop.watch(b.get(), EPOLLIN, [&](std::uint32_t) { replace(a, ids[0]); });
  loop.run();
  EXPECT_EQ(old_calls, 1);
  EXPECT_EQ(new_calls, 0);  // it was never readable
}

TEST(LoopTest, ModifyChangesTheEvents) {
  Loop loop;
  const UniqueFd event = make_event(1);
  std::vector<std::uint32_t> seen;
  Loop::WatchId id = 0;
  id = loop.watch(event.get(), EPOLLIN, [&](std::uint32_t events) {
    seen.push_back(events);
    if (seen.size() == 1) {
      loop.modify(id, EPOLLOUT);
    } else {
      loop.stop();
    }
  });
  loop.run();
  EXPECT_EQ(seen, (std::vector<std::uint32_t>{EPOLLIN, EPOLLOUT}));
  loop.unwatch(id);
  expect_error(ErrorKind::kInternal, "there is no watch", [&] { loop.modify(id, EPOLLIN); });
}

TEST(LoopTest, WatchOfABadDescriptorThrows) {
  Loop loop;
  expect_error(ErrorKind::kInternal, "epoll_ctl on descriptor -1",
               [&] { loop.watch(-1, EPOLLIN, [](std::uint32_t) {}); });
}

TEST(LoopTest, TimersRunInTheirOrder) {
  Loop loop;
  std::vector<int> order;
  const auto now = Clock::now();
  loop.call_at(now + milliseconds(20), [&] {
    order.push_back(3);
    loop.stop();
  });
  loop.call_at(now + milliseconds(10), [&] { order.push_back(2); });
  loop.call_at(now, [&] { order.push_back(0); });
  loop.call_at(now, [&] { order.push_back(1); });  // same time: in the order they were set
  loop.run();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_GE(Clock::now(), now + milliseconds(20));
}

TEST(LoopTest, CancelledTimersDoNotRun) {
  Loop loop;
  bool ran = false;
  const auto now = Clock::now();
  const auto id = loop.call_at(now + milliseconds(1), [&] { ran = true; });
  loop.call_at(now, [&] { loop.cancel(id); });
  loop.call_at(now + milliseconds(5), [&] { loop.stop(); });
  loop.run();
  EXPECT_FALSE(ran);
  loop.cancel(id);  // of one that is gone: harmless
}

TEST(LoopTest, TimerMayCancelItsNeighbourDueAtTheSameTime) {
  Loop loop;
  int ran = 0;
  const auto now = Clock::now();
  Loop::TimerId second = 0;
  loop.call_at(now, [&] {
    ++ran;
    loop.cancel(second);
    loop.stop();
  });
  second = loop.call_at(now, [&] { ++ran; });
  loop.run();
  EXPECT_EQ(ran, 1);
}

TEST(LoopTest, TimerThatSetsItselfForThePastLetsOthersRun) {
  Loop loop;
  std::function<void()> again = [&] { loop.call_at(Clock::time_point(), again); };
  again();
  const UniqueFd event = make_event(1);
  loop.watch(event.get(), EPOLLIN, [&](std::uint32_t) { loop.stop(); });
  loop.run();
}

TEST(LoopTest, TimerAtTheEndOfTimeIsHarmless) {
  Loop loop;
  loop.call_at(Clock::time_point::max(), [] { FAIL(); });
  loop.post([&] { loop.stop(); });
  loop.run();
}

TEST(LoopTest, ExceptionEndsRunAndLosesNothing) {
  Loop loop;
  bool later = false;
  loop.post([] { throw std::runtime_error("handler"); });
  loop.post([&] { later = true; });
  loop.stop();
  EXPECT_THROW(loop.run(), std::runtime_error);
  EXPECT_FALSE(loop.in_loop());
  EXPECT_FALSE(later);
  loop.run();
  EXPECT_TRUE(later);
}

TEST(LoopTest, HandlerIsDestroyedWithItsWatch) {
  Loop loop;
  const UniqueFd event = make_event();
  auto token = std::make_shared<int>(1);
  const std::weak_ptr<int> watching = token;
  const auto id = loop.watch(event.get(), EPOLLIN, [token](std::uint32_t) {});
  token.reset();
  EXPECT_FALSE(watching.expired());
  loop.unwatch(id);
  EXPECT_TRUE(watching.expired());
}

TEST(LoopTest, ManyDescriptorsAreAllServed) {
  Loop loop;
  constexpr int kCount = 200;  // more than one batch of epoll_wait
  std::vector<UniqueFd> events;
  int left = kCount;
  for (int i = 0; i < kCount; ++i) {
    events.push_back(make_event(1));
    loop.watch(events.back().get(), EPOLLIN, [&, i](std::uint32_t) {
      drain_event(events[static_cast<std::size_t>(i)]);
      if (--left == 0) loop.stop();
    });
  }
  loop.run();
  EXPECT_EQ(left, 0);
}

TEST(LoopTest, CancelledTimersDoNotRunAndOthersDo) {
  Loop loop;
  std::vector<int> ran;
  std::vector<Loop::TimerId> timers;
  const auto now = Clock::now();
  for (int i = 0; i < 100; ++i) {
    timers.push_back(loop.call_at(now + milliseconds(i % 7), [&, i] { ran.push_back(i); }));
  }
  for (int i = 0; i < 100; ++i) {
    if (i % 10 != 3) loop.cancel(timers[static_cast<std::size_t>(i)]);
  }
  loop.cancel(timers[0]);  // once more
  loop.call_at(now + milliseconds(8), [&] {
    loop.cancel(timers[3]);  // has run
    loop.stop();
  });
  loop.run();
  std::sort(ran.begin(), ran.end());
  EXPECT_EQ(ran, (std::vector<int>{3, 13, 23, 33, 43, 53, 63, 73, 83, 93}));
}

// A wake-up that is left out must not be missed, whoever posts and whenever the loop looks.
TEST(LoopTest, EveryPostRunsThoughFewWake) {
  Loop loop;
  constexpr int kPosts = 20000;
  std::atomic<int> left = 3 * kPosts;
  std::vector<std::jthread> posters;
  for (int t = 0; t < 3; ++t) {
    posters.emplace_back([&] {
      for (int i = 0; i < kPosts; ++i) {
        loop.post([&] {
          if (--left == 0) loop.stop();
        });
      }
    });
  }
  loop.run();
  EXPECT_EQ(left, 0);
}

TEST(LoopTest, ThreadsTakeTurns) {
  Loop loop;
  int ran = 0;  // of whoever is in the loop
  loop.post([&] { ++ran; });
  std::jthread([&] {
    EXPECT_TRUE(loop.run_once(Deadline::after(seconds(30))));
    EXPECT_FALSE(loop.in_loop());
  }).join();
  EXPECT_EQ(ran, 1);
  EXPECT_TRUE(loop.run_once(Deadline::after(seconds(0))));  // there is nothing
  EXPECT_EQ(ran, 1);
  loop.post([&] {
    EXPECT_TRUE(loop.in_loop());
    std::jthread([&] { EXPECT_FALSE(loop.run_once(Deadline::after(seconds(0)))); }).join();
    ++ran;
  });
  EXPECT_TRUE(loop.run_once(Deadline::after(seconds(30))));
  EXPECT_EQ(ran, 2);
  std::jthread poster([&] { loop.post([&] { ++ran; }); });
  while (ran == 2) EXPECT_TRUE(loop.run_once(Deadline::after(seconds(30))));
  loop.stop();  // is for run(), and waits for it
  EXPECT_TRUE(loop.run_once(Deadline::after(seconds(0))));
  loop.run();
}

class FakeClock {
 public:
  FakeClock() {
    time = Clock::now();
    Clock::now_for_testing = [] { return time.load(); };
  }
  FakeClock(const FakeClock&) = delete;
  FakeClock& operator=(const FakeClock&) = delete;
  ~FakeClock() { Clock::now_for_testing = nullptr; }

  static inline std::atomic<Clock::time_point> time;
};

TEST(LoopTest, TimeIsThatOfAClockThatTestsReplace) {
  const FakeClock clock;
  Loop loop;
  bool ran = false;
  const auto deadline = Deadline::after(std::chrono::hours(1));
  loop.call_at(deadline.when(), [&] { ran = true; });
  const auto poll = [&] { EXPECT_TRUE(loop.run_once(Deadline::after(seconds(0)))); };
  FakeClock::time = deadline.when() - milliseconds(1);
  poll();
  EXPECT_FALSE(ran);
  EXPECT_FALSE(deadline.expired());
  EXPECT_EQ(deadline.poll_timeout_ms(), 1);
  FakeClock::time = deadline.when();
  poll();
  EXPECT_TRUE(ran);
  EXPECT_TRUE(deadline.expired());
  EXPECT_EQ(deadline.remaining(), seconds(0));
}

TEST(LoopThreadTest, CallRunsOnTheLoopAndWaits) {
  LoopThread thread("named loop");
  bool on_loop = false;
  std::string name(16, '\0');
  thread.call([&] {
    on_loop = thread.loop().in_loop();
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
  });
  EXPECT_TRUE(on_loop);
  EXPECT_STREQ(name.c_str(), "named loop");
}

TEST(LoopThreadTest, CallPassesExceptionsOn) {
  LoopThread thread("loop");
  expect_error(ErrorKind::kRemote, "thrown there",
               [&] { thread.call([] { fail(ErrorKind::kRemote, "thrown there"); }); });
  thread.call([] {});  // the loop goes on
}

TEST(LoopThreadTest, CallFromTheLoopRunsAtOnce) {
  LoopThread thread("loop");
  int depth = 0;
  thread.call([&] { thread.call([&] { depth = 2; }); });
  EXPECT_EQ(depth, 2);
}

TEST(LoopThreadTest, CallAfterJoinThrows) {
  LoopThread thread("loop");
  thread.join();
  thread.join();
  expect_error(ErrorKind::kInternal, "has ended", [&] { thread.call([] {}); });
}

TEST(LoopThreadTest, LoopCannotJoinItself) {
  LoopThread thread("loop");
  expect_error(ErrorKind::kInternal, "cannot join itself",
               [&] { thread.call([&] { thread.join(); }); });
}

TEST(LoopThreadTest, CallsRacingWithJoinRunOrThrow) {
  for (int round = 0; round < 50; ++round) {
    LoopThread thread("loop");
    std::atomic<int> finished = 0;
    std::vector<std::jthread> callers;
    for (int t = 0; t < 3; ++t) {
      callers.emplace_back([&] {
        try {
          for (;;) thread.call([&] { ++finished; });
        } catch (const Error&) {
        }
      });
    }
    thread.join();
  }
}

TEST(LoopThreadTest, LongNamesAreCut) {
  std::jthread([] {
    set_thread_name("a name of more than fifteen letters");
    std::string name(16, '\0');
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
    EXPECT_STREQ(name.c_str(), "a name of more ");
  }).join();
}

}  // namespace
}  // namespace convoy
