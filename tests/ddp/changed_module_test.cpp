// Modules that get other parameters after they were wrapped.
#include <chrono>

#include "base/error.h"
#include "convoy/sync_batch_norm.h"
#include "ddp/support.h"

namespace convoy::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using torch::nn::Linear;

// Parts can be added, replaced and taken away.
struct ChangingImpl : torch::nn::Module {
  ChangingImpl() : body(register_module("body", Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (in_forward) std::exchange(in_forward, nullptr)();
    at::Tensor y = body(x);
    if (head) y = head(y);
    return y.sum();
  }
  Linear body;
  Linear head{nullptr};
  std::function<void()> in_forward;
};

std::shared_ptr<ChangingImpl> changing() {
  return seeded(1, [] { return std::make_shared<ChangingImpl>(); });
}

const at::Tensor kInput = at::ones({3, 2});

// Issue 23, 5: these trained without being synchronised; without find_unused_parameters the error
// said to set it.
TEST(ChangedModuleTest, AddedParameters) {
  for (const bool find_unused : {false, true}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = changing();
      DistributedDataParallel model(net, world, {.find_unused_parameters = find_unused});
      model(kInput).backward();
      net->zero_grad();
      net->head = net->register_module("head", Linear(2, 2));
      for (int i = 0; i < 2; ++i) {
        EXPECT_THAT(text_of([&] { model(kInput).backward(); }),
                    AllOf(HasSubstr("group \"world\""), HasSubstr(concat("rank ", r.id(), " of 2")),
                          HasSubstr("head.weight"), HasSubstr("head.bias"), Not(HasSubstr("body")),
                          HasSubstr("wrap"), Not(HasSubstr("find_unused_parameters"))));
      }
      EXPECT_THAT(text_of([&] { model.sync_gradients(); }), HasSubstr("head.weight"));
      {
        const at::NoGradGuard no_grad;
        EXPECT_EQ(model(kInput).numel(), 1);  // evaluation needs nobody else
      }
      // Wrapped again, it trains.
      DistributedDataParallel again(net, world, {.find_unused_parameters = find_unused});
      again(kInput * (r.id() + 1)).backward();
      expect_equal_on_all(world, gradients_of(*net));
    });
  }
}

TEST(ChangedModuleTest, ReplacedParts) {
  for (const bool find_unused : {false, true}) {
    run_ranks(2, [&](Rank&, const ProcessGroup& world) {
      auto net = changing();
      DistributedDataParallel model(net, world, {.find_unused_parameters = find_unused});
      model(kInput).backward();
      net->body = net->replace_module("body", Linear(2, 2));
      EXPECT_THAT(text_of([&] { model(kInput).backward(); }),
                  AllOf(HasSubstr("body.weight"), HasSubstr("body.bias"), HasSubstr("replaced"),
                        Not(HasSubstr("find_unused_parameters"))));
    });
  }
}

// What is not there any more does no harm, and may come back.
TEST(ChangedModuleTest, RemovedParts) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = changing();
    net->head = net->register_module("head", Linear(2, 2));
    DistributedDataParallel model(net, world, {.find_unused_parameters = true});
    const auto step = [&] {
      net->zero_grad();
      model(kInput * (r.id() + 1)).backward();
      expect_equal_on_all(world, {net->body->weight.grad()});
    };
    step();
    const Linear head = std::exchange(net->head, nullptr);
    net->unregister_module("head");
    step();
    net->head = net->register_module("again", head);
    step();
    expect_equal_on_all(world, {head->weight.grad()});
    net->replace_module("again", Linear(2, 2));
    EXPECT_THAT(text_of(step), AllOf(HasSubstr("added again.weight, again.bias"),
                                     HasSubstr("removed head.weight, head.bias")));
  });
}

// Parameters that a forward makes: its own backward would not reduce them.
TEST(ChangedModuleTest, AddedInForward) {
  run_ranks(2, [](Rank&, const ProcessGroup& world) {
    auto net = changing();
    DistributedDataParallel model(net, world, {.find_unused_parameters = true});
    net->in_forward = [&] { net->head = net->register_module("head", Linear(2, 2)); };
    EXPECT_THAT(text_of([&] { model(kInput).backward(); }), HasSubstr("head.weight"));
  });
}

// What does not change which tensors are trained is no error: the same ones elsewhere or under
// another name, other data, parameters that are ignored.
TEST(ChangedModuleTest, WhatMayChange) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = std::make_shared<torch::nn::SequentialImpl>(Linear(2, 3), torch::nn::BatchNorm1d(3),
                                                           Linear(3, 2));
    const std::shared_ptr<torch::nn::Module> base = net;
    net->register_module("own", Linear(2, 2));
    DistributedDataParallel model(net, world, {.ignore = {"own.weight", "own.bias"}});
    const auto step = [&] {
      net->zero_grad();
      model(input_of(r.id(), 1, {4, 2})).pow(2).sum().backward();
      expect_equal_on_all(world, {(*net)[0]->parameters()[0].grad()});
    };
    step();
    EXPECT_EQ(nn::convert_sync_batchnorm(*net, world), 1U);  // the same tensors in another module
    step();
    (*net)[0]->parameters()[0].requires_grad_(false);
    (*net)[0]->parameters()[0].requires_grad_(true);
    (*net)[0]->to(at::kFloat);
    std::stringstream file;
    torch::save(base, file);
    torch::load(*std::make_unique<std::shared_ptr<torch::nn::Module>>(base), file);
    step();
    net->replace_module("own", Linear(2, 2));
    step();
  });
}

// Parameters of experts are wrapped, too.
TEST(ChangedModuleTest, ParameterGroups) {
  run_ranks(2, [](Rank&, const ProcessGroup& world) {
    auto net = changing();
    net->head = net->register_module("head", Linear(2, 2));
    const auto experts = world.split({0, 1}, {.name = "experts"}).value();
    DistributedDataParallel model(net, world,
                                  {.parameter_groups = {{{"head.weight", "head.bias"}, experts}}});
    model(kInput).backward();
    model(kInput).backward();
    expect_equal_on_all(world, gradients_of(*net));
    net->head = net->replace_module("head", Linear(2, 2));
    EXPECT_THAT(text_of([&] { model(kInput).backward(); }), HasSubstr("head.weight"));
  });
}

// The check is in every forward. 1000 parameters in 500 modules; the limit is generous, the figure
// is in docs/reference/ddp.md.
TEST(ChangedModuleTest, CostsNearlyNothing) {
  run_ranks(1, [](Rank&, const ProcessGroup& world) {
    struct ManyImpl : torch::nn::Module {
      ManyImpl() {
        for (int i = 0; i < 500; ++i) register_module(concat("part", i), Linear(1, 1));
      }
      at::Tensor forward(const at::Tensor& x) { return x; }
    };
    auto net = std::make_shared<ManyImpl>();
    DistributedDataParallel model(net, world);
    const at::Tensor x = at::ones({1});
    const auto time_of = [](const auto& function) {
      auto best = std::chrono::nanoseconds::max();
      for (int i = 0; i < 200; ++i) {
        const auto start = std::chrono::steady_clock::now();
        function();
        best = std::min<std::chrono::nanoseconds>(best, std::chrono::steady_clock::now() - start);
      }
      return std::chrono::duration<double, std::micro>(best).count();
    };
    const double forward = time_of([&] { model(x); });
    RecordProperty("forward_us", std::to_string(forward));
    std::printf("a forward over 1000 parameters: %.1f us\n", forward);
    EXPECT_LT(forward, 2000);
  });
}

}  // namespace
}  // namespace convoy::test
