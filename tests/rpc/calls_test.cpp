// Typed calls between workers: what can be called, errors, time and limits. The scenarios of
// PyTorch's rpc_test.py have its names behind them.
#include <torch/torch.h>

#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/log.h"
#include "convoy/rpc.h"
#include "convoy/rref.h"
#include "rpc/session_functions.h"
#include "rpc/workers.h"
#include "support/capture.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::rpc::test {

using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using namespace std::chrono_literals;

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

// One of two is.
int overloaded(int n) { return n; }
double overloaded(double x) { return x; }
CONVOY_RPC(static_cast<int (*)(int)>(overloaded));

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

namespace {

TEST(RpcTest, MultiRpc) {  // test_multi_rpc
  run_workers(2, [](Session& session, int) {
    const auto ones = torch::ones({2, 2});
    for (int i = 0; i < 20; ++i) {
      EXPECT_TRUE(equal(session.rpc_sync<my_add>(next_of(session), ones, ones), 2));
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

TEST(RpcTest, LongestTimeouts) {
  using Most = std::chrono::milliseconds;
  Session session({.timeout = Most::max()});
  EXPECT_EQ(session.rpc_sync<light>(0), 0);
  EXPECT_EQ((session.to(0, {.timeout = Most::max()}).rpc_sync<light>()), 0);
  session.set_timeout(Most::max() - 1ms);
  EXPECT_EQ(session.rpc_sync<light>(0), 0);
  session.shutdown();
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

}  // namespace
}  // namespace convoy::rpc::test
