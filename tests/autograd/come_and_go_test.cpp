// Contexts of sessions whose workers come and go.
#include <optional>
#include <string>
#include <thread>

#include "convoy/distributed_optimizer.h"
#include "support.h"

namespace convoy::autograd::come_and_go_test {

using namespace test;
using namespace std::chrono_literals;

at::Tensor square_by(const std::string& worker, const at::Tensor& x) {
  return rpc::current().session().rpc_sync<test::square>(worker, x * 1) * 1;
}
CONVOY_RPC(square_by);
at::Tensor make_weight() { return leaf(2); }
CONVOY_RPC(make_weight);
at::Tensor weigh(const rpc::RRef<at::Tensor>& weight, const at::Tensor& x) {
  return weight.local_value() * x;
}
CONVOY_RPC(weigh);
ContextId context_of_own() {
  const auto session = rpc::current().session();
  ContextId id = 0;
  std::thread([&] {
    const Context context(session);
    id = context.id();
  }).join();
  return id;
}
CONVOY_RPC(context_of_own);

namespace {

Session join(const Rank& r, const std::string& name) {
  return Session({.name = name, .store = r.store(), .members = rpc::Members::kComeAndGo});
}

// One joins in the middle of a context, and takes part.
TEST(AutogradComeAndGoTest, AWorkerJoins) {
  RankGroup(1, RankMode::kThreads).run([](Rank& r) {
    const Session a = join(r, "a"), b = join(r, "b");
    const auto x = random_leaf();
    for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
      std::optional<Session> c;
      {
        const Context context(a);
        const auto y = a.rpc_sync<test::square>("b", x);
        c = join(r, "c");
        a.wait_for("c");
        b.wait_for("c");
        const auto z = a.rpc_sync<square_by>("b", "c", y);
        const auto weight = a.remote<make_weight>("c");
        const auto loss = a.rpc_sync<weigh>("c", weight, z).sum();
        const DistributedOptimizer optimizer(a, {weight}, Sgd{.lr = 1});
        context.backward({loss}, {.mode = mode});
        expect_close(context.gradients().at(x), 8 * x.detach().pow(3));
        optimizer.step(context);
        expect_close(weight.to_here().detach(), 2 - x.detach().pow(4));
      }
      c->shutdown();
    }
    b.shutdown();
    a.shutdown();
    EXPECT_EQ(stats(a).contexts, 0U);
  });
}

// One leaves, and another one comes by its name: what the first had sent is not the second's.
TEST(AutogradComeAndGoTest, AWorkerLeavesAndComesBack) {
  RankGroup(1, RankMode::kThreads).run([](Rank& r) {
    const Session a = join(r, "a");
    for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
      std::optional<Session> b = join(r, "b");
      a.wait_for("b");
      const ContextId before = a.rpc_sync<context_of_own>("b");
      const auto x = random_leaf();
      const Context context(a);
      const auto old = a.rpc_sync<test::square>("b", x).sum();
      context.backward({old}, {.mode = mode, .retain_graph = true});
      b->shutdown();
      b = join(r, "b");
      while (!r.deadline().expired() &&
             a.worker_info("b").rank == static_cast<int>(before >> 48U)) {
      }
      const auto fails = [&] {
        try {
          context.backward({old}, {.mode = mode, .retain_graph = true, .timeout = 20s});
          ADD_FAILURE() << "it did not fail";
        } catch (const rpc::RemoteError& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
          EXPECT_EQ(error.worker(), "b") << error.what();
        }
      };
      fails();
      EXPECT_NE(a.rpc_sync<context_of_own>("b") >> 48U, before >> 48U);
      const auto fresh = a.rpc_sync<test::square>("b", x).sum();
      fails();
      // Only SMART can leave the old one's messages out.
      context.backward({fresh}, {.timeout = 20s});
      expect_close(context.gradients().at(x), 4 * x);
      b->shutdown();
    }
    a.shutdown();
  });
}

}  // namespace
}  // namespace convoy::autograd::come_and_go_test
