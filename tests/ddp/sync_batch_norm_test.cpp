// SyncBatchNorm beside torch's own layer on the whole batch.
#include "convoy/sync_batch_norm.h"

#include <sstream>

#include "convoy/join.h"
#include "ddp/support.h"

namespace convoy::test {
namespace {

using nn::SyncBatchNorm1d;
using nn::SyncBatchNorm2d;
using nn::SyncBatchNorm3d;
using testing::AllOf;
using testing::HasSubstr;
using torch::nn::BatchNormOptions;
using torch::nn::Linear;

void expect_near(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!actual.defined() || actual.numel() == 0) return;
  EXPECT_TRUE(at::allclose(actual, expected, tolerance, tolerance))
      << what << ": off by up to " << (actual - expected).abs().max();
}

// Three steps on all ranks, whose batches have these sizes, and of a local layer on their
// concatenation. The loss is a weighted sum of squares, so that gradients are not trivial.
template <class Sync, class Local>
void compare(Rank& r, const ProcessGroup& world, const BatchNormOptions& options,
             const std::vector<std::int64_t>& batches, std::vector<std::int64_t> sizes,
             double tolerance, at::TensorOptions type,
             at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  Sync sync(options, world);
  Local local(options);
  for (auto* module : std::initializer_list<torch::nn::Module*>{sync.get(), local.get()}) {
    if (type.dtype() == at::kDouble) module->to(at::kDouble);
    if (!options.affine()) continue;
    const at::NoGradGuard no_grad;
    const auto parameters = module->parameters();
    for (auto& parameter : module->parameters()) {
      parameter.copy_(random(5, {options.num_features()}) + 1);
    }
  }
  const auto rank = static_cast<std::size_t>(r.id());
  std::int64_t before = 0, all = 0;
  for (std::size_t i = 0; i < batches.size(); ++i) {
    if (i < rank) before += batches[i];
    all += batches[i];
  }
  for (int step = 0; step < 3; ++step) {
    sizes[0] = all;
    const auto seed = static_cast<std::uint64_t>(step + 1);
    const auto rounded = (random(seed, sizes) * 3 + 10).to(type.dtype());
    const auto whole = rounded.to(local->running_mean.defined() ? local->running_mean.scalar_type()
                                  : type.dtype() == at::kDouble ? at::kDouble
                                                                : at::kFloat);
    const auto x = rounded.narrow(0, before, batches[rank]).contiguous(format).requires_grad_();
    const auto x_all = whole.clone().requires_grad_();
    const auto factors = random(seed + 9, sizes).to(whole.dtype());
    sync->zero_grad();
    local->zero_grad();
    const auto y = sync(x);
    EXPECT_EQ(y.scalar_type(), x.scalar_type());
    EXPECT_TRUE(y.is_contiguous(format));
    const auto y_all = local(x_all);
    expect_near(y.to(whole.dtype()), y_all.narrow(0, before, batches[rank]), tolerance, "output");
    (y.to(whole.dtype()).square() * factors.narrow(0, before, batches[rank])).sum().backward();
    (y_all.square() * factors).sum().backward();
    expect_near(x.grad().to(whole.dtype()), x_all.grad().narrow(0, before, batches[rank]),
                tolerance * 10, "gradient of the input");
    if (options.affine()) {
      for (std::size_t i = 0; i < 2; ++i) {
        const auto sum = sync->parameters()[i].grad().clone();
        world.all_reduce(sum);
        expect_near(sum, local->parameters()[i].grad(), tolerance * 100, "parameters");
      }
    }
    if (!options.track_running_stats()) continue;
    expect_near(sync->running_mean, local->running_mean, tolerance, "running_mean");
    expect_near(sync->running_var, local->running_var, tolerance, "running_var");
    EXPECT_EQ(sync->num_batches_tracked.template item<int>(), step + 1);
    expect_equal_on_all(world, sync->buffers());
  }
  // Evaluation is everybody's own.
  sync->eval();
  local->eval();
  if (r.id() == 0) {
    sizes[0] = 4;
    const auto x = random(77, sizes).to(type.dtype());
    expect_near(sync(x).to(at::kDouble),
                local(x.to(type.dtype() == at::kDouble ? at::kDouble : at::kFloat)).to(at::kDouble),
                tolerance, "evaluation");
  }
}

TEST(SyncBatchNormTest, IsThatOfTheWholeBatch) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    const std::vector<BatchNormOptions> all = {
        BatchNormOptions(5), BatchNormOptions(5).momentum(std::nullopt),
        BatchNormOptions(5).affine(false).eps(1e-3), BatchNormOptions(5).track_running_stats(false),
        BatchNormOptions(5).momentum(0.7).affine(false).track_running_stats(false)};
    for (const auto& options : all) {
      for (const std::vector<std::int64_t>& batches :
           {std::vector<std::int64_t>{2, 2, 2}, {1, 4, 2}, {0, 3, 1}, {7, 0, 0}}) {
        SCOPED_TRACE(::testing::PrintToString(batches));
        using namespace torch::nn;
        compare<SyncBatchNorm1d, BatchNorm1d>(r, world, options, batches, {0, 5}, 1e-10,
                                              at::kDouble);
        compare<SyncBatchNorm1d, BatchNorm1d>(r, world, options, batches, {0, 5, 3}, 1e-10,
                                              at::kDouble);
        compare<SyncBatchNorm2d, BatchNorm2d>(r, world, options, batches, {0, 5, 3, 2}, 1e-10,
                                              at::kDouble);
        compare<SyncBatchNorm2d, BatchNorm2d>(r, world, options, batches, {0, 5, 3, 2}, 1e-10,
                                              at::kDouble, at::MemoryFormat::ChannelsLast);
        compare<SyncBatchNorm3d, BatchNorm3d>(r, world, options, batches, {0, 5, 3, 2, 2}, 1e-10,
                                              at::kDouble);
      }
    }
  });
}

TEST(SyncBatchNormTest, OtherTypes) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    using namespace torch::nn;
    const BatchNormOptions options(4);
    compare<SyncBatchNorm2d, BatchNorm2d>(r, world, options, {3, 2}, {0, 4, 5, 5}, 1e-4,
                                          at::kFloat);
    compare<SyncBatchNorm2d, BatchNorm2d>(r, world, options, {3, 2}, {0, 4, 5, 5}, 1e-2, at::kHalf);
    compare<SyncBatchNorm2d, BatchNorm2d>(r, world, options, {3, 2}, {0, 4, 5, 5}, 5e-2,
                                          at::kBFloat16);
    // all in half precision, parameters too
    SyncBatchNorm1d norm(4, world);
    norm->to(at::kHalf);
    const auto x = random(3, {8, 4}).to(at::kHalf).requires_grad_();
    const auto y = norm(x);
    y.sum().backward();
    EXPECT_EQ(y.scalar_type(), at::kHalf);
    EXPECT_EQ(norm->weight.grad().scalar_type(), at::kHalf);
  });
}

// Derivatives of the sum of all ranks' losses by differences.
TEST(SyncBatchNormTest, GradientsByDifferences) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    SyncBatchNorm1d norm(BatchNormOptions(2).track_running_stats(false), world);
    norm->to(at::kDouble);
    const auto x = random(static_cast<std::uint64_t>(r.id() + 1), {3, 2}, at::kDouble);
    const auto loss = [&](const at::Tensor& input) {
      const auto y = norm(input);
      return (y.pow(3) + y.sin()).sum();
    };
    const auto leaf = x.clone().requires_grad_();
    loss(leaf).backward();
    const auto expected = world.all_gather(leaf.grad());
    constexpr double kStep = 1e-6;
    for (int rank = 0; rank < 2; ++rank) {
      for (int i = 0; i < 6; ++i) {
        double ends[2];
        for (const int side : {0, 1}) {
          auto moved = x.clone();
          if (r.id() == rank) moved.view({-1})[i] += side == 0 ? -kStep : kStep;
          const auto total = loss(moved).detach().clone();
          world.all_reduce(total);
          ends[side] = total.item<double>();
        }
        EXPECT_NEAR((ends[1] - ends[0]) / (2 * kStep),
                    expected[rank].reshape({-1})[i].item<double>(), 1e-6);
      }
    }
  });
}

TEST(SyncBatchNormTest, WhatIsRefused) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    SyncBatchNorm2d norm(4, world);
    EXPECT_THAT(text_of([&] { norm(at::ones({2, 3, 1, 1})); }),
                AllOf(HasSubstr("SyncBatchNorm2d of 4 features"), HasSubstr("[2, 3, 1, 1]")));
    EXPECT_THAT(text_of([&] { norm(at::ones({2, 4})); }), HasSubstr("[2, 4]"));
    EXPECT_THAT(text_of([&] { norm(at::ones({r.id(), 4, 1, 1})); }),
                HasSubstr("more than one value per channel over all ranks"));
    const auto x = random(1, {2, 4, 1, 1}).requires_grad_();
    const auto y = norm(x).pow(2).sum();
    EXPECT_THAT(text_of([&] { torch::autograd::grad({y}, {x}, {}, true, true); }),
                HasSubstr("cannot be differentiated again"));
    EXPECT_THROW(SyncBatchNorm2d(4)->set_group({}), Error);
    std::ostringstream text;
    text << norm;
    EXPECT_THAT(text.str(), AllOf(HasSubstr("SyncBatchNorm2d(4"), HasSubstr("group=world")));
  });
}

// A Sequential inside of another must not be a template's.
struct BlockImpl : torch::nn::SequentialImpl {
  using SequentialImpl::SequentialImpl;
  at::Tensor forward(const at::Tensor& x) { return SequentialImpl::forward(x); }
};
TORCH_MODULE(Block);

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    using namespace torch::nn;
    const auto cumulative = BatchNormOptions(4).momentum(std::nullopt);
    body = register_module("body", Sequential(Conv2d(1, 4, 3), BatchNorm2d(4), ReLU(),
                                              Block(Conv2d(4, 4, 3), BatchNorm2d(cumulative))));
    head = register_module("head", SyncBatchNorm1d(4));
    fc = register_module("fc", Linear(4, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return fc(head(body->forward(x).mean({2, 3}))); }
  torch::nn::Sequential body{nullptr};
  SyncBatchNorm1d head{nullptr};
  Linear fc{nullptr};
};
TORCH_MODULE(ConvNet);

struct WithMemberImpl : torch::nn::Module {
  WithMemberImpl() : norm(register_module("norm", torch::nn::BatchNorm1d(3))) {
    sequence = register_module("sequence", torch::nn::Sequential(torch::nn::BatchNorm1d(3)));
  }
  torch::nn::BatchNorm1d norm;
  torch::nn::Sequential sequence{nullptr};
};

// Same tensors, same names, same checkpoints; with DistributedDataParallel it trains as one process
// does.
TEST(SyncBatchNormTest, ConvertsAModel) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return ConvNet(); });
    auto local = seeded(1, [] { return ConvNet(); });
    const auto before = net->named_parameters();
    net->body->eval();
    EXPECT_EQ(nn::convert_sync_batchnorm(*net, world), 3U);
    const auto after = net->named_parameters();
    ASSERT_EQ(before.size(), after.size());
    for (const auto& item : before) EXPECT_TRUE(item.value().is_same(after[item.key()]));
    EXPECT_FALSE(net->body[1]->is_training());
    net->train();
    std::ostringstream text;
    text << net;
    EXPECT_THAT(text.str(), AllOf(HasSubstr("convoy::nn::SyncBatchNorm2d(4"),
                                  testing::Not(HasSubstr("torch::nn::BatchNorm"))));

    DistributedDataParallel model(net, world);
    torch::optim::SGD sgd(net->parameters(), 0.1), local_sgd(local->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      const auto whole = random(static_cast<std::uint64_t>(step), {8, 1, 6, 6});
      sgd.zero_grad();
      model(whole.narrow(0, 4 * r.id(), 4)).pow(2).mean().backward();
      sgd.step();
      local_sgd.zero_grad();
      local(whole).pow(2).mean().backward();
      local_sgd.step();
    }
    for (const auto& item : local->named_parameters()) {
      expect_near(net->named_parameters()[item.key()], item.value(), 1e-4, item.key());
    }
    for (const auto& item : local->named_buffers()) {
      expect_near(net->named_buffers()[item.key()], item.value(), 1e-4, item.key());
    }
    std::stringstream file;
    torch::save(local, file);
    torch::load(net, file);
    expect_equal(net->body[1]->buffers()[0], local->body[1]->buffers()[0]);
  });
  run_ranks(1, [](Rank&, const ProcessGroup& world) {
    WithMemberImpl net;
    EXPECT_THAT(
        text_of([&] { nn::convert_sync_batchnorm(net, world); }),
        AllOf(HasSubstr(" is also held outside of its parent"), HasSubstr("SyncBatchNorm")));
    EXPECT_NE(net.sequence[0]->as<torch::nn::BatchNorm1d>(), nullptr);  // nothing was changed
    torch::nn::BatchNorm1d norm(2);
    EXPECT_THROW(nn::convert_sync_batchnorm(*norm, world), Error);
  });
}

// Ranks that have no more inputs do not disturb the statistics of the others.
TEST(SyncBatchNormTest, InAJoin) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    for (const BucketLaunch launch : {BucketLaunch::kEarly, BucketLaunch::kLate}) {
      auto net = seeded(1, [] { return ConvNet(); });
      auto local = seeded(1, [] { return ConvNet(); });
      nn::convert_sync_batchnorm(*net, world);
      DistributedDataParallel model(net, world, {.bucket_cap_mb = 1e-5, .launch = launch});
      torch::optim::SGD sgd(net->parameters(), 0.1), local_sgd(local->parameters(), 0.1);
      const auto batch = [](int rank, int step) { return input_of(rank, step, {4, 1, 6, 6}); };
      join({&model},
           [&] {
             for (int step = 0; step <= r.id(); ++step) {
               sgd.zero_grad();
               model(batch(r.id(), step)).pow(2).mean().backward();
               sgd.step();
             }
           },
           {.divide_by_initial_world_size = false});
      for (int step = 0; step < 3; ++step) {
        std::vector<at::Tensor> whole;
        for (int rank = step; rank < 3; ++rank) whole.push_back(batch(rank, step));
        local_sgd.zero_grad();
        local(at::cat(whole)).pow(2).mean().backward();
        local_sgd.step();
      }
      for (const auto& item : local->named_parameters()) {
        expect_near(net->named_parameters()[item.key()], item.value(), 1e-4, item.key());
      }
      expect_equal_on_all(world, net->parameters());
      expect_equal_on_all(world, net->buffers());
    }
  });
}

// test_ddp_uneven_inputs_stop_iteration_sync_bn
TEST(SyncBatchNormTest, ThrowsOnEarlyTermination) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return ConvNet(); });
    nn::convert_sync_batchnorm(*net, world);
    DistributedDataParallel model(net, world);
    int steps = 0;
    const auto text = text_of([&] {
      join({&model},
           [&] {
             for (; steps < 5 * (r.id() + 1); ++steps) {
               model(input_of(r.id(), steps, {4, 1, 6, 6})).sum().backward();
             }
           },
           {.throw_on_early_termination = true});
    });
    EXPECT_THAT(text, HasSubstr("rank 0 ran out of inputs after 5 steps"));
    EXPECT_EQ(steps, 5);
    expect_equal_on_all(world, net->buffers());
  });
}

struct Fails : torch::autograd::Function<Fails> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("the disk is full");
  }
};

// Others wait in a SyncBatchNorm for a rank whose backward fails: they hear of it, and all go on.
TEST(SyncBatchNormTest, FailedBackward) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    struct FailingImpl : torch::nn::Module {
      explicit FailingImpl(const ProcessGroup& group)
          : norm(register_module("norm", SyncBatchNorm1d(2, group))),
            fc(register_module("fc", Linear(2, 2))) {}
      at::Tensor forward(const at::Tensor& x, bool fails) {
        const auto y = norm(fc(x));
        return fails ? Fails::apply(y) : y;
      }
      SyncBatchNorm1d norm;
      Linear fc;
    };
    DistributedDataParallel model(std::make_shared<FailingImpl>(world), world);
    const auto step = [&](bool fails) {
      model->zero_grad();
      model(input_of(r.id(), 1, {4, 2}), fails).pow(2).sum().backward();
    };
    step(false);
    const auto text = text_of([&] { step(r.id() == 1); });
    EXPECT_THAT(text, HasSubstr(r.id() == 1 ? "the disk is full" : "rank 1 aborted the group"));
    step(false);
    expect_equal_on_all(world, gradients_of(*model));
  });
}

}  // namespace
}  // namespace convoy::test
