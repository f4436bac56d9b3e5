// The hooks of convoy/hooks.h: scenarios 54, 58 and 59 of ../shared/reference/ddp.md, what each
// keeps, and that training with it arrives where training without it does.
#include <sstream>

#include "convoy/averager.h"
#include "ddp/support.h"
#include "group/fake_backend.h"

namespace convoy::test {
namespace {

using testing::HasSubstr;
using torch::nn::Linear;

struct TaskImpl : torch::nn::Module {
  explicit TaskImpl(at::IntArrayRef sizes = {2, 2}) : p(register_parameter("p", at::ones(sizes))) {}
  at::Tensor forward(const at::Tensor& x) { return p * x; }
  at::Tensor p;
};
TORCH_MODULE(Task);

torch::nn::Sequential make_large_net() {
  return seeded(11, [] {
    return torch::nn::Sequential(Linear(8, 32), torch::nn::Tanh(), Linear(32, 16),
                                 torch::nn::Tanh(), Linear(16, 4));
  });
}

struct Named {
  std::string name;
  std::function<CommHook()> make;
  double tolerance;  // of the loss after training, against plain all-reduce
};
std::vector<Named> all_hooks() {
  const auto power = [](int rank) {
    return hooks::PowerSgd({.matrix_approximation_rank = rank, .start_power_sgd_iter = 3});
  };
  return {{"fp16", [] { return hooks::fp16_compress; }, 1e-3},
          {"bf16", [] { return hooks::bf16_compress; }, 5e-3},
          {"8 bits", [] { return hooks::Quantize8({.block = 64}); }, 5e-3},
          {"PowerSGD", [=] { return power(4); }, 2e-2},
          {"fp16(PowerSGD)", [=] { return hooks::fp16_compress_wrapper(power(4)); }, 2e-2},
          {"bf16(PowerSGD)", [=] { return hooks::bf16_compress_wrapper(power(4)); }, 3e-2},
          {"fp16(8 bits)",
           [] { return hooks::fp16_compress_wrapper(hooks::Quantize8({.block = 64})); }, 5e-3}};
}

// test_default_ddp_comm_hooks_nccl, test_builtin_ddp_comm_hooks_nccl,
// test_fp16_compress_wrapper_nccl
TEST(CompressionTest, DefaultHooks) {
  for (const Named& hook : all_hooks()) {
    SCOPED_TRACE(hook.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      Task net;
      DistributedDataParallel model(net, world);
      model.register_comm_hook(hook.make());
      for (int step = 0; step < 6; ++step) {
        net->zero_grad();
        (model(at::ones({2, 2})) * (2 * r.id())).mean().backward();
        EXPECT_TRUE(at::allclose(net->p.grad(), full(0.25, {2, 2}), 0, 1e-4)) << net->p.grad();
        expect_equal_on_all(world, {net->p.grad()});
      }
    });
  }
}

// What is rounded in registers is what a 16-bit tensor would be, to the bit.
TEST(CompressionTest, FusedEqualsEncoded) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    ASSERT_TRUE(world.can_round());
    for (const std::int64_t size : {1, 5, 1009, 100003}) {
      for (const bool shared : {false, true}) {
        const auto mine = random(static_cast<std::uint64_t>(r.id()) + 7, {size}) * 100;
        for (const auto& [type, rounding] :
             {std::pair(at::kHalf, Rounding::kF16), {at::kBFloat16, Rounding::kBF16}}) {
          const at::Tensor encoded = mine.to(type);
          world.all_reduce(encoded, {.op = ReduceOp::kAvg});
          const at::Tensor fused = shared ? world.allocate({size}, mine.options()) : mine.clone();
          fused.copy_(mine);
          world.all_reduce(fused, {.op = ReduceOp::kAvg, .rounding = rounding});
          expect_equal(fused, encoded.to(at::kFloat));
        }
      }
    }
    EXPECT_THAT(text_of([&] {
                  world.all_reduce(at::ones({2}, at::kDouble), {.rounding = Rounding::kF16});
                }),
                HasSubstr("only sums and averages of f32"));
  });
}

// Ranks that round differently get an error that says so, and the group goes on.
TEST(CompressionTest, RoundingIsCompared) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto x = at::ones({4});
    EXPECT_THAT(text_of([&] {
                  world.all_reduce(x, {.rounding = r.id() == 0 ? Rounding::kF16 : Rounding::kBF16});
                }),
                testing::AllOf(HasSubstr("rounded to f16"), HasSubstr("rounded to bf16")));
    world.all_reduce(x, {.rounding = Rounding::kF16});
    expect_equal(x, full(2, {4}));
  });
}

// The sum of all ranks does not fit into 16 bits; its mean does.
TEST(CompressionTest, SumsDoNotOverflow) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    const auto foreign =
        ProcessGroup::from(c10::make_intrusive<FakeBackend>(make_backend(r, "foreign")));
    EXPECT_FALSE(foreign.can_round());
    EXPECT_THAT(text_of([&] { foreign.all_reduce(at::ones({2}), {.rounding = Rounding::kF16}); }),
                HasSubstr("cannot round"));
    for (const ProcessGroup& group : {world, foreign}) {
      Task net;
      DistributedDataParallel model(net, group);
      model.register_comm_hook(hooks::fp16_compress);
      (model(at::ones({2, 2})) * 60000).sum().backward();
      EXPECT_TRUE(at::allclose(net->p.grad(), full(60000, {2, 2}), 2e-3, 0)) << net->p.grad();
      expect_equal_on_all(world, {net->p.grad()});
    }
  });
}

// A backend that has no mean, no rounding and no memory of its own.
TEST(CompressionTest, ForeignBackend) {
  for (const Named& hook : all_hooks()) {
    if (hook.name.find("8 bits") != std::string::npos) continue;  // it has no all_to_all either
    SCOPED_TRACE(hook.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      const auto foreign =
          ProcessGroup::from(c10::make_intrusive<FakeBackend>(make_backend(r, "foreign")));
      Task net(at::IntArrayRef{12, 10});
      DistributedDataParallel model(net, foreign);
      model.register_comm_hook(hook.make());
      for (int step = 0; step < 5; ++step) {
        net->zero_grad();
        (model(at::ones({12, 10})) * (r.id() + 1)).sum().backward();
        EXPECT_TRUE(at::allclose(net->p.grad(), full(1.5, {12, 10}), 0, 2e-2)) << net->p.grad();
        expect_equal_on_all(world, {net->p.grad()});
      }
    });
  }
}

// Types that are no f32: f64 is rounded and stays f64, complex is two numbers, 16 bits stay.
TEST(CompressionTest, OtherTypes) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    for (const auto type : {at::kDouble, at::kComplexFloat, at::kComplexDouble, at::kHalf}) {
      for (const Named& hook : all_hooks()) {
        SCOPED_TRACE(hook.name);
        Task net(at::IntArrayRef{12, 10});
        net->to(type);
        DistributedDataParallel model(net, world);
        model.register_comm_hook(hook.make());
        for (int step = 0; step < 5; ++step) {
          net->zero_grad();
          at::real(model(at::ones({12, 10}, type)) * (r.id() + 1)).sum().backward();
          const at::Tensor gradient = net->p.grad();
          EXPECT_EQ(gradient.scalar_type(), type);
          EXPECT_TRUE(at::allclose(at::real(gradient).to(at::kFloat), full(1.5, {12, 10}), 0, 2e-2))
              << gradient;
        }
      }
    }
  });
}

double train(const ProcessGroup& world, int rank, CommHook hook, const DdpOptions& options) {
  auto net = make_large_net();
  const auto teacher = random(3, {8, 4});
  DistributedDataParallel model(net, world, options);
  if (hook) model.register_comm_hook(std::move(hook));
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto loss_of = [&](auto& of, const at::Tensor& x) {
    return (of->forward(x) - at::tanh(x.matmul(teacher))).pow(2).mean();
  };
  for (int step = 0; step < 120; ++step) {
    sgd.zero_grad();
    const auto x = input_of(rank, step, {16, 8});
    (model(x) - at::tanh(x.matmul(teacher))).pow(2).mean().backward();
    sgd.step();
  }
  expect_equal_on_all(world, net->parameters());
  return loss_of(net, input_of(0, 5000, {256, 8})).template item<double>();
}

TEST(CompressionTest, EachHookConverges) {
  for (const int ranks : {2, 3}) {
    double plain = 0;
    run_ranks(ranks, [&](Rank& r, const ProcessGroup& world) {
      const double loss = train(world, r.id(), nullptr, {});
      if (r.id() == 0) plain = loss;
    });
    EXPECT_LT(plain, 0.1);
    for (const Named& hook : all_hooks()) {
      SCOPED_TRACE(hook.name);
      run_ranks(ranks, [&](Rank& r, const ProcessGroup& world) {
        const double loss = train(world, r.id(), hook.make(), {.bucket_cap_mb = 0.001});
        EXPECT_NEAR(loss, plain, hook.tolerance);
      });
    }
  }
}

// test_ddp_hook_parity_allreduce, _powerSGD, _post_localSGD
TEST(CompressionTest, HookParity) {
  const auto power = [](bool warm) {
    return [warm]() -> CommHook {
      return hooks::PowerSgd({.start_power_sgd_iter = 2, .warm_start = warm});
    };
  };
  const std::vector<std::function<CommHook()>> makers = {
      []() -> CommHook { return hooks::all_reduce; }, power(true), power(false),
      []() -> CommHook { return hooks::PostLocalSgd({.start_local_sgd_iter = 10}); }};
  for (std::size_t i = 0; i < makers.size(); ++i) {
    run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
      Linear net(torch::nn::LinearOptions(1, 5).bias(false));
      DistributedDataParallel model(net, world);
      model.register_comm_hook(makers[i]());
      for (int step = 0; step < 100; ++step) {
        net->zero_grad();
        model(full(r.id(), {1, 1})).sum().backward();
        const bool local = i == 3 && step >= 10;
        EXPECT_NEAR(net->weight.grad()[0][0].item<float>(), local ? r.id() : 1.0, 1e-5) << step;
      }
    });
  }
}

// test_ddp_comm_hook_quantize_per_tensor, _per_channel
TEST(CompressionTest, Quantize) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    Task plain(at::IntArrayRef{40, 20}), coarse(at::IntArrayRef{40, 20});
    DistributedDataParallel exact(plain, world), model(coarse, world);
    model.register_comm_hook(hooks::Quantize8({.block = 20}));
    const auto x = random(static_cast<std::uint64_t>(r.id()), {40, 20}) * 0.002;
    at::Tensor sum = at::zeros({40, 20});
    constexpr int kSteps = 50;
    for (int step = 0; step < kSteps; ++step) {
      plain->zero_grad();
      coarse->zero_grad();
      exact(x).sum().backward();
      model(x).sum().backward();
      EXPECT_TRUE(at::allclose(plain->p.grad(), coarse->p.grad(), 0, 1e-4));
      sum += coarse->p.grad();
    }
    // What one step loses the next ones bring: over many, nothing is lost.
    EXPECT_LT((sum / kSteps - plain->p.grad()).abs().max().item<float>(), 4e-6);
    expect_equal_on_all(world, {sum});
  });
}

TEST(CompressionTest, QuantizeWithoutFeedbackAndWithNan) {
  EXPECT_THROW(hooks::Quantize8({.block = 7}), Error);
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    Task net(at::IntArrayRef{4, 16});
    DistributedDataParallel model(net, world);
    model.register_comm_hook(hooks::Quantize8({.block = 16}));
    const auto step = [&](const at::Tensor& x) {
      net->zero_grad();
      model(x).sum().backward();
      return net->p.grad().clone();
    };
    const at::Tensor bad = at::ones({4, 16});
    if (r.id() == 1) bad[2][3] = std::numeric_limits<float>::infinity();
    const auto gradient = step(bad);
    expect_equal(gradient.isnan().all(1), at::tensor({0, 0, 1, 0}).to(at::kBool));
    expect_equal(gradient[0], full(1, {16}));
    expect_equal(step(at::ones({4, 16})), full(1, {4, 16}));  // errors have no NaN

    Task other(at::IntArrayRef{4, 16});
    DistributedDataParallel forgets(other, world);
    forgets.register_comm_hook(hooks::Quantize8({.block = 16, .error_feedback = false}));
    const auto x = random(static_cast<std::uint64_t>(r.id()), {4, 16});
    at::Tensor first;
    for (int i = 0; i < 3; ++i) {
      other->zero_grad();
      forgets(x).sum().backward();
      if (i == 0) first = other->p.grad().clone();
      expect_equal(other->p.grad(), first);
    }
  });
}

// A gradient of rank one comes through as it is, with fewer elements sent.
TEST(PowerSgdTest, LowRankIsExact) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    Linear net(torch::nn::LinearOptions(40, 30));
    hooks::PowerSgd power({.start_power_sgd_iter = 1});
    DistributedDataParallel model(net, world);
    model.register_comm_hook(power);
    const auto x = random(5, {1, 40});
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      (model(x) * (r.id() + 1)).sum().backward();
      EXPECT_TRUE(at::allclose(net->weight.grad(), (x * 1.5).expand({30, 40}), 1e-4, 1e-4));
      expect_equal(net->bias.grad(), full(1.5, {30}));
      EXPECT_EQ(power.traffic().gradients, 30U * 40 + 30);
      EXPECT_EQ(power.traffic().sent, step == 0 ? 30U * 40 + 30 : 30U + 40 + 30);
    }
  });
}

// Zero gradients do not kill a direction for good, with and without an epsilon.
TEST(PowerSgdTest, ZeroGradients) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    for (const double epsilon : {0.0, 1e-8}) {
      Linear net(torch::nn::LinearOptions(20, 20).bias(false));
      DistributedDataParallel model(net, world);
      model.register_comm_hook(hooks::PowerSgd({.matrix_approximation_rank = 2,
                                                .start_power_sgd_iter = 0,
                                                .orthogonalization_epsilon = epsilon}));
      const auto x = random(static_cast<std::uint64_t>(r.id()), {1, 20});
      for (const double factor : {1.0, 0.0, 0.0, 1.0, 1.0}) {
        net->zero_grad();
        (model(x) * factor).sum().backward();
        ASSERT_TRUE(net->weight.grad().isfinite().all().item<bool>());
      }
      // Two ranks, each of rank one: two directions hold it all.
      auto mean = x.clone();
      world.all_reduce(mean, {.op = ReduceOp::kAvg});
      EXPECT_TRUE(at::allclose(net->weight.grad(), mean.expand({20, 20}), 1e-3, 1e-3));
    }
  });
}

// What a hook keeps goes by parameter: another layout of the buckets, as after freezing and
// thawing, changes nothing.
TEST(PowerSgdTest, StateSurvivesOtherBuckets) {
  const auto run = [](const ProcessGroup& world, int rank, const DdpOptions& options, bool quantize,
                      bool freeze) {
    auto net = make_large_net();
    DistributedDataParallel model(net, world, options);
    const CommHook hook =
        quantize
            ? CommHook(hooks::Quantize8({.block = 8}))
            : CommHook(hooks::PowerSgd({.start_power_sgd_iter = 1, .min_compression_rate = 1.2}));
    model.register_comm_hook(hook);
    std::vector<at::Tensor> all;
    for (int step = 0; step < 9; ++step) {
      net->zero_grad();
      // Bias of the last layer: not compressed, and its absence moves all others.
      net->parameters().back().set_requires_grad(!(freeze && step >= 3 && step < 5));
      model(input_of(rank, step, {4, 8})).pow(2).sum().backward();
      auto gradients = gradients_of(*net);
      gradients.pop_back();
      all.insert(all.end(), gradients.begin(), gradients.end());
    }
    return all;
  };
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    const auto one = run(world, r.id(), {}, false, false);
    const auto many = run(world, r.id(), {.bucket_cap_mb = 0.0005}, false, false);
    const auto frozen = run(world, r.id(), {.bucket_cap_mb = 0.001}, false, true);
    for (std::size_t i = 0; i < one.size(); ++i) {
      expect_close(many[i], one[i]);
      expect_close(frozen[i], one[i]);
    }
    // Blocks are of a bucket, so that values differ a little; errors must not be lost or misplaced.
    const auto whole = run(world, r.id(), {}, true, false);
    const auto pieces = run(world, r.id(), {.bucket_cap_mb = 0.001}, true, true);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const double scale = whole[i].abs().max().item<double>();
      EXPECT_LT((whole[i] - pieces[i]).abs().max().item<double>(), 0.05 * scale);
    }
  });
}

// Training goes on from a saved state as if it had not stopped.
TEST(PowerSgdTest, SaveAndLoad) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto step = [&](auto& model, auto& net, int number) {
      net->zero_grad();
      model(input_of(r.id(), number, {4, 8})).pow(2).sum().backward();
      return gradients_of(*net);
    };
    const auto check = [&](auto make) {
      auto whole_net = make_large_net(), first_net = make_large_net(),
           second_net = make_large_net();
      auto whole = make(), first = make(), second = make();
      DistributedDataParallel all(whole_net, world), begins(first_net, world),
          goes_on(second_net, world);
      all.register_comm_hook(whole);
      begins.register_comm_hook(first);
      goes_on.register_comm_hook(second);
      for (int i = 0; i < 5; ++i) {
        step(all, whole_net, i);
        step(begins, first_net, i);
      }
      std::stringstream file;
      torch::save(first, file);
      torch::load(second, file);
      for (int i = 5; i < 9; ++i) {
        const auto expected = step(all, whole_net, i);
        const auto actual = step(goes_on, second_net, i);
        for (std::size_t k = 0; k < expected.size(); ++k) expect_close(actual[k], expected[k]);
      }
    };
    check([] { return hooks::PowerSgd({.start_power_sgd_iter = 2, .min_compression_rate = 1.2}); });
    check([] { return hooks::PowerSgd({.start_power_sgd_iter = 7, .min_compression_rate = 1.2}); });
    check([] { return hooks::Quantize8({.block = 16}); });
    check([] { return hooks::PostLocalSgd({.start_local_sgd_iter = 6}); });

    std::stringstream wrong;
    torch::save(hooks::Quantize8(), wrong);
    hooks::PowerSgd other;
    EXPECT_THAT(text_of([&] { torch::load(other, wrong); }), HasSubstr("saved by something else"));
  });
}

TEST(PowerSgdTest, BadOptionsAndForeignState) {
  EXPECT_THROW(hooks::PowerSgd({.matrix_approximation_rank = 0}), Error);
  EXPECT_THROW(hooks::PowerSgd({.min_compression_rate = 0.5}), Error);
  EXPECT_THROW(hooks::PowerSgd({.orthogonalization_epsilon = -1}), Error);
  EXPECT_THROW(hooks::fp16_compress_wrapper(nullptr), Error);
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    hooks::PowerSgd power({.start_power_sgd_iter = 0});
    std::stringstream file;
    {
      Linear net(20, 20);
      DistributedDataParallel model(net, world);
      model.register_comm_hook(power);
      model(random(1, {1, 20})).sum().backward();
      torch::save(power, file);
    }
    Linear net(30, 30);
    hooks::PowerSgd another({.start_power_sgd_iter = 0});
    torch::load(another, file);
    DistributedDataParallel model(net, world);
    model.register_comm_hook(another);
    EXPECT_THAT(text_of([&] { model(random(1, {1, 30})).sum().backward(); }),
                HasSubstr("belongs to another model"));
    (void)r;
  });
}

// A backward that fails on one rank, before this rank's hook has seen all buckets, leaves the
// ranks' hooks in step.
TEST(PowerSgdTest, InStepAfterAFailure) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    auto net = make_large_net();
    DistributedDataParallel model(net, world,
                                  {.bucket_cap_mb = 0.001, .launch = BucketLaunch::kEarly});
    const hooks::PowerSgd power(
        {.start_power_sgd_iter = 3, .min_compression_rate = 1.2, .warm_start = false});
    bool fails = false;
    model.register_comm_hook([&](const GradBucket& bucket) {
      if (fails && r.id() == 1 && bucket.index() == 1) throw std::runtime_error("a bad day");
      return power(bucket);
    });
    for (int step = 0; step < 8; ++step) {
      net->zero_grad();
      fails = step == 1 || step == 5;
      const auto run = [&] { model(input_of(r.id(), step, {4, 8})).pow(2).sum().backward(); };
      if (fails) {
        EXPECT_THAT(text_of(run), HasSubstr("a bad day"));
      } else {
        run();
        expect_equal_on_all(world, gradients_of(*net));
      }
    }
  });
}

// Post-local SGD: the same as plain until it starts, then models meet every few steps.
TEST(PostLocalSgdTest, ModelsMeet) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_large_net();
    DistributedDataParallel model(net, world);
    model.register_comm_hook(hooks::PostLocalSgd({.start_local_sgd_iter = 4}));
    torch::optim::SGD sgd(net->parameters(), 0.05);
    PostLocalSgdOptimizer optimizer(sgd, ModelAverager({{3, world}}, {.warmup_steps = 4}));
    for (int step = 0; step < 12; ++step) {
      optimizer.zero_grad();
      model(input_of(r.id(), step, {4, 8})).pow(2).mean().backward();
      optimizer.step();
      const auto mine = net->parameters()[0].detach();
      const auto all = world.all_gather(mine);
      const bool meet = step < 4 || (step - 4) % 3 == 0;
      EXPECT_EQ(at::equal(all[0], all[1]), meet) << "step " << step;
    }
    EXPECT_EQ(optimizer.averager().steps(), 12U);

    std::stringstream file;
    torch::serialize::OutputArchive out;
    optimizer.save(out);
    out.save_to(file);
    torch::serialize::InputArchive in;
    in.load_from(file);
    PostLocalSgdOptimizer again(sgd, ModelAverager({{3, world}}));
    again.load(in);
    EXPECT_EQ(again.averager().steps(), 12U);
  });
}

TEST(PostLocalSgdTest, ConvergesLikePlain) {
  const auto run = [](const ProcessGroup& world, int rank, bool local) {
    auto net = make_large_net();
    const auto teacher = random(3, {8, 4});
    DistributedDataParallel model(net, world);
    if (local) model.register_comm_hook(hooks::PostLocalSgd({.start_local_sgd_iter = 20}));
    torch::optim::SGD sgd(net->parameters(), 0.1);
    PostLocalSgdOptimizer optimizer(sgd,
                                    local ? ModelAverager({{4, world}}, {.warmup_steps = 20})
                                          : ModelAverager({{1000, world}}, {.warmup_steps = 1000}));
    for (int step = 0; step < 181; ++step) {
      optimizer.zero_grad();
      const auto x = input_of(rank, step, {16, 8});
      (model(x) - at::tanh(x.matmul(teacher))).pow(2).mean().backward();
      optimizer.step();
    }
    expect_equal_on_all(world, net->parameters());  // 180 is a step in which they meet
    const auto x = input_of(0, 5000, {256, 8});
    return (net->forward(x) - at::tanh(x.matmul(teacher))).pow(2).mean().item<double>();
  };
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    const double plain = run(world, r.id(), false), local = run(world, r.id(), true);
    EXPECT_NEAR(local, plain, 0.02);
  });
}

// HierarchicalModelAverager: of the levels that are due the one with the longest period.
TEST(PostLocalSgdTest, Hierarchy) {
  run_ranks(4, [](Rank& r, const ProcessGroup& world) {
    const auto pair = world.split_by(r.id() / 2);
    EXPECT_THROW(ModelAverager({}), Error);
    EXPECT_THROW(ModelAverager({{0, world}}), Error);
    EXPECT_THROW(ModelAverager({{2, ProcessGroup()}}), Error);
    EXPECT_THROW(ModelAverager({{2, pair}, {3, world}}), Error);
    ModelAverager averager({{2, pair}, {4, world}}, {.warmup_steps = 1});
    const std::vector<double> expected = {0, 1, 0, 2, 0, 1, 0, 2, 0, 1};  // 2: pairs, 1: all
    for (const double kind : expected) {
      const auto own = full(r.id(), {3});
      const auto wide = full(r.id(), {2}, at::kDouble);
      const bool met = averager.average_parameters({own, wide});
      EXPECT_EQ(met, kind != 0);
      const int first = r.id() / 2 * 2;  // of its pair
      const double value = kind == 0 ? r.id() : kind == 1 ? 1.5 : first + 0.5;
      expect_equal(own, full(value, {3}));
      expect_equal(wide, full(value, {2}, at::kDouble));
    }
    Task net;
    DistributedDataParallel model(net, world);
    model.register_comm_hook(hooks::PostLocalSgd({.start_local_sgd_iter = 1, .subgroup = pair}));
    const int first = r.id() / 2 * 2;  // of its pair
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      (model(at::ones({2, 2})) * r.id()).sum().backward();
      expect_equal(net->p.grad(), full(step == 0 ? 1.5 : first + 0.5, {2, 2}));
    }
  });
}

}  // namespace
}  // namespace convoy::test
