// Modules of other workers, and references that modules take and return.
#include <torch/torch.h>

#include <utility>
#include <vector>

#include "convoy/ddp.h"
#include "convoy/init.h"
#include "convoy/remote_module.h"
#include "convoy/rpc.h"
#include "convoy/rref.h"
#include "rpc/rref_functions.h"
#include "rpc/workers.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::rpc::test {

using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using namespace std::chrono_literals;

struct TwoImpl : torch::nn::Module {
  TwoImpl(int in, int out) : linear(register_module("linear", torch::nn::Linear(in, out))) {
    counter = register_buffer("counter", torch::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    counter += 1;
    return is_training() ? linear->forward(x) : torch::zeros({1});
  }
  torch::nn::Linear linear;
  at::Tensor counter;
};
TORCH_MODULE(Two);
CONVOY_REMOTE_MODULE(Two, int, int);

void update_parameter(const RRef<at::Tensor>& parameter, double by) {
  const torch::NoGradGuard no_gradients;
  parameter.local_value().fill_(by);
}
CONVOY_RPC(update_parameter);

namespace {

TEST(RRefTest, RemoteModules) {
  run_workers(2, [](Session& rpc, int rank) {
    torch::manual_seed(1);
    const RemoteModule<Two> net(rpc, 1 - rank, 3, 2);
    const auto x = torch::rand({4, 3});
    auto state = net.state();
    EXPECT_EQ(state.size(), 3u);
    EXPECT_EQ(state.at("counter").item<double>(), 0);
    Two here(3, 2);
    const torch::NoGradGuard no_gradients;
    here->linear->weight.copy_(state.at("linear.weight"));
    here->linear->bias.copy_(state.at("linear.bias"));
    EXPECT_TRUE(torch::equal(net.forward(x), here->forward(x)));
    EXPECT_TRUE(torch::equal(net.forward_async(x).wait(), here->forward(x)));
    EXPECT_TRUE(torch::equal(net(x), here->forward(x)));

    const auto parameters = net.named_parameters();
    // In the module's order.
    const auto in_order = net.parameters();
    ASSERT_EQ(in_order.size(), 2u);
    EXPECT_TRUE(torch::equal(in_order[0].to_here(), state.at("linear.weight")));
    EXPECT_TRUE(torch::equal(in_order[1].to_here(), state.at("linear.bias")));
    rpc.rpc_sync<update_parameter>(1 - rank, parameters.at("linear.weight"), 0.5);
    EXPECT_TRUE(torch::equal(net.state().at("linear.weight"), torch::full({2, 3}, 0.5)));

    net.eval();
    EXPECT_TRUE(torch::equal(net.forward(x), torch::zeros({1})));
    net.train();
    net.load_state(state);
    EXPECT_TRUE(torch::equal(net.forward(x), here->forward(x)));
    state.erase("counter");
    expect_error(ErrorKind::kRemote, "counter", [&] { net.load_state(state); });
    EXPECT_EQ(net.reference().owner().rank, 1 - rank);
  });
}

struct RefNetImpl : torch::nn::Module {
  explicit RefNetImpl(Session session)
      : weight(register_parameter("weight", torch::ones({2}))), rpc(std::move(session)) {}
  RRef<at::Tensor> forward(const RRef<at::Tensor>& x) { return rpc.rref(x.local_value() * weight); }
  at::Tensor weight;
  Session rpc;
};
TORCH_MODULE(RefNet);

// _tree_flatten_with_rref: gradients of what comes back in a reference are averaged.
TEST(RRefTest, InAModuleOfDistributedDataParallel) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    Session rpc({.rank = r.id(), .size = 2, .store = r.store()});
    const auto world = new_group(
        "convoy", {.timeout = 30s, .store = r.store(), .rank = r.id(), .size = 2, .name = "world"});
    {
      RefNet net(rpc);
      DistributedDataParallel ddp(net, world);
      for (int step = 0; step < 2; ++step) {
        net->weight.mutable_grad() = at::Tensor();
        const auto out = ddp.forward(rpc.rref(torch::full({2}, 1.0 + r.id())));
        EXPECT_TRUE(out.is_owner());
        out.local_value().sum().backward();
        EXPECT_TRUE(torch::equal(net->weight.grad(), torch::full({2}, 1.5)));
      }
    }
    rpc.shutdown();
  });
}

// What a module of DistributedDataParallel's may return: _tree_flatten_with_rref.
static_assert(!convoy::detail::kOwnsItsTensors<RRef<at::Tensor>>);

TEST(RRefTest, TensorsInReferences) {
  run_workers(2, [](Session& rpc, int rank) {
    std::vector<RRef<at::Tensor>> both = {
        rpc.rref(torch::ones({2})),
        rpc.remote<rref_add>(1 - rank, torch::ones({2}), torch::ones({2}))};
    EXPECT_EQ(tensors_in(both), (std::vector<at::Tensor*>{&both[0].local_value()}));
  });
}

}  // namespace
}  // namespace convoy::rpc::test
