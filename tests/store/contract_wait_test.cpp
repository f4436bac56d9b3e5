// What every Store owes its users: waiting, deadlines, threads, barriers, forks.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <numeric>
#include <thread>

#include "base/concat.h"
#include "store_variants.h"

namespace convoy::test {
namespace {

using std::chrono::milliseconds;
using Keys = std::vector<std::string>;

class StoreWaiting : public testing::TestWithParam<StoreVariant> {
 protected:
  // As messages name a key.
  static std::string named(const std::string& key) {
    return (GetParam() >= StoreVariant::kPrefixLocal ? "'outer/" : "'") + key + "'";
  }

  StoreWorld world_{GetParam()};
  std::shared_ptr<Store> store_ = world_.client();
};
INSTANTIATE_TEST_SUITE_P(Variants, StoreWaiting, all_variants(), variant_name);

template <class Function>
auto in_thread(Function function) {
  return std::async(std::launch::async, std::move(function));
}

TEST_P(StoreWaiting, GetWaitsForItsKey) {
  auto got = in_thread([&] { return store_->get("k", soon()); });
  world_.await_waiting(1);
  store_->set("other", "no");
  store_->set("k", "v");
  EXPECT_EQ(got.get(), "v");
  auto summed = in_thread([&] { return store_->get("n", soon()); });
  world_.await_waiting(1);
  store_->add("n", 3);
  EXPECT_EQ(summed.get(), "3");
  auto appended = in_thread([&] { return store_->get("a", soon()); });
  world_.await_waiting(1);
  store_->append("a", "x");
  EXPECT_EQ(appended.get(), "x");
  auto compared = in_thread([&] { return store_->get("c", Deadline::never()); });
  world_.await_waiting(1);
  store_->compare_set("c", "", "y");
  EXPECT_EQ(compared.get(), "y");
}

TEST_P(StoreWaiting, WaitNeedsAllKeysAtOnce) {
  store_->wait({}, at_once());
  store_->set("b", "");
  auto waiting = in_thread([&] { store_->wait(Keys{"a", "b", "c", "a", "c"}, soon()); });
  world_.await_waiting(1);
  store_->erase("b");
  store_->set("a", "");
  store_->set("c", "");
  world_.await_waiting(1);
  store_->erase("a");
  store_->set("b", "");
  world_.await_waiting(1);
  store_->set("a", "");
  waiting.get();
}

TEST_P(StoreWaiting, WaitForManyKeys) {
  Keys keys;
  for (int i = 0; i < 1000; ++i) keys.push_back(concat("key/", i));
  auto forwards = in_thread([&] { store_->wait(keys, soon()); });
  auto backwards = in_thread([&] { store_->wait(Keys(keys.rbegin(), keys.rend()), soon()); });
  for (std::size_t i = 0; i < keys.size(); ++i) store_->set(keys[i * 7 % keys.size()], "");
  forwards.get();
  backwards.get();
}

TEST_P(StoreWaiting, WatchWaitsForAChange) {
  auto made = in_thread([&] { return store_->watch("k", 0, soon()); });
  world_.await_waiting(1);
  store_->set("k", "1");
  const auto first = made.get();
  EXPECT_EQ(first.value, "1");
  auto changed = in_thread([&] { return store_->watch("k", first.version, soon()); });
  world_.await_waiting(1);
  store_->set("k", "2");
  const auto second = changed.get();
  EXPECT_EQ(second.value, "2");
  auto erased = in_thread([&] { return store_->watch("k", second.version, soon()); });
  world_.await_waiting(1);
  store_->erase("k");
  EXPECT_EQ(erased.get().value, std::nullopt);
}

TEST_P(StoreWaiting, LoopOfWatchesSeesTheLastState) {
  constexpr int kStates = 300;
  auto watcher = in_thread([&] {
    Store::Versioned seen;
    int looks = 0;
    while (seen.value != std::to_string(kStates)) {
      const auto before = seen.version;
      seen = store_->watch("state", before, soon());
      EXPECT_NE(seen.version, before);
      ++looks;
    }
    return looks;
  });
  const auto writer = world_.client();
  for (int i = 1; i <= kStates; ++i) {
    if (i % 50 == 0) writer->erase("state");
    writer->set("state", std::to_string(i));
  }
  EXPECT_LE(watcher.get(), kStates + kStates / 50);
}

TEST_P(StoreWaiting, PassedDeadlineIsEnoughForWhatIsThere) {
  store_->set("k", "v");
  for (const Deadline& passed : {at_once(), Deadline::after(-std::chrono::hours(1)),
                                 Deadline::after(std::chrono::nanoseconds::min()),
                                 Deadline::at(Deadline::Clock::time_point::min())}) {
    EXPECT_EQ(store_->get("k", passed), "v");
    store_->wait(Keys{"k"}, passed);
    EXPECT_EQ(store_->watch("k", 0, passed).value, "v");
    EXPECT_ERROR(kTimeout, named("no"), store_->get("no", passed));
    EXPECT_ERROR(kTimeout, named("no"), store_->wait(Keys{"no"}, passed));
    EXPECT_ERROR(kTimeout, named("no"), store_->watch("no", 0, passed));
  }
}

TEST_P(StoreWaiting, ShortDeadlinesPassInTime) {
  const auto start = Deadline::Clock::now();
  EXPECT_ERROR(kTimeout, "after 0.05 s", store_->get("k", Deadline::after(milliseconds(50))));
  const auto took = Deadline::Clock::now() - start;
  EXPECT_GE(took, milliseconds(50));
  EXPECT_LT(took, std::chrono::seconds(2));  // the server's answer, not the client's last resort
  store_->set("k", "v");                     // comes too late and harms nobody
  EXPECT_EQ(store_->get("k"), "v");
}

TEST_P(StoreWaiting, FarDeadlinesDoNotOverflow) {
  using Clock = Deadline::Clock;
  for (const Deadline& far :
       {Deadline::never(), Deadline::at(Clock::time_point::max() - std::chrono::nanoseconds(1)),
        Deadline::after(std::chrono::hours(24 * 365 * 200))}) {
    store_->erase("k");
    auto got = in_thread([&] { return store_->get("k", far); });
    world_.await_waiting(1);
    store_->set("k", "v");
    EXPECT_EQ(got.get(), "v");
  }
}

TEST_P(StoreWaiting, TimeoutNamesWhatIsMissing) {
  store_->set("there", "");
  const auto now = at_once();
  EXPECT_ERROR(kTimeout, concat("no key ", named("a"), " (0 of 1 keys are there)"),
               store_->get("a", now));
  EXPECT_ERROR(kTimeout, concat(named("a"), ", ", named("b"), " (1 of 3 keys are there)"),
               store_->wait(Keys{"a", "there", "b"}, now));
  Keys many;
  for (int i = 0; i < 20; ++i) many.push_back(concat("k", i));
  EXPECT_ERROR(kTimeout, concat(named("k7"), " and 12 more (0 of 20 keys are there)"),
               store_->wait(many, now));
}

TEST_P(StoreWaiting, WaitingThreadsHoldUpNobody) {
  std::vector<std::future<std::string>> waiting;
  for (int i = 0; i < 6; ++i) {
    waiting.push_back(in_thread([&, i] { return store_->get(concat("late/", i), soon()); }));
  }
  world_.await_waiting(6);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(store_->add("n", 1), i + 1);
  EXPECT_ERROR(kTimeout, named("no"), store_->get("no", Deadline::after(milliseconds(1))));
  // The first is likely to be the one that reads the socket: it leaves, and another takes over.
  for (int i = 0; i < 6; ++i) store_->set(concat("late/", i), std::to_string(i));
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(waiting[static_cast<std::size_t>(i)].get(), std::to_string(i));
  }
}

// Each thread waits for its key and sets the next one's: whoever reads for the others hands that
// over at every step.
TEST_P(StoreWaiting, ThreadsPassATokenAround) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 25;
  std::vector<std::jthread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = t; i < kThreads * kRounds; i += kThreads) {
        EXPECT_EQ(store_->get(concat("token/", i), soon()), std::to_string(i));
        store_->set(concat("token/", i + 1), std::to_string(i + 1));
      }
    });
  }
  store_->set("token/0", "0");
  EXPECT_EQ(store_->get(concat("token/", kThreads * kRounds), soon()),
            std::to_string(kThreads * kRounds));
}

// Deadlines that pass while others wait: every caller gets its own answer and nobody else's.
TEST_P(StoreWaiting, ManyThreadsMixEverything) {
  constexpr int kThreads = 8;
  std::atomic<int> timeouts = 0;
  std::vector<std::jthread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const std::string own = concat("own/", t);
      for (int i = 0; i < 40; ++i) {
        store_->set(own,
                    std::string(static_cast<std::size_t>(i) * 997, static_cast<char>('a' + t)));
        EXPECT_EQ(store_->get(own, soon()).size(), static_cast<std::size_t>(i) * 997);
        store_->add("sum", t);
        if (i % 8 == 0) {
          const auto error =
              error_of([&] { store_->get("never", Deadline::after(milliseconds(i % 3))); });
          if (error && error->kind() == ErrorKind::kTimeout) ++timeouts;
        }
      }
    });
  }
  threads.clear();
  EXPECT_EQ(timeouts, kThreads * 5);
  EXPECT_EQ(store_->add("sum", 0), 40 * kThreads * (kThreads - 1) / 2);
}

TEST_P(StoreWaiting, ClientsFindEachOther) {
  constexpr int kClients = 12;
  std::vector<std::jthread> threads;
  std::atomic<int> sum = 0;
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([&, i] {
      const auto mine = world_.client();
      mine->set(concat("address/", i), std::to_string(i));
      Keys keys;
      for (int j = 0; j < kClients; ++j) keys.push_back(concat("address/", j));
      mine->wait(keys, soon());
      for (const auto& key : keys) sum += std::stoi(mine->get(key));
    });
  }
  threads.clear();
  EXPECT_EQ(sum, kClients * kClients * (kClients - 1) / 2);
}

TEST_P(StoreWaiting, BarrierHoldsEverybody) {
  constexpr int kCallers = 6;
  std::atomic<int> arrived = 0;
  std::vector<std::jthread> threads;
  for (int i = 0; i < kCallers; ++i) {
    threads.emplace_back([&] {
      const auto mine = world_.client();
      for (int round = 1; round <= 10; ++round) {
        ++arrived;
        mine->barrier(concat("round/", round), kCallers, soon());
        EXPECT_GE(arrived, kCallers * round);
      }
    });
  }
  threads.clear();
  store_->barrier("alone", 1, at_once());
}

TEST_P(StoreWaiting, BarrierTellsWhatIsWrong) {
  EXPECT_ERROR(kInvalidArgument, "barrier 'b' of 0 callers", store_->barrier("b", 0, soon()));
  EXPECT_ERROR(kInvalidArgument, "barrier 'b' of -1 callers", store_->barrier("b", -1, soon()));
  EXPECT_ERROR(kTimeout, "barrier 'late': 1 of 3 callers came",
               store_->barrier("late", 3, at_once()));
  // Nobody who comes later passes alone.
  for (int later = 0; later < 2; ++later) {
    EXPECT_ERROR(kTimeout, "barrier 'late': 1 of 3 callers came",
                 store_->barrier("late", 3, soon()));
  }
  store_->barrier("once", 1, soon());
  EXPECT_ERROR(kInvalidArgument, "caller number 2 at barrier 'once' of 1; a barrier's key serves",
               store_->barrier("once", 1, soon()));

  // Callers that disagree all hear it, also the one that waits already.
  auto first = in_thread([&] { return error_of([&] { store_->barrier("split", 2, soon()); }); });
  world_.await_waiting(1);
  EXPECT_TRUE(eventually([&] { return store_->check(Keys{"split/arrived"}); }));
  EXPECT_ERROR(kInvalidArgument, "one caller says 2 callers, another one 3",
               store_->barrier("split", 3, soon()));
  const auto heard = first.get();
  ASSERT_TRUE(heard.has_value());
  EXPECT_EQ(heard->kind(), ErrorKind::kInvalidArgument);
}

TEST_P(StoreWaiting, ForkedChildIsRefusedAndTheParentGoesOn) {
  store_->set("k", "v");
  const pid_t child = ::fork();
  if (child == 0) {
    const auto error = error_of([&] { store_->set("k", "child"); });
    store_.reset();  // must not end the parent's connection
    ::_exit(error && error->kind() == ErrorKind::kUnsupported ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(store_->get("k"), "v");
}

}  // namespace
}  // namespace convoy::test
