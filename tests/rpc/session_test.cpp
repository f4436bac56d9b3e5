// Sessions: who is in them, what all do together, how they begin and end. The scenarios of
// PyTorch's rpc_test.py have its names behind them.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/concat.h"
#include "convoy/rpc.h"
#include "convoy/rref.h"
#include "convoy/spawn.h"
#include "rpc/session_functions.h"
#include "rpc/workers.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::rpc::test {

using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using namespace std::chrono_literals;

int my_rank() { return current().session().worker_info().rank; }
CONVOY_RPC(my_rank);

int workers_seen_by_handler() {
  const Session session = current().session();
  session.on_lost(0, [](const auto&, const Error&) {});
  return static_cast<int>(session.view().workers.size());
}
CONVOY_RPC(workers_seen_by_handler);

std::unique_ptr<Promise<int>>& kept_promise() {
  static std::unique_ptr<Promise<int>> one;
  return one;
}
std::optional<CurrentCall>& kept_call() {
  static std::optional<CurrentCall> one;
  return one;
}
Future<int> answer_later() {
  kept_call() = current();
  kept_promise() = std::make_unique<Promise<int>>();
  auto future = kept_promise()->future();
  gate().let_go();
  return future;
}
CONVOY_RPC(answer_later);

// In a process of its own.
void spawned_worker(int index, const std::string& path) {
  const Session session({.method = "file://" + path, .rank = index, .size = 2});
  if (session.rpc_sync<my_rank>(1 - index) != 1 - index) throw std::logic_error("wrong rank");
  session.shutdown();
}

namespace {

class RpcModes : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, RpcModes, convoy::test::rank_modes(), convoy::test::rank_mode_name);

TEST_P(RpcModes, Add) {  // test_add, test_add_with_id, test_int_callee
  run_workers(
      4,
      [](Session& session, int rank) {
        const auto ones = torch::ones({rank + 1, rank + 1});
        const int next = next_of(session);
        EXPECT_TRUE(equal(session.rpc_sync<my_add>(name_of(next), ones, ones), 2));
        EXPECT_TRUE(equal(session.rpc_sync<my_add>(session.worker_info(next), ones, ones), 2));
        EXPECT_TRUE(equal(session.rpc_async<my_add>(next, ones, ones).wait(), 2));
        EXPECT_EQ(session.rpc_sync<my_rank>(next), next);
      },
      {}, GetParam());
}

TEST(RpcTest, SelfAdd) {  // test_self_add
  run_workers(2, [](Session& session, int rank) {
    const auto ones = torch::ones({2, 2});
    const auto self = session.worker_info();
    auto future = session.rpc_async<my_add>(self, ones, ones);
    EXPECT_TRUE(equal(session.rpc_sync<my_add>(self, ones, ones), 2));
    EXPECT_TRUE(equal(session.rpc_sync<my_add>(name_of(rank), ones, ones), 2));
    EXPECT_TRUE(equal(future.wait(), 2));
  });
}

TEST(RpcTest, SendToRank) {  // test_send_to_rank
  static_assert(!std::is_convertible_v<double, To>, "no rank is 0.5");
  run_workers(4, [](Session& session, int) {
    const auto ones = torch::ones({2, 2});
    for (const int bad : {5, -1}) {
      expect_error(ErrorKind::kInvalidArgument, "",
                   [&] { session.rpc_sync<my_add>(bad, ones, ones); });
      expect_error(ErrorKind::kInvalidArgument, "",
                   [&] { static_cast<void>(session.rpc_async<my_add>(bad, ones, ones)); });
      expect_error(ErrorKind::kInvalidArgument, "could not find destination",
                   [&] { static_cast<void>(session.remote<my_add>(bad, ones, ones)); });
    }
    EXPECT_TRUE(equal(session.rpc_sync<my_add>(next_of(session), ones, ones), 2));
    EXPECT_TRUE(equal(session.rpc_async<my_add>(next_of(session), ones, ones).wait(), 2));
    EXPECT_TRUE(equal(session.remote<my_add>(next_of(session), ones, ones).to_here(), 2));
  });
}

TEST(RpcTest, WorkerInfos) {  // test_worker_id, test_get_worker_infos
  run_workers(4, [](Session& session, int rank) {
    EXPECT_EQ(session.worker_info(), (WorkerInfo{name_of(rank), rank}));
    EXPECT_EQ(session.worker_info("worker2").rank, 2);
    expect_error(ErrorKind::kInvalidArgument, "could not find destination",
                 [&] { session.worker_info("WorkerUnknown"); });
    const auto all = session.workers();
    ASSERT_EQ(all.size(), 4U);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(all[static_cast<std::size_t>(i)], (WorkerInfo{name_of(i), i}));
    }
  });
}

TEST(RpcTest, InvalidNames) {  // test_invalid_names
  // An empty one is none: then it is "worker0".
  for (const std::string& name :
       {std::string("abc*"), std::string(" "), std::string(128, 'a'), std::string(500, 'a')}) {
    expect_error(ErrorKind::kInvalidArgument, "name", [&] {
      Session({.name = name, .rank = 0, .size = 1, .store = make_local_store()});
    });
  }
  Session session(
      {.name = std::string(127, 'a'), .rank = 0, .size = 1, .store = make_local_store()});
  session.shutdown();
}

TEST(RpcTest, DuplicateName) {  // test_duplicate_name, test_duplicate_name_2
  RankGroup(4, RankMode::kThreads).run([](Rank& r) {
    auto options = options_of(r);
    options.name = "duplicate_name";
    expect_error(ErrorKind::kInvalidArgument, "is not unique", [&] { Session session(options); });
    // Two of four: all are told.
    options.name = name_of(r.id() % (r.size() - 1));
    expect_error(ErrorKind::kInvalidArgument, "is not unique", [&] { Session session(options); });
  });
}

TEST(RpcTest, SessionsOneAfterTheOtherAndAtOnce) {  // test_init_rpc_twice, test_reinit
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto ones = torch::ones({2, 2});
    for (int i = 0; i < 2; ++i) {
      Session session(options_of(r));
      EXPECT_TRUE(equal(session.rpc_sync<my_add>(next_of(session), ones, ones), 2));
      session.shutdown();
    }
    Session first(options_of(r));
    Session second(options_of(r));
    EXPECT_TRUE(equal(first.rpc_sync<my_add>(next_of(first), ones, ones), 2));
    second.shutdown();
    EXPECT_TRUE(equal(first.rpc_sync<my_add>(next_of(first), ones, ones), 2));
    first.shutdown();
  });
}

TEST(RpcTest, WorldSizeOne) {  // test_world_size_one
  Session session({.name = "me"});
  const auto ones = torch::ones({2, 2});
  EXPECT_TRUE(equal(session.rpc_sync<my_add>("me", ones, ones), 2));
  EXPECT_TRUE(equal(session.rpc_async<my_add>("me", ones, ones).wait(), 2));
  EXPECT_TRUE(equal(session.remote<my_add>("me", ones, ones).to_here(), 2));
  session.shutdown();
}

TEST(RpcTest, ShutdownTimeoutNamesWhoBlocks) {  // test_wait_all_workers_timeout
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    Session session(options_of(r));
    if (r.id() == 0) {
      expect_error(ErrorKind::kTimeout, "worker1", [&] { session.shutdown({.timeout = 10ms}); });
      expect_error(ErrorKind::kTimeout, "worker1",
                   [&] { session.shutdown({.timeout = Deadline::after(10ms)}); });
    }
    r.barrier();
    session.shutdown({.graceful = false});
  });
}

TEST(RpcTest, AllGather) {  // test_all_gather
  run_workers(4, [](Session& session, int rank) {
    const auto all = session.all_gather(rank);
    const std::map<std::string, int> expected = {
        {"worker0", 0}, {"worker1", 1}, {"worker2", 2}, {"worker3", 3}};
    EXPECT_EQ(all, expected);
    const auto tensors = session.all_gather(torch::full({3}, rank));
    EXPECT_TRUE(equal(tensors.at("worker2"), 2));
    if (rank < 2) {
      EXPECT_EQ(session.all_gather(rank, {"worker1", "worker0"}).size(), 2U);
    }
  });
}

TEST(RpcTest, AllGatherTimeout) {  // test_all_gather_timeout
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    Session session(options_of(r));
    if (r.id() == 0) {
      expect_error(ErrorKind::kTimeout, "worker1", [&] { session.all_gather(1, {}, 100ms); });
    }
    r.barrier();
    session.shutdown({.graceful = false});
  });
}

std::atomic<int> arrived{0};
std::array<std::atomic<int>, 2> arrived_by_half;

TEST(RpcTest, Barrier) {  // test_rpc_barrier_all, _subset, _partial_subset
  arrived = 0;
  for (auto& count : arrived_by_half) count = 0;
  run_workers(4, [](Session& session, int rank) {
    ++arrived;
    session.barrier();
    EXPECT_EQ(arrived, 4);
    session.barrier();
    // Two halves, each for itself.
    const int half = rank % 2;
    const std::vector<std::string> mine = half == 0
                                              ? std::vector<std::string>{"worker0", "worker2"}
                                              : std::vector<std::string>{"worker1", "worker3"};
    ++arrived_by_half[half];
    session.barrier(mine);
    EXPECT_EQ(arrived_by_half[half], 2);
    session.barrier();
    // One half, and each of the others alone.
    ++arrived_by_half[half];
    session.barrier(half == 1 ? mine : std::vector<std::string>{name_of(rank)});
    EXPECT_TRUE(half == 0 || arrived_by_half[1] == 4);
  });
}

TEST(RpcTest, CallAfterShutdown) {  // test_shutdown_followed_by_rpc
  run_workers(2, [](Session& session, int) {
    const auto ones = torch::ones({2, 2});
    EXPECT_TRUE(equal(session.rpc_sync<my_add>(next_of(session), ones, ones), 2));
    session.shutdown();
    expect_error(ErrorKind::kInvalidArgument, "RPC has not been initialized",
                 [&] { session.rpc_sync<my_add>(next_of(session), ones, ones); });
  });
}

TEST(RpcTest, MeetsByAFile) {
  static int meetings = 0;
  const std::string path = concat(testing::TempDir(), "/convoy-rpc-", ::getpid(), "-", ++meetings);
  RankGroup(2, RankMode::kThreads).run([&](Rank& r) {
    Session session({.method = "file://" + path, .rank = r.id(), .size = 2});
    EXPECT_EQ(session.rpc_sync<my_rank>(next_of(session)), next_of(session));
    session.shutdown();
  });
  std::filesystem::remove(path);  // otherwise when the process ends
}

TEST(RpcTest, SpawnedProcessesAreWorkers) {
  const std::string path = testing::TempDir() + "/convoy-rpc-" + std::to_string(::getpid());
  auto processes = spawn<spawned_worker>(2, path);
  EXPECT_TRUE(processes.join(60s));
}

// A worker's view of a store, in which the last key that it needs comes when it is let go.
class HeldStore final : public Store {
 public:
  HeldStore(std::shared_ptr<Store> inner, std::string last, std::function<void()> hold)
      : inner_(std::move(inner)), last_(std::move(last)), hold_(std::move(hold)) {}

  void set(const std::string& key, std::string_view value) override { inner_->set(key, value); }
  std::string get(const std::string& key, const Deadline& deadline) override {
    auto value = inner_->get(key, deadline);
    if (key.ends_with(last_)) hold_();
    return value;
  }
  std::optional<std::string> try_get(const std::string& key) override {
    return inner_->try_get(key);
  }
  void wait(std::span<const std::string> keys, const Deadline& deadline) override {
    inner_->wait(keys, deadline);
  }
  bool check(std::span<const std::string> keys) override { return inner_->check(keys); }
  std::int64_t add(const std::string& key, std::int64_t delta) override {
    return inner_->add(key, delta);
  }
  void append(const std::string& key, std::string_view value) override {
    inner_->append(key, value);
  }
  std::string compare_set(const std::string& key, std::string_view expected,
                          std::string_view desired) override {
    return inner_->compare_set(key, expected, desired);
  }
  bool erase(const std::string& key) override { return inner_->erase(key); }
  std::vector<std::string> keys(const std::string& prefix) override { return inner_->keys(prefix); }
  Versioned watch(const std::string& key, std::uint64_t since, const Deadline& deadline) override {
    return inner_->watch(key, since, deadline);
  }
  std::chrono::milliseconds timeout() const override { return inner_->timeout(); }

 private:
  const std::shared_ptr<Store> inner_;
  const std::string last_;
  const std::function<void()> hold_;
};

// Whoever has met the others may call one whose constructor has not returned yet. The calls of all
// others wait for it when it comes.
TEST(RpcTest, CallsWhileASessionBegins) {
  constexpr int kWorkers = 8;
  for (int i = 0; i < 5; ++i) {
    std::atomic<int> called{0};
    const auto all_have_called = [&] {
      const auto limit = Deadline::after(30s);
      while (called.load() < kWorkers - 1 && !limit.expired()) std::this_thread::yield();
    };
    RankGroup(kWorkers, RankMode::kThreads).run([&](Rank& r) {
      SessionOptions options{.rank = r.id(), .size = r.size(), .store = r.store()};
      if (r.id() == 0) {
        options.store = std::make_shared<HeldStore>(r.store(), concat("worker/", kWorkers - 1),
                                                    all_have_called);
      }
      const Session session(options);
      if (r.id() != 0) {
        const auto call = session.rpc_async<workers_seen_by_handler>(0);
        const auto kept = session.remote<workers_seen_by_handler>(0);
        ++called;
        EXPECT_EQ(call.wait(), kWorkers);
        EXPECT_EQ(kept.to_here(20s), kWorkers);
      }
      session.shutdown();
    });
  }
}

// A handler's promise outlives the session.
TEST(RpcTest, AnAnswerAfterTheEndOfTheSession) {
  for (int i = 0; i < 20; ++i) {
    gate().open = 0;
    Future<int> future;
    {
      Session session({.name = "me"});
      future = session.rpc_async<answer_later>(0);
      gate().wait();
      ASSERT_EQ(gate().open, 1);
      session.shutdown({.graceful = false});
    }
    expect_error(ErrorKind::kCancelled, "", [&] { static_cast<void>(future.wait()); });
    future = {};
    EXPECT_EQ(kept_call()->caller().name, "me");
    kept_promise().reset();
    kept_call().reset();
  }
}

TEST(RpcTest, StatsAndThreads) {  // test_set_and_get_num_worker_threads
  run_workers(2,
              [](Session& session, int) {
                const int to = next_of(session);
                for (int i = 0; i < 10; ++i) session.rpc_sync<light>(to);
                const auto stats = session.stats();
                EXPECT_EQ(stats.threads, 27);
                bool found = false;
                for (const auto& each : stats.functions) {
                  if (each.worker != name_of(to) || each.function != "convoy::rpc::test::light")
                    continue;
                  found = true;
                  EXPECT_EQ(each.calls, 10U);
                  EXPECT_GT(each.latency.quantile(0.5), 0ns);
                }
                EXPECT_TRUE(found);
                session.barrier();
              },
              {.threads = 27});
}

TEST(RpcTest, PeerProcessGone) {  // test_handle_send_exceptions
  RankGroup group(2, RankMode::kProcesses);
  group.start([](Rank& r) {
    Session session(options_of(r));
    if (r.id() == 1) {
      r.mark("ready");
      r.wait_for("never");
      return;
    }
    EXPECT_EQ(session.rpc_sync<light>(1), 0);
    const auto future = session.rpc_async<wait_at_gate>(1);
    r.mark("ready");
    expect_error(ErrorKind::kPeerLost, "worker1", [&] { future.wait(); });
    expect_error(ErrorKind::kPeerLost, "worker1", [&] { session.rpc_sync<light>(1); });
    session.shutdown({.graceful = false});
  });
  group.wait_mark("ready");
  group.kill(1, SIGKILL);
  group.join();
}

TEST(RpcTest, EventsHavePyTorchsNames) {
  static std::mutex mutex;
  static std::vector<std::string> names;
  names.clear();
  run_workers(2, [](Session& session, int rank) {
    if (rank != 0) return;
    const auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& event)
                                       -> std::unique_ptr<at::ObserverContext> {
          const std::lock_guard lock(mutex);
          names.emplace_back(event.name());
          return nullptr;
        }).scopes({at::RecordScope::USER_SCOPE}));
    session.rpc_sync<light>(1);
    session.rpc_async<light>(1).wait();
    static_cast<void>(session.remote<light>(1));
    at::removeCallback(handle);
  });
  EXPECT_EQ(names,
            (std::vector<std::string>{"rpc_sync#convoy::rpc::test::light(worker0 -> worker1)",
                                      "rpc_async#convoy::rpc::test::light(worker0 -> worker1)",
                                      "rpc_remote#convoy::rpc::test::light(worker0 -> worker1)"}));
}

}  // namespace
}  // namespace convoy::rpc::test
