// The queue of bytes: threads here so that the sanitizers see all, processes where some are killed.
#include "share/queue_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "base/concat.h"
#include "base/log.h"
#include "history.h"
#include "os/fork_guard.h"
#include "share/descriptor_store.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::share::test {
namespace {

using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }
Deadline at_once() { return Deadline::after(std::chrono::seconds(0)); }

QueueMemory::Settle no_settle() {
  return [](std::string_view, std::atomic<std::uint32_t>&) {};
}

bool put(QueueMemory& queue, const std::string& item, const Deadline& deadline) {
  QueueMemory::Hands hands(queue, 1);
  const std::string_view view = item;
  return queue.put({&view, 1}, queue.epoch(), hands, {}, deadline).items == 1;
}

std::optional<std::string> get(QueueMemory& queue, const Deadline& deadline) {
  const auto items = queue.take(1, deadline);
  if (items.empty()) return std::nullopt;
  queue.finish(items[0]);
  return items[0].bytes;
}

// Leaves, so that nothing of it stays in the memory.
struct Queue : QueueMemory {
  using QueueMemory::QueueMemory;
  ~Queue() { leave(); }
};

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

// --- Processes that are killed ------------------------------------------------------------------

// A queue of the test's own process, which ranks find through /proc.
std::string address_of(const Segment& segment) {
  return concat("/proc/", ::getpid(), "/fd/", segment.fd(), " ", segment.size());
}

Segment segment_at(const std::string& address) {
  const auto space = address.find(' ');
  UniqueFd fd(::open(address.substr(0, space).c_str(), O_RDWR | O_CLOEXEC));
  return Segment::adopt(std::move(fd), std::stoul(address.substr(space + 1)));
}

class DeathTest : public testing::TestWithParam<const char*> {};

// The rank's process ends at the given place, with the lock held; everything else goes on.
TEST_P(DeathTest, WithTheLock) {
  const std::string where = GetParam();
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
    victim.set_die_in_lock_for_testing([&](const char* here) {
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
  EXPECT_EQ(lost.latest.find("in its hands") != std::string::npos, taken);
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
                                         "take: taken", "take: out of order"));

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
    while (id < kVictims) receive(Deadline::after(std::chrono::milliseconds(50)));
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
    mine.set_die_in_lock_for_testing([&](const char*) {
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
    while (is_running(record.victim[i].load()) && !limit.expired()) std::this_thread::yield();
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

TEST(QueueMemoryTest, OtherMemoryIsRefused) {
  expect_error(ErrorKind::kInvalidArgument, "no queue",
               [] { QueueMemory(Segment::create(1 << 16, "test"), no_settle()); });
  expect_error(ErrorKind::kInvalidArgument, "no queue",
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

}  // namespace
}  // namespace convoy::share::test
