// Options and helpers of DDP used together.
#include "convoy/join.h"
#include "convoy/optimizer_in_backward.h"
#include "ddp/support.h"

namespace convoy::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Uneven inputs with an optimizer in backward: joined ranks update in the same rounds, with the
// gradients of those that go on; the same models as with a separate step.
TEST(CombinationTest, JoinAndOptimizerInBackward) {
  for (const bool initial : {true, false}) {
    run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return Net(); });
      auto plain = seeded(1, [] { return Net(); });
      const JoinOptions options{.divide_by_initial_world_size = initial};
      const int inputs = 2 + 3 * r.id();
      {
        DistributedDataParallel model(net, world);
        OptimizerInBackward optimizer(model.reducer(), Sgd{.lr = 0.1, .momentum = 0.9});
        join(
            {&model},
            [&] {
              for (int i = 0; i < inputs; ++i) {
                net->zero_grad();
                model(input_of(r.id(), i)).pow(2).mean().backward();
              }
            },
            options);
      }
      DistributedDataParallel model(plain, world);
      torch::optim::SGD sgd(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      join(
          {&model},
          [&] {
            for (int i = 0; i < inputs; ++i) {
              sgd.zero_grad();
              model(input_of(r.id(), i)).pow(2).mean().backward();
              sgd.step();
            }
          },
          options);
      const auto actual = net->parameters(), expected = plain->parameters();
      for (std::size_t i = 0; i < actual.size(); ++i) expect_close(actual[i], expected[i]);
      expect_equal_on_all(world, net->parameters());
    });
  }
}

// Replicas are compared in full precision, where they are kept.
TEST(CombinationTest, ReplicaCheckAndMixedPrecision) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    DistributedDataParallel model(
        net, world,
        {.check_replicas_every = 1,
         .mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
    torch::optim::SGD sgd(net->parameters(), 0.1);
    const auto step = [&](int i) {
      sgd.zero_grad();
      model(input_of(r.id(), i)).to(at::kFloat).pow(2).mean().backward();
      sgd.step();
    };
    for (int i = 0; i < 3; ++i) step(i);
    if (r.id() == 2) {
      const at::NoGradGuard no_grad;
      net->fc2->weight[0][0] += 1e-5;  // less than bf16 tells apart
    }
    EXPECT_THAT(text_of([&] { step(3); }),
                AllOf(HasSubstr("parameter fc2.weight"), HasSubstr("rank 2 ")));
    broadcast_coalesced(world, net->parameters());
    for (int i = 4; i < 6; ++i) step(i);
    expect_equal_on_all(world, net->parameters());
  });
}

// test_ddp_remove_autograd_hooks: after a backward that failed the wrapper is dropped, which leaves
// no hooks behind; the module works alone, and wrapped again.
TEST(CombinationTest, WrappedAgainAfterAFailure) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    auto local = seeded(1, [] { return Net(); });
    {
      DistributedDataParallel model(net, world);
      auto y = model(input_of(r.id(), 0));
      y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no more"); });
      EXPECT_THAT(text_of([&] { y.sum().backward(); }), HasSubstr("no more"));
    }
    net->zero_grad();
    net->forward(input_of(r.id(), 1)).pow(2).mean().backward();
    local->forward(input_of(r.id(), 1)).pow(2).mean().backward();
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      expect_equal(net->parameters()[i].grad(), local->parameters()[i].grad());
    }
    net->zero_grad();
    DistributedDataParallel model(net, world);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    for (int i = 0; i < 4; ++i) {
      sgd.zero_grad();
      model(input_of(r.id(), i)).pow(2).mean().backward();
      sgd.step();
    }
    expect_equal_on_all(world, net->parameters());
  });
}

}  // namespace
}  // namespace convoy::test
