// Futures, promises and functions that return them. The scenarios of PyTorch's rpc_test.py have its
// names behind them.
#include <torch/torch.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "convoy/rpc.h"
#include "convoy/rref.h"
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

namespace {

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

}  // namespace
}  // namespace convoy::rpc::test
