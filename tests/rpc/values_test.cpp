// What calls do with their arguments and results. The scenarios of PyTorch's rpc_test.py have its
// names behind them.
#include <torch/torch.h>

#include <atomic>
#include <string>
#include <vector>

#include "convoy/rpc.h"
#include "convoy/share.h"
#include "rpc/session_functions.h"
#include "rpc/workers.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::rpc::test {

using convoy::test::expect_error;
using convoy::test::RankMode;

at::Tensor echo(const at::Tensor& t) { return t; }
CONVOY_RPC(echo);

bool is_contiguous(const at::Tensor& t) { return t.is_contiguous(); }
CONVOY_RPC(is_contiguous);

void fill(const at::Tensor& t, double value) {
  const torch::NoGradGuard no_gradients;
  t.fill_(value);
}
CONVOY_RPC(fill);

// Not exported.
void secret_fill(const at::Tensor& t) { t.fill_(1); }

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

namespace {

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

}  // namespace
}  // namespace convoy::rpc::test
