// Mixed precision: beside a loop written by hand, and the rules of docs/reference/ddp.md. (PyTorch
// has no test of it on the CPU, where its own needs streams.)
#include <sstream>

#include "convoy/optimizer_in_backward.h"
#include "ddp/support.h"

namespace convoy::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::nn::Linear;

torch::nn::Sequential make_mixed_net() {
  return seeded(31, [] {
    return torch::nn::Sequential(Linear(6, 20), torch::nn::ReLU(), Linear(20, 10),
                                 torch::nn::Tanh(), Linear(10, 3));
  });
}

DdpOptions with(MixedPrecision mixed, DdpOptions options = {}) {
  options.mixed_precision = mixed;
  return options;
}

void expect_types(const torch::nn::Module& module, at::ScalarType type) {
  for (const auto& item : module.named_parameters()) {
    EXPECT_EQ(item.value().scalar_type(), type) << item.key();
    const at::Tensor& gradient = item.value().grad();
    if (!gradient.defined()) continue;
    EXPECT_EQ(gradient.scalar_type(), type) << item.key();
  }
}

// A model in low precision whose values come from one in full, which gets its gradients.
class ByHand {
 public:
  ByHand(const ProcessGroup& world, at::ScalarType low, at::ScalarType reduce)
      : world_(world), low_type_(low), reduce_(reduce) {
    low_->to(low);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    const auto from = full->parameters(), to = low_->parameters();
    for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
    const at::AutoGradMode grad(true);
    return low_->forward(x.to(low_type_));
  }
  void reduce() {
    const auto from = low_->parameters(), to = full->parameters();
    for (std::size_t i = 0; i < from.size(); ++i) {
      const at::Tensor gradient = from[i].grad().to(reduce_).clone();
      world_.all_reduce(gradient, {.op = ReduceOp::kAvg});
      to[i].mutable_grad() = gradient.to(at::kFloat);
    }
    low_->zero_grad();
  }

  torch::nn::Sequential full = make_mixed_net();

 private:
  ProcessGroup world_;
  at::ScalarType low_type_, reduce_;
  torch::nn::Sequential low_ = make_mixed_net();
};

TEST(MixedPrecisionTest, MatchesALoopByHand) {
  for (const auto low : {at::kBFloat16, at::kHalf}) {
    for (const auto reduce : {low, at::kFloat, at::kDouble}) {
      for (const Mode& mode : modes()) {
        SCOPED_TRACE(mode.name);
        run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
          auto net = make_mixed_net();
          MixedPrecision mixed{.param_dtype = low};
          if (reduce != low) mixed.reduce_dtype = reduce;
          DistributedDataParallel model(net, world, with(mixed, mode.options));
          ByHand by_hand(world, low, reduce);
          torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
          torch::optim::SGD reference(by_hand.full->parameters(),
                                      torch::optim::SGDOptions(0.1).momentum(0.9));
          for (int step = 0; step < 5; ++step) {
            const auto x = input_of(r.id(), step, {4, 6});
            sgd.zero_grad();
            const auto y = model(x);
            EXPECT_EQ(y.scalar_type(), low);
            y.pow(2).sum().backward();
            expect_types(*net, at::kFloat);
            by_hand.forward(x).pow(2).sum().backward();
            by_hand.reduce();
            const auto a = net->parameters(), e = by_hand.full->parameters();
            for (std::size_t i = 0; i < a.size(); ++i) expect_equal(a[i].grad(), e[i].grad());
            sgd.step();
            reference.step();
            for (std::size_t i = 0; i < a.size(); ++i) expect_equal(a[i], e[i]);
          }
          expect_equal_on_all(world, net->parameters());
        });
      }
    }
  }
}

// Parameters are low while forward and backward compute, and only then.
TEST(MixedPrecisionTest, WhenParametersAreLow) {
  struct SeesImpl : torch::nn::Module {
    SeesImpl() : inner(register_module("inner", Linear(3, 3))) {}
    at::Tensor forward(const at::Tensor& x) {
      seen = inner->weight.scalar_type();
      input = x.scalar_type();
      return inner(x);
    }
    Linear inner;
    at::ScalarType seen = at::kFloat, input = at::kFloat;
  };
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto net = std::make_shared<SeesImpl>();
    DistributedDataParallel model(net, world, with({.param_dtype = at::kBFloat16}));
    const auto x = input_of(r.id(), 0, {2, 3});
    expect_types(*net, at::kFloat);
    {
      const at::NoGradGuard no_grad;
      net->eval();
      model(x);
      EXPECT_EQ(net->seen, at::kBFloat16);
      EXPECT_EQ(net->input, at::kBFloat16);
      expect_types(*net, at::kFloat);
      net->train();
    }
    const auto kept = net->inner->weight.detach().clone();
    for (int step = 0; step < 3; ++step) {
      auto y = model(x);
      EXPECT_EQ(net->inner->weight.scalar_type(), at::kBFloat16);
      if (step == 1) {  // an evaluation between does not disturb what is to come
        const at::NoGradGuard no_grad;
        model(x);
        EXPECT_EQ(net->inner->weight.scalar_type(), at::kBFloat16);
      }
      y.sum().backward();
      expect_types(*net, at::kFloat);
      expect_equal(net->inner->weight, kept);  // none of its bits were lost
    }
    // A forward without a backward: what is saved is full.
    model(x);
    std::stringstream file;
    torch::save(model, file);
    expect_types(*net, at::kFloat);
    torch::load(model, file);
    expect_equal(net->inner->weight, kept);
    model(x).sum().backward();
    expect_equal_on_all(world, gradients_of(*net));
    // Nor does a forward that fails leave anything behind.
    EXPECT_THROW(model(input_of(r.id(), 0, {2, 5})), std::exception);
    expect_types(*net, at::kFloat);
  });
}

// Micro-batches add up in f32: more of them than bf16 could count.
TEST(MixedPrecisionTest, AccumulatesInFull) {
  for (const bool views : {true, false}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      Linear net(torch::nn::LinearOptions(1, 1).bias(false));
      DistributedDataParallel model(net, world,
                                    with({.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat},
                                         {.gradient_as_bucket_view = views}));
      constexpr int kMany = 600;  // 600 * 1 in bf16 stops at 256
      for (int round = 0; round < 2; ++round) {
        net->zero_grad(round == 0);
        for (int i = 0; i + 1 < kMany; ++i) {
          const auto scope = model.no_sync();
          model(full(r.id() + 1, {1, 1})).sum().backward();
          expect_types(*net, at::kFloat);
        }
        model(full(r.id() + 1, {1, 1})).sum().backward();
        expect_equal(net->weight.grad(), full(1.5 * kMany, {1, 1}));
      }
    });
  }
}

TEST(MixedPrecisionTest, Buffers) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    torch::nn::Sequential net(Linear(4, 4), torch::nn::BatchNorm1d(4));
    DistributedDataParallel model(
        net, world,
        with({.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16},
             {.ignore = {"1.running_var"}}));
    const auto buffers = net->named_buffers();
    EXPECT_EQ(buffers["1.running_mean"].scalar_type(), at::kBFloat16);
    EXPECT_EQ(buffers["1.running_var"].scalar_type(), at::kFloat);
    EXPECT_EQ(buffers["1.num_batches_tracked"].scalar_type(), at::kLong);
    (void)r;

    torch::nn::Sequential other(Linear(4, 4), torch::nn::BatchNorm1d(4));
    DistributedDataParallel trains(
        other, world, with({.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16}));
    for (int step = 0; step < 3; ++step) trains(input_of(r.id(), step, {8, 4})).sum().backward();
    trains.sync_buffers();
    expect_equal_on_all(world, {other->named_buffers()["1.running_mean"].to(at::kFloat)});
  });
}

// Tensors in arguments are cast, whatever holds them; what is no float, no owner of its tensors or
// not to be cast is not.
TEST(MixedPrecisionTest, Inputs) {
  struct TakesImpl : torch::nn::Module {
    TakesImpl() : w(register_parameter("w", at::ones({2}))) {}
    at::Tensor forward(const at::Tensor& a, std::vector<at::Tensor> list, at::Tensor& in_out,
                       const at::Tensor& indices, const at::Tensor* behind, const char* name,
                       std::unique_ptr<int> own) {
      EXPECT_EQ(a.scalar_type(), type);
      EXPECT_EQ(list.at(0).scalar_type(), type);
      EXPECT_EQ(in_out.scalar_type(), type);
      EXPECT_EQ(indices.scalar_type(), at::kLong);
      EXPECT_EQ(behind->scalar_type(), at::kFloat);
      EXPECT_STREQ(name, "name");
      EXPECT_EQ(*own, 7);
      return w * a.to(w.scalar_type());
    }
    at::Tensor w;
    at::ScalarType type = at::kBFloat16;
  };
  run_ranks(1, [](Rank&, const ProcessGroup& world) {
    for (const bool casts : {true, false}) {
      const auto net = std::make_shared<TakesImpl>();
      net->type = casts ? at::kBFloat16 : at::kFloat;
      DistributedDataParallel model(
          net, world, with({.param_dtype = at::kBFloat16, .cast_forward_inputs = casts}));
      const at::Tensor a = at::ones({2}), behind = at::ones({2});
      at::Tensor in_out = at::ones({2});
      const std::vector<at::Tensor> list = {at::ones({2})};
      model(a, list, in_out, at::ones({2}, at::kLong), &behind, "name", std::make_unique<int>(7))
          .sum()
          .backward();
      EXPECT_EQ(a.scalar_type(), at::kFloat);
      EXPECT_EQ(list[0].scalar_type(), at::kFloat);
      EXPECT_EQ(in_out.scalar_type(), at::kFloat);
      expect_equal(net->w.grad(), at::ones({2}));
    }
  });
}

// Only the gradients' way is short: parameters are computed with as they are.
TEST(MixedPrecisionTest, OnlyReduceDtype) {
  for (const bool views : {true, false}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = make_mixed_net(), plain = make_mixed_net();
      DistributedDataParallel model(
          net, world, with({.reduce_dtype = at::kBFloat16}, {.gradient_as_bucket_view = views})),
          exact(plain, world);
      exact.register_comm_hook(hooks::bf16_compress);
      for (int step = 0; step < 3; ++step) {
        const auto x = input_of(r.id(), step, {4, 6});
        net->zero_grad();
        plain->zero_grad();
        model(x).pow(2).sum().backward();
        exact(x).pow(2).sum().backward();
        const auto a = net->parameters(), e = plain->parameters();
        for (std::size_t i = 0; i < a.size(); ++i) expect_equal(a[i].grad(), e[i].grad());
      }
    });
  }
}

// With the optimizer in backward, which updates the full parameters.
TEST(MixedPrecisionTest, OptimizerInBackwardUpdatesFullParameters) {
  for (const auto reduce : {at::kBFloat16, at::kFloat}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto fused = make_mixed_net(), separate = make_mixed_net();
      const auto options = with({.param_dtype = at::kBFloat16, .reduce_dtype = reduce});
      DistributedDataParallel model(fused, world, options), plain(separate, world, options);
      const OptimizerInBackward optimizer(model.reducer(), Sgd{.lr = 1e-4});
      torch::optim::SGD reference(separate->parameters(), 1e-4);
      for (int step = 0; step < 4; ++step) {
        const auto x = input_of(r.id(), step, {4, 6});
        model(x).pow(2).sum().backward();
        reference.zero_grad();
        plain(x).pow(2).sum().backward();
        reference.step();
        const auto a = fused->parameters(), e = separate->parameters();
        for (std::size_t i = 0; i < a.size(); ++i) {
          EXPECT_EQ(a[i].scalar_type(), at::kFloat);
          EXPECT_TRUE(at::allclose(a[i], e[i], 1e-6, 1e-7));
        }
      }
    });
  }
}

// Several forwards before their backwards, outputs that are dropped, and an error on one rank.
TEST(MixedPrecisionTest, OrdersOfCalls) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_mixed_net();
    DistributedDataParallel model(net, world,
                                  with({.param_dtype = at::kBFloat16}, {.bucket_cap_mb = 0.001}));
    const auto x = input_of(r.id(), 0, {4, 6}), z = input_of(r.id(), 1, {4, 6});
    (model(x).sum() + model(z).sum()).backward();
    expect_types(*net, at::kFloat);
    model(x);  // dropped
    net->zero_grad();
    auto first = model(x).sum(), second = model(z).sum();
    first.backward();
    expect_types(*net, at::kFloat);
    second.backward();
    expect_types(*net, at::kFloat);
    expect_equal_on_all(world, gradients_of(*net));

    auto deep = x.clone().requires_grad_();
    deep.register_hook([&](const at::Tensor& gradient) {
      if (r.id() == 1) throw std::runtime_error("a bad day");
      return gradient;
    });
    EXPECT_THAT(text_of([&] { model(deep).sum().backward(); }), HasSubstr("a bad day"));
    for (const auto& p : net->parameters()) EXPECT_EQ(p.scalar_type(), at::kFloat);
    net->zero_grad();
    model(x).sum().backward();
    expect_types(*net, at::kFloat);
    expect_equal_on_all(world, gradients_of(*net));
  });
}

// Parameters are themselves again also where it is not the module's forward that throws.
TEST(MixedPrecisionTest, WhatIsAroundForwardThrows) {
  for (const auto when : {BufferSync::kBeforeForward, BufferSync::kAfterForward}) {
    run_ranks(2, [when](Rank& r, const ProcessGroup& world) {
      torch::nn::Sequential net(Linear(6, 4), torch::nn::BatchNorm1d(4));
      DistributedDataParallel model(
          net, world, with({.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16}));
      bool fails = true;
      model.register_buffer_hook(
          [&fails](const ProcessGroup&, const NamedTensors&) {
            if (fails) throw std::runtime_error("a bad day");
          },
          when);
      const auto x = input_of(r.id(), 0, {4, 6});
      EXPECT_THAT(text_of([&] { model(x); }), HasSubstr("a bad day"));
      expect_types(*net, at::kFloat);
      fails = false;
      model(x).sum().backward();
      expect_types(*net, at::kFloat);
    });
  }
}

// Sparse gradients, unused parameters, and types that are left alone.
TEST(MixedPrecisionTest, OtherParameters) {
  struct MixImpl : torch::nn::Module {
    MixImpl()
        : rows(register_module(
              "rows", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).sparse(true)))),
          unused(register_module("unused", Linear(3, 3))),
          wave(register_parameter("wave", at::ones({2}, at::kComplexFloat))) {}
    at::Tensor forward(const at::Tensor& indices) {
      EXPECT_EQ(wave.scalar_type(), at::kComplexFloat);
      EXPECT_EQ(rows->weight.scalar_type(), at::kBFloat16);
      return rows(indices).sum() + at::abs(wave).sum();
    }
    torch::nn::Embedding rows;
    Linear unused;
    at::Tensor wave;
  };
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto net = seeded(8, [] { return std::make_shared<MixImpl>(); });
    DistributedDataParallel model(
        net, world, with({.param_dtype = at::kBFloat16}, {.find_unused_parameters = true}));
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(at::tensor({r.id(), 4})).backward();
      const auto gradient = net->rows->weight.grad();
      EXPECT_EQ(gradient.scalar_type(), at::kFloat);
      expect_equal(gradient.to_dense().select(1, 0),
                   at::tensor({0.5, 0.5, 0.0, 0.0, 1.0}).to(at::kFloat));
      EXPECT_FALSE(net->unused->weight.grad().defined());
      EXPECT_EQ(net->wave.grad().scalar_type(), at::kComplexFloat);
      EXPECT_EQ(net->unused->weight.scalar_type(), at::kFloat);
    }
  });
}

TEST(MixedPrecisionTest, WhatItRefuses) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_mixed_net();
    const auto text = [&](const MixedPrecision& mixed) {
      return text_of([&] { DistributedDataParallel(net, world, with(mixed)); });
    };
    EXPECT_THAT(text({.param_dtype = at::kInt}),
                AllOf(HasSubstr("param_dtype is Int"), HasSubstr("not a floating-point type")));
    EXPECT_THAT(text({.reduce_dtype = at::kComplexFloat}), HasSubstr("reduce_dtype"));
    EXPECT_THAT(text({.reduce_dtype = r.id() == 0 ? at::kHalf : at::kBFloat16}),
                HasSubstr("reduce_dtype"));
  });
}

}  // namespace
}  // namespace convoy::test
