// OptimizerInBackward: scenario 61 of ../shared/reference/ddp.md, and beside separate steps of
// libtorch's optimizers and of our own kernels.
#include <cmath>
#include <sstream>

#include "convoy/optimizer_in_backward.h"
#include "ddp/support.h"
#include "optim/optimizer_kernels.h"
#include "support/expect_error.h"

namespace convoy::test {
namespace {

using testing::HasSubstr;
using torch::nn::Linear;

using Steps = std::function<void()>;
struct Case {
  std::string name;
  OptimizerRule rule;
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)> make;
};

template <class Optimizer, class Options>
auto maker(const Options& options) {
  return [options](std::vector<at::Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

std::vector<Case> cases() {
  using namespace torch::optim;
  return {{"SGD", Sgd{.lr = 0.03}, maker<SGD>(SGDOptions(0.03))},
          {"SGD with momentum, dampening and decay",
           Sgd{.lr = 0.03, .momentum = 0.9, .dampening = 0.2, .weight_decay = 0.01},
           maker<SGD>(SGDOptions(0.03).momentum(0.9).dampening(0.2).weight_decay(0.01))},
          {"Nesterov", Sgd{.lr = 0.03, .momentum = 0.9, .nesterov = true},
           maker<SGD>(SGDOptions(0.03).momentum(0.9).nesterov(true))},
          {"Adam", Adam{.lr = 0.03}, maker<torch::optim::Adam>(AdamOptions(0.03))},
          {"Adam with decay and amsgrad", Adam{.lr = 0.03, .weight_decay = 0.1, .amsgrad = true},
           maker<torch::optim::Adam>(AdamOptions(0.03).weight_decay(0.1).amsgrad(true))},
          {"AdamW", convoy::AdamW{.lr = 0.03, .beta1 = 0.8, .beta2 = 0.99, .weight_decay = 0.1},
           maker<torch::optim::AdamW>(
               AdamWOptions(0.03).betas(std::make_tuple(0.8, 0.99)).weight_decay(0.1))},
          {"AdamW with amsgrad", convoy::AdamW{.lr = 0.03, .amsgrad = true},
           maker<torch::optim::AdamW>(AdamWOptions(0.03).amsgrad(true))}};
}

torch::nn::Sequential make_sequential() {
  return seeded(21, [] {
    return torch::nn::Sequential(Linear(6, 20), torch::nn::Tanh(), Linear(20, 10),
                                 torch::nn::Tanh(), Linear(10, 3));
  });
}

void expect_same_parameters(const torch::nn::Module& actual, const torch::nn::Module& expected,
                            double tolerance = 1e-6) {
  const auto a = actual.parameters(), e = expected.parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::allclose(a[i], e[i], tolerance, tolerance))
        << i << ": off by " << (a[i] - e[i]).abs().max();
  }
}

// test_ddp_apply_optim_in_backward: eight steps are those of an optimizer of libtorch's, and
// gradients are undefined afterwards.
TEST(OptimizerInBackwardTest, EqualsASeparateStep) {
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.name);
    for (const Mode& mode : modes()) {
      SCOPED_TRACE(mode.name);
      run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
        auto fused = make_sequential(), separate = make_sequential();
        DistributedDataParallel model(fused, world, mode.options), plain(separate, world);
        const OptimizerInBackward optimizer(model.reducer(), one.rule);
        const auto reference = one.make(separate->parameters());
        for (int step = 0; step < 8; ++step) {
          const auto x = input_of(r.id(), step, {4, 6});
          model(x).pow(2).mean().backward();
          reference->zero_grad();
          plain(x).pow(2).mean().backward();
          reference->step();
          expect_same_parameters(*fused, *separate);
          for (const auto& p : fused->parameters()) EXPECT_FALSE(p.grad().defined());
        }
        EXPECT_EQ(optimizer.stats().steps, 8U);
        expect_equal_on_all(world, fused->parameters());
      });
    }
  }
}

// To the bit, if the gradients of a plain backward go through the same kernel.
TEST(OptimizerInBackwardTest, EqualsItsKernelToTheBit) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    auto fused = make_sequential(), separate = make_sequential();
    DistributedDataParallel model(fused, world, {.bucket_cap_mb = 0.001}), plain(separate, world);
    const OptimizerInBackward optimizer(model.reducer(), convoy::AdamW{.lr = 0.03});
    std::vector<at::Tensor> means, squares;
    for (const auto& p : separate->parameters()) {
      means.push_back(at::zeros_like(p));
      squares.push_back(at::zeros_like(p));
    }
    for (int step = 0; step < 4; ++step) {
      const auto x = input_of(r.id(), step, {4, 6});
      model(x).pow(2).mean().backward();
      separate->zero_grad();
      plain(x).pow(2).mean().backward();
      const auto parameters = separate->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const AdamStep rule{.lr = 0.03, .weight_decay = 1e-2, .number = step + 1};
        const RuleMemory<float> memory{
            parameters[i].data_ptr<float>(),
            parameters[i].grad().data_ptr<float>(),
            {means[i].data_ptr<float>(), squares[i].data_ptr<float>(), nullptr}};
        rule_step(rule, memory, static_cast<std::size_t>(parameters[i].numel()));
      }
      const auto mine = fused->parameters();
      for (std::size_t i = 0; i < mine.size(); ++i) expect_equal(mine[i], parameters[i]);
    }
  });
}

// Clipping by the norm of all gradients: the one of libtorch's utilities between backward and step.
TEST(OptimizerInBackwardTest, ClipsByTheGlobalNorm) {
  for (const double type : {2.0, double(INFINITY)}) {
    for (const bool keep : {false, true}) {
      run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
        auto fused = make_sequential(), separate = make_sequential();
        DistributedDataParallel model(fused, world, {.bucket_cap_mb = 0.001}),
            plain(separate, world);
        const OptimizerInBackward optimizer(
            model.reducer(), Sgd{.lr = 0.1, .momentum = 0.9},
            {.max_norm = 0.05, .norm_type = type, .keep_gradients = keep});
        torch::optim::SGD reference(separate->parameters(),
                                    torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 6; ++step) {
          const auto x = input_of(r.id(), step, {4, 6}) * (step % 2 == 0 ? 1 : 1e-3);
          if (keep) fused->zero_grad();
          model(x).pow(2).mean().backward();
          reference.zero_grad();
          plain(x).pow(2).mean().backward();
          const double norm = torch::nn::utils::clip_grad_norm_(separate->parameters(), 0.05, type);
          reference.step();
          EXPECT_NEAR(optimizer.stats().norm, norm, 1e-5 * norm);
          expect_same_parameters(*fused, *separate);
          if (keep) {
            const auto a = gradients_of(*fused), e = gradients_of(*separate);
            for (std::size_t i = 0; i < a.size(); ++i) expect_close(a[i], e[i]);
          }
        }
        expect_equal_on_all(world, fused->parameters());
      });
    }
  }
}

TEST(OptimizerInBackwardTest, StepsThatAreNoNumbersCanBeSkipped) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_sequential();
    DistributedDataParallel model(net, world);
    const OptimizerInBackward optimizer(model.reducer(), convoy::AdamW{}, {.skip_nonfinite = true});
    std::vector<at::Tensor> before;
    for (const auto& p : net->parameters()) before.push_back(p.detach().clone());
    const double bad = r.id() == 1 ? INFINITY : 1;
    (model(input_of(r.id(), 0, {4, 6})) * bad).sum().backward();
    const auto after = net->parameters();
    for (std::size_t i = 0; i < after.size(); ++i) {
      expect_equal(after[i], before[i]);
      EXPECT_FALSE(after[i].grad().defined());
    }
    EXPECT_EQ(optimizer.stats().skipped, 1U);
    EXPECT_EQ(optimizer.stats().steps, 0U);
    model(input_of(r.id(), 1, {4, 6})).sum().backward();
    EXPECT_EQ(optimizer.stats().steps, 1U);
    EXPECT_FALSE(at::equal(after[0], before[0]));
  });
}

// Micro-batches inside of no_sync only add up.
TEST(OptimizerInBackwardTest, Accumulation) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto fused = make_sequential(), separate = make_sequential();
    DistributedDataParallel model(fused, world), plain(separate, world);
    const OptimizerInBackward optimizer(model.reducer(), Sgd{.lr = 0.1, .momentum = 0.9});
    torch::optim::SGD reference(separate->parameters(),
                                torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 6; ++step) {
      reference.zero_grad();
      for (int micro = 0; micro < 3; ++micro) {
        const auto x = input_of(r.id(), 3 * step + micro, {4, 6});
        const auto both = [&] {
          model(x).pow(2).mean().backward();
          plain(x).pow(2).mean().backward();
        };
        if (micro < 2) {
          const auto a = model.no_sync(), b = plain.no_sync();
          both();
        } else {
          both();
        }
      }
      reference.step();
      expect_same_parameters(*fused, *separate);
    }
    EXPECT_EQ(optimizer.stats().steps, 6U);
  });
}

// What nobody uses keeps value and state, what one rank uses is updated everywhere.
TEST(OptimizerInBackwardTest, UnusedParameters) {
  struct TwoImpl : torch::nn::Module {
    TwoImpl()
        : a(register_module("a", Linear(3, 3))),
          b(register_module("b", Linear(3, 3))),
          c(register_module("c", Linear(3, 3))) {}
    at::Tensor forward(const at::Tensor& x, bool use_b, bool use_c) {
      auto y = a(x);
      if (use_b) y = y + b(x);
      if (use_c) y = y + c(x);
      return y;
    }
    Linear a, b, c;
  };
  for (const bool skip : {false, true}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      const auto make = [] { return seeded(4, [] { return std::make_shared<TwoImpl>(); }); };
      const auto fused = make(), separate = make();
      const DdpOptions options{.bucket_cap_mb = 0.00001,
                               .find_unused_parameters = true,
                               .skip_all_reduce_unused_params = skip};
      DistributedDataParallel model(fused, world, options), plain(separate, world, options);
      const OptimizerInBackward optimizer(model.reducer(), convoy::AdamW{.lr = 0.05});
      torch::optim::AdamW reference(separate->parameters(), torch::optim::AdamWOptions(0.05));
      for (int step = 0; step < 6; ++step) {
        const auto x = input_of(r.id(), step, {4, 3});
        const bool use_b = r.id() == 0 && !skip, use_c = step % 2 == 0;
        const auto untouched = fused->c->weight.detach().clone();
        model(x, use_b, use_c).pow(2).mean().backward();
        reference.zero_grad();
        plain(x, use_b, use_c).pow(2).mean().backward();
        reference.step();
        expect_same_parameters(*fused, *separate);
        if (!use_c) expect_equal(fused->c->weight, untouched);
      }
    });
  }
}

// Groups with rules of their own; parameters in no group keep their gradients; several optimizers.
TEST(OptimizerInBackwardTest, Groups) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto fused = make_sequential(), separate = make_sequential();
    DistributedDataParallel model(fused, world, {.bucket_cap_mb = 0.0001}), plain(separate, world);
    const auto p = fused->parameters(), q = separate->parameters();  // three pairs
    OptimizerInBackward two(model.reducer(), {{{p[0]}, Sgd{.lr = 0.1}}, {{p[1]}, Sgd{.lr = 0.2}}});
    const OptimizerInBackward third(model.reducer(), {{{p[2], p[3]}, Adam{.lr = 0.01}}});
    torch::optim::SGD a({q[0]}, 0.1), b({q[1]}, 0.2), rest({p[4], p[5]}, 0.3), d({q[4], q[5]}, 0.3);
    torch::optim::Adam c({q[2], q[3]}, torch::optim::AdamOptions(0.01));
    for (int step = 0; step < 6; ++step) {
      const auto x = input_of(r.id(), step, {4, 6});
      if (step == 3) {  // a schedule
        two.set_rule(0, Sgd{.lr = 0.01});
        a.param_groups()[0].options().set_lr(0.01);
      }
      rest.zero_grad();
      model(x).pow(2).mean().backward();
      rest.step();
      separate->zero_grad();
      plain(x).pow(2).mean().backward();
      for (torch::optim::Optimizer* one :
           std::initializer_list<torch::optim::Optimizer*>{&a, &b, &c, &d}) {
        one->step();
      }
      expect_same_parameters(*fused, *separate);
      EXPECT_FALSE(p[0].grad().defined());
      EXPECT_TRUE(p[4].grad().defined());
    }
    two.set_lr(0);
    EXPECT_EQ(std::get<Sgd>(two.rule(1)).lr, 0);
    const auto before = p[0].detach().clone();
    model(input_of(r.id(), 9, {4, 6})).sum().backward();
    expect_equal(p[0], before);
  });
}

// Strides, holes, doubles and complex numbers.
TEST(OptimizerInBackwardTest, LayoutsAndTypes) {
  struct LayoutsImpl : torch::nn::Module {
    LayoutsImpl() {
      conv = register_parameter("conv",
                                random(1, {2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast));
      holes = register_parameter("holes", random(2, {4, 6}).slice(1, 0, 6, 2).detach());
      wide = register_parameter("wide", random(3, {5}).to(at::kDouble));
      wave = register_parameter("wave", random(4, {3}, at::kComplexFloat));
    }
    at::Tensor forward(const at::Tensor& x) {
      return (conv * x).pow(2).sum() + (holes * x[0][0][0][0]).pow(2).sum() +
             (wide * 2).pow(2).sum().to(at::kFloat) + at::abs(wave * 2).pow(2).sum();
    }
    at::Tensor conv, holes, wide, wave;
  };
  for (const Case& one : cases()) {
    if (one.name.starts_with("Adam with") || one.name.starts_with("AdamW with")) continue;
    SCOPED_TRACE(one.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      const auto fused = std::make_shared<LayoutsImpl>(),
                 separate = std::make_shared<LayoutsImpl>();
      DistributedDataParallel model(fused, world), plain(separate, world);
      const OptimizerInBackward optimizer(model.reducer(), one.rule, {.max_norm = 1});
      // libtorch's Adam takes complex numbers for numbers: here as pairs.
      const bool adam = one.name.starts_with("Adam");
      const auto all = separate->parameters();
      const auto pairs = at::view_as_real(all[3].detach().clone()).requires_grad_();
      const auto reference =
          one.make(adam ? std::vector<at::Tensor>{all[0], all[1], all[2], pairs} : all);
      for (int step = 0; step < 4; ++step) {
        const auto x = input_of(r.id(), step, {2, 3, 4, 4});
        model(x).backward();
        separate->zero_grad();
        plain(x).backward();
        torch::nn::utils::clip_grad_norm_(separate->parameters(), 1);
        if (adam) pairs.mutable_grad() = at::view_as_real(all[3].grad().clone());
        reference->step();
        if (adam) {
          const at::NoGradGuard no_grad;
          all[3].copy_(at::view_as_complex(pairs.detach()));
        }
        expect_same_parameters(*fused, *separate, 3e-6);
      }
    });
  }
}

// Goes on from a saved state as if it had not stopped, one rank's for all.
TEST(OptimizerInBackwardTest, SaveAndLoad) {
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto whole = make_sequential(), first = make_sequential(), second = make_sequential();
      DistributedDataParallel all(whole, world), begins(first, world);
      const OptimizerInBackward a(all.reducer(), one.rule), b(begins.reducer(), one.rule);
      const auto step = [&](auto& model, int number) {
        model(input_of(r.id(), number, {4, 6})).pow(2).mean().backward();
      };
      for (int i = 0; i < 3; ++i) {
        step(all, i);
        step(begins, i);
      }
      std::stringstream parameters, state;
      torch::save(first, parameters);
      torch::save(b, state);
      torch::load(second, parameters);
      DistributedDataParallel goes_on(second, world, {.bucket_cap_mb = 0.001});
      OptimizerInBackward c(goes_on.reducer(), one.rule);
      torch::load(c, state);
      for (int i = 3; i < 6; ++i) {
        step(all, i);
        step(goes_on, i);
      }
      const auto expected = whole->parameters(), actual = second->parameters();
      for (std::size_t i = 0; i < expected.size(); ++i) expect_equal(actual[i], expected[i]);
      EXPECT_EQ(c.stats().steps, 6U);
    });
  }
}

// A backward that fails on one rank steps nowhere.
TEST(OptimizerInBackwardTest, AllRanksOrNone) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_sequential();
    DistributedDataParallel model(net, world,
                                  {.bucket_cap_mb = 0.001, .launch = BucketLaunch::kEarly});
    const OptimizerInBackward optimizer(model.reducer(), Sgd{.lr = 0.1});
    model(input_of(r.id(), 0, {4, 6})).sum().backward();
    std::vector<at::Tensor> before;
    for (const auto& p : net->parameters()) before.push_back(p.detach().clone());
    auto x = input_of(r.id(), 1, {4, 6}).requires_grad_();
    x.register_hook([&](const at::Tensor& gradient) {  // last of all
      if (r.id() == 1) throw std::runtime_error("a bad day");
      return gradient;
    });
    EXPECT_THAT(text_of([&] { model(x).sum().backward(); }), HasSubstr("a bad day"));
    const auto after = net->parameters();
    for (std::size_t i = 0; i < after.size(); ++i) expect_equal(after[i], before[i]);
    net->zero_grad();
    model(input_of(r.id(), 2, {4, 6})).sum().backward();
    EXPECT_EQ(optimizer.stats().steps, 2U);
    expect_equal_on_all(world, net->parameters());
  });
}

// One process, without anybody to reduce with; and with a comm hook before it.
TEST(OptimizerInBackwardTest, AloneAndWithAHook) {
  for (const int size : {1, 2}) {
    run_ranks(size, [&](Rank& r, const ProcessGroup& world) {
      auto fused = make_sequential(), separate = make_sequential();
      DistributedDataParallel model(fused, world), plain(separate, world);
      model.register_comm_hook(hooks::bf16_compress);
      plain.register_comm_hook(hooks::bf16_compress);
      const OptimizerInBackward optimizer(model.reducer(), Sgd{.lr = 0.1});
      torch::optim::SGD reference(separate->parameters(), 0.1);
      for (int step = 0; step < 4; ++step) {
        const auto x = input_of(r.id(), step, {4, 6});
        model(x).pow(2).mean().backward();
        reference.zero_grad();
        plain(x).pow(2).mean().backward();
        reference.step();
        expect_same_parameters(*fused, *separate);
      }
      auto alone = make_sequential();
      DistributedDataParallel single(alone, world);
      const OptimizerInBackward same(single.reducer(), Sgd{.lr = 0.1});
      single(input_of(0, 0, {4, 6})).sum().backward();
      EXPECT_EQ(same.stats().steps, 1U);
      EXPECT_FALSE(alone->parameters()[0].grad().defined());
    });
  }
}

TEST(OptimizerInBackwardTest, WhatItRefuses) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_sequential();
    DistributedDataParallel model(net, world);
    const auto text = [&](const auto& rule, const OptimizerInBackwardOptions& options = {}) {
      return text_of([&] { OptimizerInBackward(model.reducer(), rule, options); });
    };
    EXPECT_THAT(text(Sgd{.lr = -1}), HasSubstr("lr must be >= 0, got -1"));
    EXPECT_THAT(text(Sgd{.nesterov = true}), HasSubstr("nesterov needs a momentum"));
    EXPECT_THAT(text(Adam{.beta2 = 1}), HasSubstr("beta2 must be from 0 to less than 1, got 1"));
    EXPECT_THAT(text(Sgd{}, {.max_norm = -1}), HasSubstr("max_norm must be >= 0, got -1"));
    EXPECT_THAT(text(Sgd{}, {.max_norm = 1, .norm_type = 1}),
                HasSubstr("norm_type must be 2 or infinity, got 1"));
    EXPECT_THAT(text(Sgd{.lr = r.id() == 0 ? 0.1 : 0.2}),
                testing::AllOf(HasSubstr("lr 0.1"), HasSubstr("lr 0.2")));
    const auto groups = [&](std::vector<OptimizerGroup> list) {
      return text_of([&] { OptimizerInBackward(model.reducer(), std::move(list)); });
    };
    const auto p = net->parameters()[0];
    EXPECT_THAT(groups({}), HasSubstr("there is no parameter"));
    EXPECT_THAT(groups({{{at::ones({2})}, Sgd{}}}), HasSubstr("not a parameter of the reducer"));
    EXPECT_THAT(groups({{{p}, Sgd{}}, {{p}, Sgd{}}}), HasSubstr("in two groups"));

    OptimizerInBackward fine(model.reducer(), {{{p}, Sgd{}}});
    EXPECT_THAT(groups({{{p}, Sgd{}}}), HasSubstr("taken by another optimizer"));
    EXPECT_THAT(text_of([&] { fine.set_rule(0, Adam{}); }), HasSubstr("cannot change"));
    EXPECT_THAT(text_of([&] { fine.set_rule(1, Sgd{}); }), HasSubstr("no group 1"));
    EXPECT_THAT(text_of([&] { fine.set_lr(-1); }), HasSubstr("lr must be >= 0, got -1"));

    Linear half(2, 2);
    half->to(at::kHalf);
    DistributedDataParallel low(half, world);
    expect_error(ErrorKind::kUnsupported, "mixed_precision",
                 [&] { OptimizerInBackward(low.reducer(), Sgd{}); });
    torch::nn::Embedding rows(torch::nn::EmbeddingOptions(10, 3).sparse(true));
    DistributedDataParallel sparse(rows, world);
    expect_error(ErrorKind::kUnsupported, "sparse",
                 [&] { OptimizerInBackward(sparse.reducer(), Sgd{}); });
    // The model is as usable as before.
    model(input_of(r.id(), 0, {4, 6})).sum().backward();
    expect_equal_on_all(world, net->parameters());
  });
}

}  // namespace
}  // namespace convoy::test
