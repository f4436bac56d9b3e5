// The queue of bytes, whose users are killed.
#include <gtest/gtest.h>
#include <signal.h>

#include <map>
#include <new>
#include <random>
#include <thread>

#include "history.h"
#include "queue_memory_support.h"
#include "queue_steps.h"
#include "support/test_names.h"

namespace convoy::share::test {
namespace {

class DeathTest : public testing::TestWithParam<std::string> {};

// The rank's process ends at the given place, with the lock held; everything else goes on.
TEST_P(DeathTest, WithTheLock) {
  const std::string& where = GetParam();
  RankGroup group(1, RankMode::kProcesses);
  int settled = 0;
  Queue queue({.capacity = 4, .item_bytes = 16},
              [&](std::string_view item, std::atomic<std::uint32_t>&) {
                EXPECT_EQ(item, "first");
                ++settled;
              });
  put(queue, "first", soon());
  put(queue, "second", soon());
  group.start([&](Rank& r) {
    QueueMemory victim(segment_at(r.store()->get("queue", r.deadline())), no_settle());
    const QueueSteps steps([&](const char* here) {
      if (where == here) ::raise(SIGKILL);
    });
    put(victim, "third", soon());
    get(victim, soon());
  });
  group.store()->set("queue", address_of(queue.segment()));
  // Only how it ends is known to nobody here: it kills itself.
  const auto results = group.collect();
  if (convoy::test::in_rank()) return;
  EXPECT_EQ(results[0].status.signal, SIGKILL);
  const bool put_done = where != "put: written";
  const bool taken = where.starts_with("take");
  queue.look_for_dead();
  const auto lost = queue.lost();
  EXPECT_EQ(lost.items, !put_done || taken ? 1u : 0u) << lost.latest;
  EXPECT_EQ(settled, taken ? 1 : 0);
  EXPECT_EQ(lost.latest.find("died while it held item") != std::string::npos, taken);
  EXPECT_EQ(queue.size(), taken ? 2u : (put_done ? 3u : 2u));
  if (!taken) {
    EXPECT_EQ(get(queue, soon()), "first");
  }
  EXPECT_EQ(get(queue, soon()), "second");
  if (put_done) {
    EXPECT_EQ(get(queue, soon()), "third");
  }
  EXPECT_FALSE(get(queue, at_once()));
  EXPECT_TRUE(put(queue, "on", soon()));
  EXPECT_EQ(get(queue, soon()), "on");
}

INSTANTIATE_TEST_SUITE_P(Places, DeathTest,
                         testing::Values("put: written", "put: ready", "put: in order",
                                         "take: taken", "take: out of order"),
                         convoy::test::text_name);

class BatchDeathTest : public testing::TestWithParam<std::string> {};

// It ends while it puts the first of three at once: what came in is there, and the rest is lost.
TEST_P(BatchDeathTest, TheRestIsCounted) {
  const std::string& where = GetParam();
  RankGroup group(1, RankMode::kProcesses);
  Queue queue({.capacity = 4, .item_bytes = 16}, no_settle());
  group.start([&](Rank& r) {
    QueueMemory victim(segment_at(r.store()->get("queue", r.deadline())), no_settle());
    const QueueSteps steps([&](const char* here) {
      if (where == here) ::raise(SIGKILL);
    });
    const std::vector<std::string_view> items{"1", "2", "3"};
    QueueMemory::Hands hands(victim, items.size());
    victim.put(items, 0, hands, {}, soon());
  });
  group.store()->set("queue", address_of(queue.segment()));
  const auto results = group.collect();
  if (convoy::test::in_rank()) return;
  EXPECT_EQ(results[0].status.signal, SIGKILL);
  queue.look_for_dead();
  EXPECT_EQ(queue.size() + queue.lost().items, 3u) << queue.lost().latest;
  EXPECT_EQ(queue.size(), where == "put: written" ? 0u : 1u);
}

INSTANTIATE_TEST_SUITE_P(Places, BatchDeathTest,
                         testing::Values("put: written", "put: ready", "put: in order"),
                         convoy::test::text_name);

// Whoever gets the lock of the dead and cannot put the queue right gives it back; the next one can.
TEST(QueueRepairTest, IsTriedAgain) {
  RankGroup group(1, RankMode::kProcesses);
  Queue queue({.capacity = 4, .item_bytes = 16}, no_settle());
  group.start([&](Rank& r) {
    QueueMemory victim(segment_at(r.store()->get("queue", r.deadline())), no_settle());
    const QueueSteps steps([](const char* here) {
      if (std::string_view(here) == "put: ready") ::raise(SIGKILL);
    });
    put(victim, "item", soon());
  });
  group.store()->set("queue", address_of(queue.segment()));
  group.collect();
  if (convoy::test::in_rank()) return;
  bool short_of_memory = true;
  const QueueSteps steps([&](const char* here) {
    if (short_of_memory && std::string_view(here) == "repair") throw std::bad_alloc();
  });
  EXPECT_THROW(queue.lost(), std::bad_alloc);
  EXPECT_THROW(queue.lost(), std::bad_alloc);
  short_of_memory = false;
  EXPECT_EQ(queue.lost().items, 0u);
  EXPECT_EQ(queue.size(), 1u);
  EXPECT_EQ(get(queue, soon()), "item");
}

// Survivors and victims put and get at random; the victims are killed at random moments. No item
// comes twice, those of a producer come in order, and at most one a victim is missing, which is
// counted.
TEST(QueueMemoryTest, KillsAtRandom) {
  constexpr int kVictims = 6, kSurvivors = 2, kItems = 3000;
  RankGroup group(kVictims + kSurvivors, RankMode::kProcesses);
  Queue queue({.capacity = 8, .item_bytes = 16}, no_settle());
  // What each rank has put in full, and all that was received: in memory that outlives the dead.
  struct Record {
    std::atomic<std::uint32_t> put[kVictims + kSurvivors];
    std::atomic<std::uint32_t> got[kVictims + kSurvivors][kItems];  // times, by producer and number
    std::atomic<std::uint32_t> disorder;
  };
  const Segment memory = Segment::create(sizeof(Record), "test");
  group.start([&](Rank& r) {
    Queue mine(segment_at(r.store()->get("queue", r.deadline())), no_settle());
    const Segment shared = segment_at(r.store()->get("record", r.deadline()));
    auto& record = *reinterpret_cast<Record*>(shared.data());
    const auto id = static_cast<std::size_t>(r.id());
    std::map<std::size_t, std::size_t> latest;
    const auto receive = [&](const Deadline& deadline) {
      const auto items = mine.take(1, deadline);
      if (items.empty()) return false;
      const std::size_t producer = std::stoul(items[0].bytes.substr(0, 2));
      const std::size_t number = std::stoul(items[0].bytes.substr(2));
      record.got[producer][number].fetch_add(1);
      mine.finish(items[0]);
      const auto [place, fresh] = latest.try_emplace(producer, number);
      if (!fresh && place->second >= number) record.disorder.fetch_add(1);
      place->second = number;
      return true;
    };
    r.mark("running");
    std::mt19937 random(static_cast<unsigned>(r.id()));
    for (std::uint32_t i = 0; i < kItems; ++i) {
      const std::string item = concat(id < 10 ? "0" : "", id, i);
      // Both wait at times: for room, and for items.
      while (!put(mine, item, Deadline::after(std::chrono::milliseconds(random() % 3)))) {
        receive(at_once());
      }
      record.put[id].fetch_add(1);
      receive(Deadline::after(std::chrono::milliseconds(random() % 2)));
    }
    if (id < kVictims) {
      for (;;) receive(Deadline::after(std::chrono::milliseconds(50)));  // until it is killed
    }
    r.wait_for("over");
    while (receive(at_once())) {
    }
  });
  group.store()->set("queue", address_of(queue.segment()));
  group.store()->set("record", address_of(memory));
  group.wait_mark("running");
  std::mt19937 random(11);
  for (int v = 0; v < kVictims; ++v) {
    const auto until = Deadline::after(std::chrono::microseconds(random() % 20'000));
    while (!until.expired()) std::this_thread::yield();
    group.kill(v, SIGKILL);
  }
  group.post("over");
  group.join();
  if (convoy::test::in_rank()) return;
  while (get(queue, at_once())) ADD_FAILURE() << "an item was left";
  queue.look_for_dead();
  const auto lost = queue.lost();
  const auto& record = *reinterpret_cast<const Record*>(memory.data());
  std::uint32_t missing = 0;
  for (std::size_t p = 0; p < kVictims + kSurvivors; ++p) {
    for (std::uint32_t i = 0; i < kItems; ++i) {
      const std::uint32_t times = record.got[p][i].load();
      EXPECT_LE(times, 1u) << p << " " << i;
      if (i < record.put[p].load()) missing += 1 - std::min(times, 1u);
    }
  }
  EXPECT_EQ(record.disorder.load(), 0u);
  EXPECT_LE(missing, lost.items);
  EXPECT_LE(lost.items, static_cast<std::uint64_t>(kVictims));
}

// As above, and beside the threads there is a process that ends at a random place of a random call,
// also with the lock held. What it was doing may have happened or not; all else must fit.
TEST(QueueMemoryTest, LinearizableWithKills) {
  constexpr int kRounds = 30, kThreads = 2, kCalls = 4;
  constexpr std::uint32_t kCapacity = 2;
  struct Round {
    std::atomic<std::uint32_t> ready, go, calls;
    Call call[kCalls];
  };
  struct Record {
    std::atomic<std::uint64_t> clock;
    std::atomic<ProcessWord> victim[kRounds];
    Round round[kRounds];
  };
  RankGroup group(kRounds, RankMode::kProcesses);
  const Segment memory = Segment::create(sizeof(Record), "test");
  std::vector<std::unique_ptr<Queue>> queues;
  for (int i = 0; i < kRounds; ++i) {
    queues.push_back(std::make_unique<Queue>(
        QueueMemory::Shape{.capacity = kCapacity, .item_bytes = 16}, no_settle()));
  }
  // A call and how it looked from outside: `call` is there before it begins.
  const auto make_call = [](QueueMemory& queue, Call& call, int value, bool puts,
                            std::atomic<std::uint64_t>& clock) {
    call = {.kind = puts ? Call::kPut : Call::kGet, .begin = clock.fetch_add(1)};
    if (puts) {
      call.value = value;
      call.done = put(queue, std::to_string(value), at_once());
    } else if (const auto item = get(queue, at_once())) {
      call.value = std::stoi(*item);
    }
    call.end = clock.fetch_add(1);
  };
  group.start([&](Rank& r) {
    QueueMemory mine(segment_at(r.store()->get(concat("queue", r.id()), r.deadline())),
                     no_settle());
    const Segment shared = segment_at(r.store()->get("record", r.deadline()));
    auto& record = *reinterpret_cast<Record*>(shared.data());
    auto& round = record.round[r.id()];
    std::mt19937 random(static_cast<unsigned>(r.id()));
    auto fuse = 1 + random() % 8;
    const QueueSteps steps([&](const char*) {
      if (--fuse == 0) ::raise(SIGKILL);
    });
    record.victim[r.id()].store(own_process_word());
    round.ready.store(1);
    while (round.go.load() == 0) std::this_thread::yield();
    for (std::uint32_t i = 0; i < kCalls; ++i) {
      round.calls.store(i + 1);
      make_call(mine, round.call[i], static_cast<int>(i), random() % 3 != 0, record.clock);
    }
    ::raise(SIGKILL);
  });
  for (int i = 0; i < kRounds; ++i) {
    group.store()->set(concat("queue", i),
                       address_of(queues[static_cast<std::size_t>(i)]->segment()));
  }
  group.store()->set("record", address_of(memory));
  auto& record = *reinterpret_cast<Record*>(memory.data());
  int killed = 0;
  for (unsigned i = 0; i < kRounds && !convoy::test::in_rank(); ++i) {
    Queue& queue = *queues[i];
    Round& round = record.round[i];
    const auto limit = soon();
    while (round.ready.load() == 0 && !limit.expired()) std::this_thread::yield();
    std::vector<std::vector<Call>> logs(kThreads, std::vector<Call>(kCalls));
    {
      std::vector<std::jthread> threads;
      for (unsigned t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
          std::mt19937 random(100 * i + t);
          for (unsigned c = 0; c < kCalls; ++c) {
            make_call(queue, logs[t][c], static_cast<int>(100 * (t + 1) + c), random() % 2 == 0,
                      record.clock);
          }
        });
      }
      round.go.store(1);
    }
    while (!is_dead(record.victim[i].load(), own_domain()) && !limit.expired())
      std::this_thread::yield();
    std::vector<Call> calls;
    for (const auto& log : logs) calls.insert(calls.end(), log.begin(), log.end());
    for (std::uint32_t c = 0; c < round.calls.load(); ++c) {
      const Call& call = round.call[c];
      if (call.begin == 0 && call.end == 0) continue;  // it ended before it wrote
      calls.push_back(call);
      killed += call.end == Call::kNever ? 1 : 0;
    }
    for (Call last; last.kind == Call::kPut || last.value; calls.push_back(last)) {
      make_call(queue, last, 0, false, record.clock);
    }
    EXPECT_TRUE(LinearizabilityCheck(calls, kCapacity).holds()) << "round " << i;
  }
  group.collect();
  if (!convoy::test::in_rank()) {
    EXPECT_GT(killed, kRounds / 4);
  }
}

// Far more processes than cores, which all sleep and wake each other.
TEST(QueueMemoryTest, TwentyFourProcesses) {
  constexpr int kItems = 100;
  RankGroup group(24, RankMode::kProcesses);
  Queue queue({.capacity = 4, .item_bytes = 16}, no_settle());
  group.start([&](Rank& r) {
    Queue mine(segment_at(r.store()->get("queue", r.deadline())), no_settle());
    r.barrier();
    std::int64_t sum = 0;
    for (int i = 0; i < kItems; ++i) {
      if (r.id() % 2 == 0) {
        EXPECT_TRUE(put(mine, std::to_string(r.id()), r.deadline()));
      } else {
        sum += std::stoi(get(mine, r.deadline()).value());
      }
    }
    r.store()->add("sum", sum);
    r.barrier();
    EXPECT_EQ(r.store()->add("sum", 0), kItems * 11 * 12);  // 0 + 2 + ... + 22
  });
  group.store()->set("queue", address_of(queue.segment()));
  group.join();
}

// A process that left items and ended: they are there. The last one settles what nobody took.
TEST(QueueMemoryTest, TheLastOneSettles) {
  RankGroup group(1, RankMode::kProcesses);
  int settled = 0;
  {
    Queue queue({.capacity = 4, .item_bytes = 16},
                [&](std::string_view, std::atomic<std::uint32_t>&) { ++settled; });
    group.start([&](Rank& r) {
      QueueMemory mine(segment_at(r.store()->get("queue", r.deadline())), no_settle());
      put(mine, "left", soon());
      put(mine, "also", soon());
      EXPECT_FALSE(mine.leave());  // it stays for its items
    });
    group.store()->set("queue", address_of(queue.segment()));
    group.join();
    if (convoy::test::in_rank()) return;
    EXPECT_EQ(get(queue, soon()), "left");
    EXPECT_EQ(settled, 0);
  }
  EXPECT_EQ(settled, 1);
}

}  // namespace
}  // namespace convoy::share::test
