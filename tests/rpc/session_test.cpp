// Typed calls between workers. The scenarios of PyTorch's rpc_test.py have its names behind them.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/concat.h"
#include "base/log.h"
#include "convoy/rpc.h"
#include "convoy/rref.h"
#include "convoy/share.h"
#include "convoy/spawn.h"
#include "support/capture.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::rpc::test {

using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using namespace std::chrono_literals;

// --- What workers call ------------------------------------------------------------------------

at::Tensor my_add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
CONVOY_RPC(my_add);

int my_rank() { return current().session().worker_info().rank; }
CONVOY_RPC(my_rank);

void raise(const std::string& text) { throw std::invalid_argument(text); }
CONVOY_RPC(raise);

at::Tensor echo(const at::Tensor& t) { return t; }
CONVOY_RPC(echo);

bool is_contiguous(const at::Tensor& t) { return t.is_contiguous(); }
CONVOY_RPC(is_contiguous);

void fill(const at::Tensor& t, double value) {
  const torch::NoGradGuard no_gradients;
  t.fill_(value);
}
CONVOY_RPC(fill);

int light() { return 0; }
CONVOY_RPC(light);

at::Tensor heavy(const at::Tensor& t) {
  at::Tensor sum = t;
  for (int i = 0; i < 10; ++i) sum = sum.mm(t) / 100;
  return sum;
}
CONVOY_RPC(heavy);

// A -> B -> A.
at::Tensor nested(const std::string& back, const at::Tensor& t) {
  return current().session().rpc_sync<my_add>(back, t, torch::ones({2, 2}));
}
CONVOY_RPC(nested);

// Calls itself on the next worker so often.
int descend(int depth) {
  if (depth == 0) return 0;
  const auto session = current().session();
  const int next = (session.worker_info().rank + 1) % session.size();
  return session.rpc_sync<descend>(next, depth - 1) + 1;
}
CONVOY_RPC(descend);

Future<at::Tensor> async_add(const std::string& to, const at::Tensor& a, const at::Tensor& b) {
  return current().session().rpc_async<my_add>(to, a, b);
}
CONVOY_RPC(async_add);

Future<at::Tensor> async_chained(const std::string& to, const at::Tensor& a) {
  const auto session = current().session();
  return session.rpc_async<my_add>(to, a, torch::ones({2, 2})).then([](const at::Tensor& t) {
    return t + 2;
  });
}
CONVOY_RPC(async_chained);

// What follows the call goes on with this handler's.
Future<std::string> async_function_of_callback(int to) {
  return current().session().rpc_async<descend>(to, 1).then(
      [](int) { return current().function(); });
}
CONVOY_RPC(async_function_of_callback);

// A -> B -> C -> C, as a function that is asynchronous itself.
Future<at::Tensor> async_nested(const std::string& to, const at::Tensor& a) {
  return current()
      .session()
      .rpc_async<async_add>(to, to, a, torch::ones({2, 2}))
      .then([](const at::Tensor& t) { return t + 2; });
}
CONVOY_RPC(async_nested);

Future<at::Tensor> async_chained_multi(const std::string& to, const at::Tensor& a, int times,
                                       double step) {
  auto future = current().session().rpc_async<my_add>(to, a, torch::zeros({2, 2}));
  for (int i = 0; i < times; ++i) {
    future = future.then([step](const at::Tensor& t) { return t + step; });
  }
  return future;
}
CONVOY_RPC(async_chained_multi);

Future<at::Tensor> async_fanout(const std::string& to, const at::Tensor& a, int times,
                                double step) {
  const auto session = current().session();
  const auto zeros = torch::zeros({2, 2});
  std::vector<Future<at::Tensor>> futures;
  for (int i = 0; i < times; ++i) {
    const at::Tensor& base = i == 0 ? a : zeros;
    futures.push_back(session.rpc_async<my_add>(to, base, torch::full({2, 2}, step)));
  }
  at::Tensor sum = zeros;
  for (const auto& future : futures) sum = sum + co_await future;
  co_return sum;
}
CONVOY_RPC(async_fanout);

Future<at::Tensor> async_raise() {
  Promise<at::Tensor> promise;
  promise.set_error(std::make_exception_ptr(std::runtime_error("Expected error")));
  return promise.future();
}
CONVOY_RPC(async_raise);

Future<at::Tensor> coroutine(std::string to, const at::Tensor& a, int rounds) {
  const auto session = current().session();
  const auto ones = torch::ones({2, 2});  // GCC 12 takes no braced list beside co_await
  at::Tensor sum = a;
  for (int i = 0; i < rounds; ++i) {
    sum = co_await session.rpc_async<my_add>(to, sum, ones);
    EXPECT_EQ(current().function(), "convoy::rpc::test::coroutine");
  }
  co_return sum;
}
CONVOY_RPC(coroutine);

Future<void> coroutine_raise(std::string to) {
  co_await current().session().rpc_async<raise>(to, "from below");
}
CONVOY_RPC(coroutine_raise);

// NOLINTNEXTLINE(readability-identifier-naming): it is a function
constexpr auto scale = [](const at::Tensor& t, double by) { return t * by; };
CONVOY_RPC(scale);

struct Counter {
  int value = 0;
  CONVOY_FIELDS(value)

  static int twice(int n) { return 2 * n; }
  int plus(int n) const { return value + n; }
};
CONVOY_RPC(Counter::twice);
CONVOY_RPC(&Counter::plus);

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& t) { return t; }
};
CONVOY_RPC(&NetImpl::forward);

bool grad_mode_then_off() {
  const bool enabled = at::GradMode::is_enabled();
  at::GradMode::set_enabled(false);  // and never again on
  return enabled;
}
CONVOY_RPC(grad_mode_then_off);

// Not exported.
int secret() { return 42; }

void secret_fill(const at::Tensor& t) { t.fill_(1); }

// One of two is.
int overloaded(int n) { return n; }
double overloaded(double x) { return x; }
CONVOY_RPC(static_cast<int (*)(int)>(overloaded));

// What handlers of this process wait for, in tests whose workers are threads.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  int open = 0;
  int waiting = 0;

  void wait(const std::function<bool()>& enough = nullptr) {
    std::unique_lock lock(mutex);
    ++waiting;
    changed.notify_all();
    changed.wait_for(lock, 30s, [&] { return open > 0 || (enough && enough()); });
    --waiting;
  }
  void let_go() {
    const std::lock_guard lock(mutex);
    ++open;
    changed.notify_all();
  }
  bool wait_for_waiters(int n) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, 30s, [&] { return waiting >= n; });
  }
};
int workers_seen_by_handler() {
  const Session session = current().session();
  session.on_lost(0, [](const auto&, const Error&) {});
  return static_cast<int>(session.view().workers.size());
}
CONVOY_RPC(workers_seen_by_handler);
Gate& gate() {
  static Gate one;
  return one;
}
void wait_at_gate() { gate().wait(); }
CONVOY_RPC(wait_at_gate);

// Tensors whose elements are not all alike were read while somebody wrote to them.
std::atomic<int> torn{0};
std::atomic<int> whole{0};
void check_whole(const at::Tensor& t) { ++(t.eq(t[0]).all().item<bool>() ? whole : torn); }
CONVOY_RPC(check_whole);

// Parameters of a server, which it goes on writing while they are sent.
at::Tensor& weights() {
  static at::Tensor one = torch::zeros({1'000'000});
  return one;
}
at::Tensor pull() { return weights(); }
CONVOY_RPC(pull);

std::string same(const std::string& text) { return text; }
CONVOY_RPC(same);

std::vector<at::Tensor> same_tensors(const std::vector<at::Tensor>& tensors) { return tensors; }
CONVOY_RPC(same_tensors);

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

// A future of no session.
Promise<int>& promised() {
  static Promise<int> one;
  return one;
}
int wait_for_promise() { return promised().future().wait(); }
CONVOY_RPC(wait_for_promise);
void keep_promise(int n) { promised().set_value(n); }
CONVOY_RPC(keep_promise);

std::atomic<int> seen_cancelled{0};
std::atomic<int> waits_for_cancel{0};
void wait_for_cancel() {
  ++waits_for_cancel;
  const auto call = current();
  const auto deadline = Deadline::after(30s);
  while (!call.cancelled() && !deadline.expired()) std::this_thread::yield();
  if (call.cancelled()) ++seen_cancelled;
}
CONVOY_RPC(wait_for_cancel);

std::int64_t time_left() {
  return std::chrono::ceil<std::chrono::seconds>(current().deadline().remaining()).count();
}
CONVOY_RPC(time_left);

// In a process of its own.
void spawned_worker(int index, const std::string& path) {
  const Session session({.method = "file://" + path, .rank = index, .size = 2});
  if (session.rpc_sync<my_rank>(1 - index) != 1 - index) throw std::logic_error("wrong rank");
  session.shutdown();
}

namespace {

// --- Workers ----------------------------------------------------------------------------------

std::string name_of(int rank) { return "worker" + std::to_string(rank); }

SessionOptions options_of(const Rank& r) {
  return {.rank = r.id(), .size = r.size(), .store = r.store()};
}

// Runs a function as n workers, with a session each.
void run_workers(int n, const std::function<void(Session&, int rank)>& function,
                 SessionOptions more = {}, RankMode mode = RankMode::kThreads) {
  RankGroup(n, mode).run([&](Rank& r) {
    SessionOptions options = more;
    options.rank = r.id();
    options.size = r.size();
    options.store = r.store();
    Session session(options);
    function(session, r.id());
    session.shutdown();
  });
}

int next_of(const Session& session) { return (session.worker_info().rank + 1) % session.size(); }

bool equal(const at::Tensor& t, double value) { return t.eq(value).all().item<bool>(); }

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

TEST(RpcTest, MultiRpc) {  // test_multi_rpc
  run_workers(2, [](Session& session, int) {
    const auto ones = torch::ones({2, 2});
    for (int i = 0; i < 20; ++i) {
      EXPECT_TRUE(equal(session.rpc_sync<my_add>(next_of(session), ones, ones), 2));
    }
  });
}

TEST(RpcTest, FutureWaitTwice) {  // test_future_wait_twice
  run_workers(2, [](Session& session, int) {
    std::vector<Future<void>> futures;
    for (int i = 0; i < 20; ++i) {
      futures.push_back(session.rpc_async<raise>(next_of(session), "Expected error"));
    }
    expect_error(ErrorKind::kRemote, "Expected error", [&] { wait_all(futures); });
    for (const auto& future : futures) {
      for (int i = 0; i < 2; ++i) {
        expect_error(ErrorKind::kRemote, "Expected error", [&] { future.wait(); });
      }
    }
  });
}

TEST(RpcTest, Nested) {  // test_nested_rpc
  run_workers(2, [](Session& session, int rank) {
    EXPECT_TRUE(
        equal(session.rpc_sync<nested>(next_of(session), name_of(rank), torch::ones({2, 2})), 2));
  });
}

TEST(RpcTest, NestedFiftyDeepOnOneThread) {
  run_workers(
      2,
      [](Session& session, int) { EXPECT_EQ(session.rpc_sync<descend>(next_of(session), 50), 50); },
      {.threads = 1});
}

TEST(RpcTest, EightTimesEightCrossingCallsOnOneThread) {
  run_workers(8,
              [](Session& session, int) {
                std::vector<Future<int>> futures;
                for (int to = 0; to < 8; ++to) futures.push_back(session.rpc_async<descend>(to, 8));
                for (const int depth : wait_all(futures)) EXPECT_EQ(depth, 8);
              },
              {.threads = 1});
}

TEST(RpcTest, AHandlerThatWaitsForAPromiseIsReplaced) {
  promised() = Promise<int>();
  run_workers(2,
              [](Session& session, int rank) {
                if (rank != 0) return;
                const auto future = session.rpc_async<wait_for_promise>(1);
                session.rpc_sync<keep_promise>(1, 5);
                EXPECT_EQ(future.wait(), 5);
              },
              {.threads = 1});
}

TEST(RpcTest, StressLight) {  // test_stress_light_rpc
  run_workers(2, [](Session& session, int) {
    std::vector<Future<int>> futures;
    for (int i = 0; i < 1000; ++i) futures.push_back(session.rpc_async<light>(next_of(session)));
    for (const int result : wait_all(futures)) EXPECT_EQ(result, 0);
  });
}

TEST(RpcTest, StressHeavy) {  // test_stress_heavy_rpc
  run_workers(2, [](Session& session, int) {
    std::vector<Future<at::Tensor>> futures;
    const auto t = torch::ones({100, 100});
    for (int i = 0; i < 20; ++i) futures.push_back(session.rpc_async<heavy>(next_of(session), t));
    for (const auto& result : wait_all(futures)) EXPECT_TRUE(equal(result, 1));
  });
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

TEST(RpcTest, Timeouts) {  // test_rpc_timeouts
  Gate& held = gate();
  held.open = 0;
  RankGroup(2, RankMode::kThreads).run([&](Rank& r) {
    Session session(options_of(r));
    if (r.id() == 0) {
      expect_error(ErrorKind::kTimeout, "ran for more than 0.1 s",
                   [&] { session.to(1, {.timeout = 100ms}).rpc_sync<wait_at_gate>(); });
      expect_error(ErrorKind::kTimeout, "worker1",
                   [&] { session.to(1, {.timeout = 50ms}).rpc_async<wait_at_gate>().wait(); });
      session.set_timeout(1ms);
      expect_error(ErrorKind::kTimeout, "worker1", [&] { session.rpc_sync<wait_at_gate>(1); });
      expect_error(ErrorKind::kTimeout, "worker1",
                   [&] { session.rpc_async<wait_at_gate>(1).wait(); });
      EXPECT_EQ(session.timeout(), 1ms);
      held.let_go();
      session.to(1, {.timeout = 30s}).rpc_sync<wait_at_gate>();
      session.to(1, {.timeout = 30s}).rpc_async<wait_at_gate>().wait();
      session.to(1, {.timeout = 0s}).rpc_sync<wait_at_gate>();
      session.to(1, {.timeout = 0s}).rpc_async<wait_at_gate>().wait();
      expect_error(ErrorKind::kInvalidArgument, "got -5",
                   [&] { static_cast<void>(session.to(1, {.timeout = -5ms})); });
      // What is left of a time that is over is not "never".
      expect_error(ErrorKind::kInvalidArgument, "timeout must be >= 0",
                   [&] { static_cast<void>(session.to(1, {.timeout = -500us})); });
      expect_error(ErrorKind::kInvalidArgument, "timeout must be >= 0",
                   [&] { session.barrier({}, -500us); });
      const auto value = session.remote<light>(1);
      expect_error(ErrorKind::kInvalidArgument, "timeout must be >= 0",
                   [&] { value.with({.timeout = -500us}).to_here(); });
      EXPECT_EQ((session.to(1, {.timeout = 120s}).rpc_sync<time_left>()), 120);
      session.set_timeout(60s);
    }
    session.shutdown();
  });
}

TEST(RpcTest, RaisedErrorsAreLoggedByTheCallee) {  // test_py_raise_in_user_func
  const LogLevel before = log_level();
  set_log_level(LogLevel::kInfo);
  convoy::test::StderrCapture log;
  run_workers(1, [](Session& session, int) {
    expect_error(ErrorKind::kRemote, "Expected error",
                 [&] { session.rpc_async<raise>(0, "Expected error").wait(); });
  });
  set_log_level(before);
  EXPECT_NE(log.text().find("std::invalid_argument: Expected error"), std::string::npos)
      << log.text();
}

TEST(RpcTest, RaisedErrorsKeepTheirText) {  // test_py_raise_in_user_func, ..._escaped_str
  run_workers(2, [](Session& session, int) {
    try {
      session.rpc_sync<raise>(next_of(session), "Expected error\nwith \"two\" lines");
      ADD_FAILURE();
    } catch (const RemoteError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kRemote);
      EXPECT_EQ(error.worker(), name_of(next_of(session)));
      EXPECT_EQ(error.remote_type(), "std::invalid_argument");
      EXPECT_NE(std::string(error.what()).find("Expected error\nwith \"two\" lines"),
                std::string::npos)
          << error.what();
    }
    EXPECT_EQ(session.rpc_sync<light>(next_of(session)), 0);  // it lives on
  });
}

TEST(RpcTest, WaitAllExitsEarly) {  // test_wait_all_exit_early_python, _builtin
  Gate& held = gate();
  held.open = 0;
  RankGroup(2, RankMode::kThreads).run([&](Rank& r) {
    auto options = options_of(r);
    options.operators = {"aten::add"};
    Session session(options);
    if (r.id() == 0) {
      std::vector<Future<void>> futures = {session.rpc_async<wait_at_gate>(1),
                                           session.rpc_async<raise>(1, "Expected error"),
                                           session.rpc_async<raise>(1, "Expected error")};
      expect_error(ErrorKind::kRemote, "Expected error", [&] { wait_all(futures); });
      const auto mismatch =
          session.rpc_async<at::Tensor>(1, op("aten::add"), torch::rand(10), torch::rand(5));
      futures = {futures[0], mismatch.then([](const at::Tensor&) {})};
      expect_error(ErrorKind::kRemote, "size of tensor", [&] { wait_all(futures); });
      EXPECT_FALSE(futures[0].done());
      held.let_go();
      futures[0].wait();
    }
    session.shutdown();
  });
}

TEST(RpcTest, FunctionNotOnCallee) {  // test_function_not_on_callee
  run_workers(2, [](Session& session, int) {
    expect_error(ErrorKind::kInvalidArgument, "secret",
                 [&] { session.rpc_sync<secret>(next_of(session)); });
    EXPECT_EQ(session.rpc_sync<light>(next_of(session)), 0);
    expect_error(ErrorKind::kInvalidArgument, "is not allowed", [&] {
      session.rpc_sync<detail::run_operator>(next_of(session), "aten::relu",
                                             std::vector<OperatorValue>{torch::ones({2})});
    });
  });
}

TEST(RpcTest, AnotherSignatureIsNamed) {
  run_workers(2, [](Session& session, int) {
    constexpr auto kInt = static_cast<int (*)(int)>(overloaded);
    constexpr auto kDouble = static_cast<double (*)(double)>(overloaded);
    EXPECT_EQ(session.rpc_sync<kInt>(next_of(session), 3), 3);
    expect_error(ErrorKind::kInvalidArgument, "int (int)",
                 [&] { session.rpc_sync<kDouble>(next_of(session), 3.0); });
    expect_error(ErrorKind::kInvalidArgument, "double (double)",
                 [&] { session.rpc_sync<kDouble>(next_of(session), 3.0); });
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

TEST(RpcTest, NonContiguousTensors) {  // test_non_cont_tensors
  run_workers(2, [](Session& session, int) {
    const auto view = torch::rand({5, 5}).narrow(1, 2, 2);
    EXPECT_FALSE(session.rpc_sync<is_contiguous>(next_of(session), view));
    const auto back = session.rpc_sync<echo>(next_of(session), view);
    EXPECT_FALSE(back.is_contiguous());
    EXPECT_TRUE(back.equal(view));
    EXPECT_TRUE(session.rpc_sync<is_contiguous>(next_of(session), view.contiguous()));
  });
}

TEST(RpcTest, Callbacks) {  // test_callback_chain, _multi, _with_ret, _with_error
  run_workers(2, [](Session& session, int) {
    const auto ones = torch::ones({2, 2});
    auto chain = session.rpc_async<my_add>(next_of(session), ones, ones);
    for (int i = 0; i < 20; ++i) chain = chain.then([](const at::Tensor& t) { return t + 1; });
    EXPECT_TRUE(equal(chain.wait(), 22));

    const auto sum = session.rpc_async<my_add>(next_of(session), ones, ones);
    std::vector<Future<at::Tensor>> many;
    for (int i = 0; i < 10; ++i) {
      many.push_back(sum.then([i](const Future<at::Tensor>& f) { return f.result() + i; }));
    }
    for (int i = 0; i < 10; ++i) {
      EXPECT_TRUE(equal(many[static_cast<std::size_t>(i)].wait(), 2 + i));
    }
    const auto failed =
        session.rpc_async<raise>(next_of(session), "Expected error").then([] { return 1; });
    expect_error(ErrorKind::kRemote, "Expected error", [&] { static_cast<void>(failed.wait()); });
    const auto seen = session.rpc_async<raise>(next_of(session), "Expected error")
                          .then([](const Future<void>& f) { return f.error() != nullptr; });
    EXPECT_TRUE(seen.wait());
    const auto another =
        session.rpc_async<raise>(next_of(session), "Expected error")
            .then([](const Future<void>& f) {
              expect_error(ErrorKind::kRemote, "Expected error", [&] { f.result(); });
              throw std::runtime_error("Another expected error");
            });
    EXPECT_THROW(another.wait(), std::runtime_error);
    const auto own = sum.then([](const at::Tensor&) -> int { throw std::logic_error("own"); });
    EXPECT_THROW(static_cast<void>(own.wait()), std::logic_error);
    const auto to = next_of(session);
    const auto flat = sum.then(
        [session, to](const at::Tensor& t) { return session.rpc_async<my_add>(to, t, t); });
    EXPECT_TRUE(equal(flat.wait(), 4));
  });
}

TEST(RpcTest, MarkFutureTwice) {  // test_mark_future_twice, test_future_done, _exception
  Promise<int> promise;
  const auto future = promise.future();
  EXPECT_FALSE(future.done());
  expect_error(ErrorKind::kInvalidArgument, "before the future was done", [&] { future.result(); });
  expect_error(ErrorKind::kTimeout, "", [&] { static_cast<void>(future.wait(1ms)); });
  promise.set_value(3);
  EXPECT_TRUE(future.done());
  EXPECT_EQ(future.wait(), 3);
  expect_error(ErrorKind::kInvalidArgument, "already", [&] { promise.set_value(4); });
  Promise<int> failing;
  const auto failed = failing.future();
  failing.set_error(std::make_exception_ptr(std::runtime_error("no")));
  EXPECT_TRUE(failed.done());
  EXPECT_NE(failed.error(), nullptr);
  Future<int> orphan;
  { orphan = Promise<int>().future(); }
  expect_error(ErrorKind::kCancelled, "", [&] { static_cast<void>(orphan.wait()); });
  Promise<int> given;
  Promise<int> taken(std::move(given));
  // NOLINTBEGIN(bugprone-use-after-move): what it is there for
  expect_error(ErrorKind::kInvalidArgument, "is empty", [&] { given.set_value(1); });
  expect_error(ErrorKind::kInvalidArgument, "is empty", [&] { given.set_error(nullptr); });
  EXPECT_FALSE(given.future());
  // NOLINTEND(bugprone-use-after-move)
  taken.set_value(1);
  EXPECT_EQ(taken.future().wait(), 1);
  run_workers(1, [](Session& session, int) {
    const auto called = session.rpc_async<light>(0);
    EXPECT_EQ(called.wait(), 0);
    EXPECT_TRUE(called.done());
    const auto raised = session.rpc_async<raise>(0, "Expected error");
    expect_error(ErrorKind::kRemote, "Expected error", [&] { raised.wait(); });
    EXPECT_TRUE(raised.done());
  });
}

// test_async_function_simple, _chained, _nested, _raise, _raise_async, _multi_chained,
// _multi_fanout
TEST(RpcTest, AsyncFunctions) {
  run_workers(3, [](Session& session, int rank) {
    const auto ones = torch::ones({2, 2});
    const int b = next_of(session);
    const auto c = name_of((rank + 2) % 3);
    EXPECT_TRUE(equal(session.rpc_sync<async_add>(b, c, ones, ones), 2));
    EXPECT_TRUE(equal(session.rpc_sync<async_chained>(b, c, ones), 4));
    EXPECT_TRUE(equal(session.rpc_sync<async_nested>(b, c, ones), 4));
    EXPECT_TRUE(equal(session.rpc_sync<async_chained_multi>(b, c, ones, 20, 3), 61));
    EXPECT_TRUE(equal(session.rpc_sync<async_fanout>(b, c, ones, 20, 3), 61));
    EXPECT_EQ(session.rpc_sync<async_function_of_callback>(b, rank),
              "convoy::rpc::test::async_function_of_callback");
    expect_error(ErrorKind::kRemote, "Expected error", [&] { session.rpc_sync<async_raise>(b); });
    expect_error(ErrorKind::kRemote, "Expected error",
                 [&] { static_cast<void>(session.rpc_async<async_raise>(b).wait()); });
    expect_error(ErrorKind::kRemote, "Expected error",
                 [&] { session.remote<async_raise>(b).to_here(); });
    EXPECT_TRUE(equal(session.remote<async_chained>(b, c, ones).to_here(), 4));
    EXPECT_TRUE(equal(session.remote<async_nested>(b, c, ones).to_here(), 4));
  });
}

TEST(RpcTest, Coroutines) {
  run_workers(3,
              [](Session& session, int rank) {
                const auto ones = torch::ones({2, 2});
                const auto c = name_of((rank + 2) % 3);
                EXPECT_TRUE(equal(session.rpc_sync<coroutine>(next_of(session), c, ones, 5), 6));
                EXPECT_TRUE(equal(session.rpc_sync<coroutine>(next_of(session), c, ones, 0), 1));
                expect_error(ErrorKind::kRemote, "from below",
                             [&] { session.rpc_sync<coroutine_raise>(next_of(session), c); });
              },
              {.threads = 1});
}

TEST(RpcTest, ManyCoroutinesOnOneThread) {
  run_workers(2,
              [](Session& session, int rank) {
                std::vector<Future<at::Tensor>> futures;
                for (int i = 0; i < 100; ++i) {
                  futures.push_back(session.rpc_async<coroutine>(next_of(session), name_of(rank),
                                                                 torch::ones({2, 2}), 3));
                }
                for (const auto& t : wait_all(futures)) EXPECT_TRUE(equal(t, 4));
              },
              {.threads = 1});
}

TEST(RpcTest, KindsOfFunctions) {
  run_workers(2, [](Session& session, int) {
    const int to = next_of(session);
    EXPECT_TRUE(equal(session.rpc_sync<scale>(to, torch::ones({2}), 3), 3));
    EXPECT_EQ(session.rpc_sync<Counter::twice>(to, 4), 8);
    EXPECT_EQ(session.rpc_sync<&Counter::plus>(to, Counter{5}, 4), 9);
  });
  std::set<std::string> exported;
  for (const auto& info : registered_functions()) {
    if (info.exported) exported.insert(info.name);
  }
  EXPECT_TRUE(exported.contains("convoy::rpc::test::scale"));
  EXPECT_TRUE(exported.contains("convoy::rpc::test::NetImpl::forward"));
  EXPECT_FALSE(exported.contains("convoy::rpc::test::secret"));
}

TEST(RpcTest, ValueSemantics) {
  run_workers(2, [](Session& session, int) {
    for (const std::int64_t n : {4, 1000, 1'000'000}) {
      const auto t = torch::zeros({n});
      session.rpc_sync<fill>(next_of(session), t, 7);
      EXPECT_TRUE(equal(t, 0));
      EXPECT_TRUE(session.rpc_sync<echo>(next_of(session), t + 1).add_(1).eq(2).all().item<bool>());
    }
  });
}

TEST(RpcTest, TensorsMayBeWrittenWhenAnAsyncCallWasMade) {
  torn = whole = 0;
  run_workers(2, [](Session& session, int rank) {
    if (rank != 0) return;
    const auto t = torch::zeros({300'000});
    std::vector<Future<void>> futures;
    for (int i = 0; i < 20; ++i) {
      futures.push_back(session.rpc_async<check_whole>(1, t));
      t.fill_(i);
    }
    wait_all(futures);
  });
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(whole, 20);
}

// A call that is given up while its tensor is under way: the function does not see what its caller
// writes there then.
TEST(RpcTest, NothingRunsWithTensorsOfCallsThatWereGivenUp) {
  torn = whole = 0;
  run_workers(2, [](Session& session, int rank) {
    if (rank != 0) return;
    const auto t = torch::zeros({4'000'000});
    for (int i = 1; i <= 30; ++i) {
      try {
        session.to(1, {.timeout = std::chrono::milliseconds(1 + i % 4)}).rpc_sync<check_whole>(t);
      } catch (const RemoteError& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kTimeout) << error.what();
      }
      t.fill_(i);
    }
  });
  EXPECT_EQ(torn, 0);
}

TEST(RpcTest, ResultsMayBeWrittenOnceTheyAreReturned) {
  weights().zero_();
  run_workers(2, [](Session& session, int rank) {
    if (rank != 0) return;
    for (int i = 0; i < 20; ++i) {
      const auto future = session.rpc_async<pull>(1);
      const auto& got = future.wait();
      EXPECT_TRUE(equal(got, i));
      weights().add_(1);  // in this process: what was got must not change
      EXPECT_TRUE(equal(got, i));
    }
  });
}

TEST(RpcTest, LongValues) {
  run_workers(2, [](Session& session, int) {
    const int to = next_of(session);
    for (const std::size_t n : {8000U, 8100U, 8128U, 8129U, 9000U, 1'000'000U}) {
      EXPECT_EQ(session.rpc_sync<same>(to, std::string(n, 'x')).size(), n);
    }
    const std::vector<at::Tensor> many(300, torch::rand({1000}));
    const auto back = session.rpc_sync<same_tensors>(to, many);
    ASSERT_EQ(back.size(), 300U);
    for (const auto& t : back) EXPECT_TRUE(t.equal(many[0]));
    const std::vector<at::Tensor> small(8, torch::rand({500}));
    EXPECT_TRUE(session.rpc_async<same_tensors>(to, small).wait()[7].equal(small[0]));
  });
}

TEST(RpcTest, LongestTimeouts) {
  using Most = std::chrono::milliseconds;
  Session session({.timeout = Most::max()});
  EXPECT_EQ(session.rpc_sync<light>(0), 0);
  EXPECT_EQ((session.to(0, {.timeout = Most::max()}).rpc_sync<light>()), 0);
  session.set_timeout(Most::max() - 1ms);
  EXPECT_EQ(session.rpc_sync<light>(0), 0);
  session.shutdown();
}

// A handler's promise outlives the session.
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

TEST(RpcTest, LimitsThrowIfAskedTo) {
  gate().open = 0;
  run_workers(2,
              [](Session& session, int rank) {
                if (rank != 0) return;
                std::vector<Future<void>> futures = {session.rpc_async<wait_at_gate>(1),
                                                     session.rpc_async<wait_at_gate>(1)};
                expect_error(ErrorKind::kResource, "worker1",
                             [&] { static_cast<void>(session.rpc_async<wait_at_gate>(1)); });
                gate().let_go();
                wait_all(futures);
                session.rpc_sync<wait_at_gate>(1);
              },
              {.most_calls = 2, .when_full = WhenFull::kThrow});
}

TEST(RpcTest, LentTensors) {
  run_workers(
      2,
      [](Session& session, int) {
        const auto shared = share::empty({100'000}).zero_();
        session.to(next_of(session), {.lend = true}).rpc_sync<fill>(shared, 7);
        EXPECT_TRUE(equal(shared, 7));
        session.rpc_sync<fill>(next_of(session), shared, 8);
        EXPECT_TRUE(equal(shared, 7));
      },
      {}, RankMode::kProcesses);
}

TEST(RpcTest, LentTensorsOfCallsThatFailComeBack) {
  Session session({.name = "me"});
  const auto before = share::usage();
  {
    const auto shared = share::empty({100'000}).zero_();
    EXPECT_EQ(share::usage().blocks, before.blocks + 1);
    for (int i = 0; i < 3; ++i) {
      expect_error(ErrorKind::kInvalidArgument, "secret_fill",
                   [&] { session.to("me", {.lend = true}).rpc_sync<secret_fill>(shared); });
    }
    session.to("me", {.lend = true}).rpc_sync<fill>(shared, 3);
    EXPECT_TRUE(equal(shared, 3));
  }
  EXPECT_EQ(share::usage().blocks, before.blocks);
  session.shutdown();
}

TEST(RpcTest, RequiresGradIsKept) {
  run_workers(2, [](Session& session, int) {
    const auto leaf = torch::ones({2}, torch::requires_grad());
    EXPECT_TRUE(session.rpc_sync<echo>(next_of(session), leaf).requires_grad());
    EXPECT_TRUE(session.rpc_sync<echo>(next_of(session), leaf * 2).requires_grad());
    EXPECT_FALSE(session.rpc_sync<echo>(next_of(session), leaf.detach()).requires_grad());
  });
}

TEST(RpcTest, HandlersBeginWithACleanThread) {
  run_workers(2,
              [](Session& session, int) {
                const torch::NoGradGuard no_gradients;  // of this thread only
                for (int i = 0; i < 5; ++i) {
                  EXPECT_TRUE(session.rpc_sync<grad_mode_then_off>(next_of(session)));
                }
              },
              {.threads = 1});
}

TEST(RpcTest, Operators) {
  run_workers(
      2,
      [](Session& session, int) {
        const int to = next_of(session);
        const auto ones = torch::ones({2, 2});
        EXPECT_TRUE(equal(session.rpc_sync<at::Tensor>(to, op("aten::add"), ones, ones), 2));
        EXPECT_TRUE(equal(session.rpc_sync<at::Tensor>(to, op("aten::add.Scalar"), ones, 2), 3));
        const auto [values, indices] = session.rpc_sync<std::tuple<at::Tensor, at::Tensor>>(
            to, op("aten::max"), torch::arange(6).view({2, 3}), 1);
        EXPECT_TRUE(equal(indices, 2));
        expect_error(ErrorKind::kInvalidArgument, "is not allowed", [&] {
          static_cast<void>(session.rpc_sync<at::Tensor>(to, op("aten::sub"), ones, ones));
        });
        expect_error(ErrorKind::kInvalidArgument, "fit none of its overloads", [&] {
          static_cast<void>(session.rpc_sync<at::Tensor>(to, op("aten::add"), "text"));
        });
      },
      {.operators = {"aten::add", "aten::max"}});
}

TEST(RpcTest, CancelledCalls) {
  seen_cancelled = waits_for_cancel = 0;
  RankGroup(2, RankMode::kThreads).run([&](Rank& r) {
    Session session(options_of(r));
    if (r.id() == 0) {
      const auto future = session.rpc_async<wait_for_cancel>(1);
      while (waits_for_cancel == 0 && !r.deadline().expired()) std::this_thread::yield();
      EXPECT_TRUE(future.cancel());
      EXPECT_FALSE(future.cancel());
      expect_error(ErrorKind::kCancelled, "", [&] { future.wait(); });
    }
    session.shutdown();
  });
  EXPECT_EQ(seen_cancelled, 1);
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
