// The queue of bytes, in threads, so that the sanitizers see all.
#include "share/queue_memory.h"

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "history.h"
#include "os/socket.h"
#include "queue_memory_support.h"
#include "queue_steps.h"
#include "share/descriptor_store.h"

namespace convoy::share::test {
namespace {

TEST(QueueMemoryTest, FirstInFirstOutAndBounded) {
  Queue queue({.capacity = 3, .item_bytes = 100}, no_settle());
  EXPECT_FALSE(get(queue, at_once()));
  EXPECT_FALSE(get(queue, Deadline::after(std::chrono::milliseconds(5))));
  for (int round = 0; round < 100; ++round) {
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(put(queue, concat(round, " ", i), at_once()));
    EXPECT_EQ(queue.size(), 3u);
    EXPECT_FALSE(put(queue, "more", at_once()));
    EXPECT_FALSE(put(queue, "more", Deadline::after(std::chrono::milliseconds(1))));
    for (int i = 0; i < 3; ++i) EXPECT_EQ(get(queue, at_once()), concat(round, " ", i));
  }
  EXPECT_TRUE(put(queue, std::string(100, 'x'), soon()));
  EXPECT_TRUE(put(queue, "", soon()));
  EXPECT_EQ(get(queue, soon()), std::string(100, 'x'));
  EXPECT_EQ(get(queue, soon()), "");
  EXPECT_EQ(queue.lost().items, 0u);
}

TEST(QueueMemoryTest, ManyAtOnce) {
  Queue queue({.capacity = 5, .item_bytes = 16}, no_settle());
  const std::vector<std::string_view> items{"1", "2", "3", "4", "5", "6", "7"};
  QueueMemory::Hands hands(queue, items.size());
  std::vector<std::size_t> told;
  const auto result = queue.put(items, 0, hands, [&](std::size_t i) { told.push_back(i); }, soon());
  EXPECT_EQ(result.items, 5u);
  EXPECT_EQ(told, (std::vector<std::size_t>{0, 1, 2, 3, 4}));
  auto taken = queue.take(3, soon());
  ASSERT_EQ(taken.size(), 3u);
  EXPECT_EQ(taken[2].bytes, "3");
  EXPECT_EQ(taken[2].number, 3u);
  // What is taken and not finished needs no room of the queue.
  EXPECT_EQ(queue.put(std::span(items).subspan(5), 0, hands, {}, soon()).items, 2u);
  for (const auto& item : taken) queue.finish(item);
  taken = queue.take(100, soon());
  EXPECT_EQ(taken.size(), 4u);
  for (const auto& item : taken) queue.finish(item);
  queue.next_epoch();
  EXPECT_TRUE(queue.put(items, 0, hands, {}, soon()).stale);
}

TEST(QueueMemoryTest, CloseWakesAllAndLeavesWhatIsThere) {
  Queue queue({.capacity = 2, .item_bytes = 16}, no_settle());
  std::atomic<int> woken{0};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        expect_error(ErrorKind::kPeerLost, "closed", [&] { get(queue, soon()); });
        ++woken;
      });
    }
    queue.close();
  }
  EXPECT_EQ(woken, 3);
  Queue other({.capacity = 2, .item_bytes = 16}, no_settle());
  put(other, "a", soon());
  other.close();
  expect_error(ErrorKind::kPeerLost, "closed by this process", [&] { put(other, "b", soon()); });
  EXPECT_EQ(get(other, soon()), "a");
  expect_error(ErrorKind::kPeerLost, "get", [&] { get(other, soon()); });
}

// Every item comes once, those of a producer in their order, while all sleep and wake each other.
void run_crowd(int producers, int consumers, std::uint32_t capacity, int items) {
  Queue queue({.capacity = capacity, .item_bytes = 16}, no_settle());
  std::vector<std::vector<int>> got(static_cast<std::size_t>(consumers));
  {
    std::vector<std::jthread> threads;
    for (int p = 0; p < producers; ++p) {
      threads.emplace_back([&, p] {
        for (int i = 0; i < items; ++i) {
          ASSERT_TRUE(put(queue, std::to_string(p * 1'000'000 + i), soon()));
        }
      });
    }
    for (auto& mine : got) {
      threads.emplace_back([&] {
        for (;;) {
          const auto item = get(queue, soon());
          ASSERT_TRUE(item);
          if (*item == "end") return;
          mine.push_back(std::stoi(*item));
        }
      });
    }
    for (int p = 0; p < producers; ++p) threads[static_cast<std::size_t>(p)].join();
    for (int c = 0; c < consumers; ++c) put(queue, "end", soon());
  }
  std::set<int> all;
  for (const auto& mine : got) {
    std::map<int, int> latest;
    for (const int value : mine) {
      EXPECT_TRUE(all.insert(value).second) << value << " came twice";
      const auto [place, fresh] = latest.try_emplace(value / 1'000'000, value);
      EXPECT_TRUE(fresh || place->second < value);
      place->second = value;
    }
  }
  EXPECT_EQ(all.size(), static_cast<std::size_t>(producers * items));
}

TEST(QueueMemoryTest, ProducersAndConsumers) {
  run_crowd(1, 1, 1, 2000);
  run_crowd(4, 4, 2, 500);
  run_crowd(2, 2, 100, 2000);
}

// Random calls of three threads, many times: each history is checked against a simple queue.
TEST(QueueMemoryTest, LinearizableWithRandomSchedules) {
  std::mt19937 seeds(7);
  for (int round = 0; round < 400; ++round) {
    const auto capacity = static_cast<std::uint32_t>(1 + seeds() % 3);
    Queue queue({.capacity = capacity, .item_bytes = 16}, no_settle());
    constexpr int kThreads = 3, kCalls = 5;
    std::vector<std::vector<Call>> logs(kThreads);
    std::atomic<std::uint64_t> clock{0};
    std::atomic<int> ready{0};
    {
      std::vector<std::jthread> threads;
      for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t, seed = seeds()] {
          std::mt19937 random(static_cast<unsigned>(seed));
          ++ready;
          while (ready < kThreads) std::this_thread::yield();
          for (int i = 0; i < kCalls; ++i) {
            Call call;
            call.kind = random() % 2 == 0 ? Call::kPut : Call::kGet;
            if (random() % 3 == 0) std::this_thread::yield();
            call.begin = clock.fetch_add(1);
            if (call.kind == Call::kPut) {
              call.value = t * 100 + i;
              call.done = put(queue, std::to_string(*call.value), at_once());
            } else if (const auto item = get(queue, at_once())) {
              call.value = std::stoi(*item);
            }
            call.end = clock.fetch_add(1);
            logs[static_cast<std::size_t>(t)].push_back(call);
          }
        });
      }
    }
    std::vector<Call> calls;
    for (const auto& log : logs) calls.insert(calls.end(), log.begin(), log.end());
    ASSERT_TRUE(LinearizabilityCheck(calls, capacity).holds()) << "round " << round;
  }
}

// The check finds what is wrong.
TEST(QueueMemoryTest, TheCheckCanFail) {
  const auto holds = [](std::vector<Call> calls, std::size_t capacity) {
    return LinearizabilityCheck(std::move(calls), capacity).holds();
  };
  const Call put1{Call::kPut, 0, 1, 1}, put2{Call::kPut, 2, 3, 2};
  EXPECT_TRUE(holds({put1, put2, {Call::kGet, 4, 5, 1}, {Call::kGet, 6, 7, 2}}, 2));
  EXPECT_FALSE(holds({put1, put2, {Call::kGet, 4, 5, 2}, {Call::kGet, 6, 7, 1}}, 2));
  EXPECT_TRUE(holds({put1, put2, {Call::kGet, 4, 7, 2}, {Call::kGet, 5, 6, 1}}, 2));
  EXPECT_FALSE(holds({put1, {Call::kGet, 2, 3, std::nullopt}}, 2));
  EXPECT_FALSE(holds({put1, {Call::kPut, 2, 3, 2, false}}, 2));
  EXPECT_FALSE(holds({{Call::kGet, 0, 1, 5}}, 2));
  // A call that did not end may have happened.
  EXPECT_TRUE(holds({{Call::kPut, 0, Call::kNever, 1}, {Call::kGet, 1, 2, 1}}, 2));
  EXPECT_TRUE(holds({{Call::kPut, 0, Call::kNever, 1}, {Call::kGet, 1, 2, std::nullopt}}, 2));
}

// Whoever may still join the queue finds what is in it; what nobody can take is settled, and
// counts.
TEST(QueueMemoryTest, WhatIsLeftStaysForWhoMayJoin) {
  int settled = 0;
  QueueMemory queue({.capacity = 4, .item_bytes = 16},
                    [&](std::string_view, std::atomic<std::uint32_t>&) { ++settled; });
  put(queue, "one", soon());
  put(queue, "two", soon());
  EXPECT_FALSE(queue.leave({}, [] { return true; }));
  EXPECT_FALSE(queue.leave({}, [] { return true; }));
  queue.come_back();
  EXPECT_EQ(get(queue, soon()), "one");
  EXPECT_EQ(queue.lost().items, 0u);
  EXPECT_TRUE(queue.leave({}, [] { return false; }));
  EXPECT_EQ(settled, 1);
  EXPECT_EQ(queue.lost().items, 1u);
  EXPECT_NE(queue.lost().latest.find("last process to detach"), std::string::npos);
  EXPECT_EQ(queue.size(), 0u);
}

// Nothing can be put as long as all slots are taken, though the queue is empty. Who waits for that
// sleeps: two of them do not keep each other awake.
TEST(QueueMemoryTest, ProducersWithoutASlotSleep) {
  Queue queue({.capacity = 1, .item_bytes = 16}, no_settle());
  std::vector<QueueMemory::Item> taken;
  while (put(queue, "item", at_once())) {
    for (auto& item : queue.take(1, soon())) taken.push_back(std::move(item));
  }
  EXPECT_EQ(queue.size(), 0u);
  std::atomic<int> looks{0};
  const QueueSteps steps([&](const char* where) {
    if (std::string_view(where) == "put: starved") ++looks;
  });
  {
    const auto end = Deadline::after(std::chrono::milliseconds(400));
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) threads.emplace_back([&] { EXPECT_FALSE(put(queue, "no", end)); });
  }
  // Each looks at the beginning, every 100 ms and at the end.
  EXPECT_LE(looks, 3 * 10);
  EXPECT_EQ(queue.sleepers_for_testing(), 0u);
  // One that is freed goes to who waits for it, and the next to the next.
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i)
      threads.emplace_back([&] { EXPECT_TRUE(put(queue, "yes", soon())); });
    while (looks < 3) std::this_thread::yield();
    for (const auto& item : taken) queue.finish(item);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(get(queue, soon()), "yes");
  }
}

// A thread that was about to sleep and did not is no sleeper any more.
TEST(QueueMemoryTest, AnExceptionEndsTheWait) {
  Queue queue({.capacity = 1, .item_bytes = 16}, no_settle());
  const QueueSteps steps([](const char* where) {
    if (std::string_view(where) == "wait: announced") throw std::runtime_error("no sleep");
  });
  EXPECT_THROW(get(queue, soon()), std::runtime_error);
  EXPECT_EQ(queue.sleepers_for_testing(), 0u);
  EXPECT_TRUE(put(queue, "item", soon()));
  EXPECT_THROW(put(queue, "more", soon()), std::runtime_error);
  EXPECT_EQ(queue.sleepers_for_testing(), 0u);
}

TEST(QueueMemoryTest, OtherMemoryIsRefused) {
  expect_error(ErrorKind::kInvalidArgument, "not a queue",
               [] { QueueMemory(Segment::create(1 << 16, "test"), no_settle()); });
  expect_error(ErrorKind::kInvalidArgument, "not a queue",
               [] { QueueMemory(Segment::create(4096, "test"), no_settle()); });
}

TEST(DescriptorStoreTest, KeepsWhatIsNeeded) {
  const DescriptorStore store;
  std::vector<Segment> segments;
  for (std::uint32_t i = 0; i < 20; ++i) {
    segments.push_back(Segment::create(4096, "test"));
    std::memcpy(segments.back().data(), &i, sizeof i);
    const auto key = segments.back().key();
    store.add({.device = key.device, .inode = key.inode, .bytes = 4096, .owner = i, .kind = 1},
              segments.back().fd());
  }
  std::vector<Segment::Key> keys;
  for (const auto& segment : segments) keys.push_back(segment.key());
  segments.clear();  // the store has them
  EXPECT_EQ(store.size(), 20u);
  EXPECT_EQ(store.prune([](const auto& entry) { return entry.owner % 2 == 0; }), 10u);
  EXPECT_EQ(store.prune([](const auto&) { return true; }), 0u);
  for (std::uint32_t i = 0; i < 20; ++i) {
    auto found = store.find(keys[i]);
    ASSERT_EQ(found.has_value(), i % 2 == 0) << i;
    if (!found) continue;
    const auto segment = Segment::adopt(std::move(found->second), 4096);
    std::uint32_t value = 0;
    std::memcpy(&value, segment.data(), sizeof value);
    EXPECT_EQ(value, i);
    EXPECT_EQ(found->first.owner, i);
  }
}

// The other end may be in a process, or under way to one.
TEST(DescriptorStoreTest, KnowsWhetherAnybodyHasTheOtherEnd) {
  DescriptorStore store;
  const Segment segment = Segment::create(4096, "test");
  const auto key = segment.key();
  store.add({.device = key.device, .inode = key.inode, .bytes = 4096}, segment.fd());
  UniqueFd copy(::dup(store.writer()));
  auto ends = Socket::pair();
  const std::byte byte{1};
  const int passed = store.writer();
  ends.first.send({&byte, 1}, soon(), {&passed, 1});
  store.close_writer();
  EXPECT_TRUE(store.has_writers());
  copy.reset();
  EXPECT_TRUE(store.has_writers());
  std::vector<UniqueFd> received;
  std::byte got{};
  ends.second.receive({&got, 1}, soon(), &received);
  ASSERT_EQ(received.size(), 1u);
  EXPECT_TRUE(store.has_writers());
  store.reopen_writer(std::move(received[0]));
  store.add({.bytes = 1}, segment.fd());
  EXPECT_EQ(store.size(), 2u);
  store.close_writer();
  EXPECT_FALSE(store.has_writers());
  EXPECT_TRUE(store.find(key));  // it can still be looked into
  EXPECT_EQ(store.size(), 2u);
}

}  // namespace
}  // namespace convoy::share::test
