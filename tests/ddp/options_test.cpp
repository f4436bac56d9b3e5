// Buffers, options and the reducer by itself: scenarios 33, 62, 64 of ../shared/reference/ddp.md,
// B9, B11, B17.
#include <numeric>

#include "ddp/support.h"

namespace convoy::test {
namespace {

using testing::HasSubstr;
using torch::nn::Linear;

// --- buffers ---

// test_ddp_buffer_sync_multi_forward_with_batchnorm
TEST(DdpTest, TwoForwardsThroughBatchNorm) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net =
        seeded(1, [] { return torch::nn::Sequential(Linear(10, 10), torch::nn::BatchNorm1d(10)); });
    DistributedDataParallel model(net, world);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const auto a = model(input_of(r.id(), step, {8, 10}));
      const auto b = model(input_of(r.id(), step + 9, {8, 10}));
      (a + b).pow(2).sum().backward();
      expect_equal_on_all(world, gradients_of(*net));
    }
  });
}

struct BufferedImpl : torch::nn::Module {
  BufferedImpl()
      : fc(register_module("fc", Linear(2, 2))), scale(register_buffer("scale", at::ones({2}))) {}
  at::Tensor forward(const at::Tensor& x) { return fc(x * scale); }
  Linear fc;
  at::Tensor scale;
};

// test_ddp_broadcast_buffer
TEST(DdpTest, BuffersBecomeRankZeros) {
  for (const auto when : {BufferSync::kBeforeForward, BufferSync::kAfterForward}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = std::make_shared<BufferedImpl>();
      net->scale.fill_(r.id() + 1);
      DistributedDataParallel model(net, world, {.buffer_sync = when});
      expect_equal(net->scale, full(1, {2}));
      for (int step = 0; step < 2; ++step) {
        if (r.id() == 0) net->scale.add_(1);
        model(input_of(r.id(), step)).sum().backward();
        expect_equal(net->scale, full(step + 2, {2}));
      }
    });
  }
}

// test_ddp_init_sync_buffers_with_forward_sync_buffers_false
TEST(DdpTest, BuffersStayOwn) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = std::make_shared<BufferedImpl>();
    net->scale.fill_(r.id() + 1);
    DistributedDataParallel model(net, world, {.forward_sync_buffers = false});
    expect_equal(net->scale, full(1, {2}));
    if (r.id() == 0) net->scale.add_(1);
    model(input_of(r.id(), 0)).sum().backward();
    expect_equal(net->scale, full(r.id() == 0 ? 2 : 1, {2}));
    model.sync_buffers();
    expect_equal(net->scale, full(2, {2}));
  });
}

TEST(DdpTest, BufferHook) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = std::make_shared<BufferedImpl>();
    DistributedDataParallel model(net, world);
    model.register_buffer_hook([](const ProcessGroup& group, const NamedTensors& buffers) {
      ASSERT_EQ(buffers.size(), 1U);
      EXPECT_EQ(buffers[0].first, "scale");
      group.all_reduce(buffers[0].second, {.op = ReduceOp::kAvg});
    });
    net->scale.fill_(2 * r.id());
    model(input_of(r.id(), 0)).sum().backward();
    expect_equal(net->scale, full(1, {2}));
    EXPECT_THROW(model.register_buffer_hook([](const auto&, const auto&) {}), Error);
  });
}

// B17: a buffer that a graph has saved, overwritten by the next forward's broadcast, is noticed.
TEST(DdpTest, ASavedBufferThatChangesIsNoticed) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = std::make_shared<BufferedImpl>();
    DistributedDataParallel model(net, world);
    // rank 1's gradient of fc needs the buffer that was
    const auto first = model(input_of(r.id(), 0).requires_grad_());
    if (r.id() == 0) {
      const torch::NoGradGuard no_grad;
      net->scale.copy_(full(5, {2}));
    }
    const auto second = model(input_of(r.id(), 1));
    const auto text = text_of([&] { (first + second).sum().backward(); });
    EXPECT_THAT(text, testing::HasSubstr("modified by an inplace operation"));
  });
}

// --- options ---

// init_sync = false: ranks keep what they have.
TEST(DdpTest, NoInitSync) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    Linear net(2, 2);
    {
      const torch::NoGradGuard no_grad;
      net->weight.fill_(r.id());
    }
    DistributedDataParallel model(net, world, {.init_sync = false});
    expect_equal(net->weight.detach(), full(r.id(), {2, 2}));
  });
}

// B9: names at the root, and under modules; ignored ones keep their values and gradients.
TEST(DdpTest, IgnoredNames) {
  struct RootImpl : torch::nn::Module {
    RootImpl() : fc(register_module("fc", Linear(2, 2))) {
      w = register_parameter("w", at::ones({2}));
      mark = register_buffer("mark", at::ones({2}));
    }
    at::Tensor forward(const at::Tensor& x) { return fc(x * w) * mark; }
    Linear fc{nullptr};
    at::Tensor w, mark;
  };
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return std::make_shared<RootImpl>(); });
    {
      const torch::NoGradGuard no_grad;
      net->w.fill_(r.id() + 1);
      net->mark.fill_(r.id() + 1);
      net->fc->bias.fill_(r.id() + 1);
    }
    DistributedDataParallel model(net, world, {.ignore = {"w", "mark", "fc.bias"}});
    EXPECT_EQ(model.reducer().parameters().size(), 1U);
    model(at::ones({1, 2})).sum().backward();
    expect_equal(net->w.detach(), full(r.id() + 1, {2}));
    expect_equal(net->mark, full(r.id() + 1, {2}));
    expect_equal(net->fc->bias.grad(), full(r.id() + 1, {2}));
    // x * w * mark: (1 * 1 + 2 * 2) / 2
    expect_equal(net->fc->weight.grad(), full(2.5, {2, 2}));
  });
}

TEST(DdpTest, DelayedParametersTravelLast) {
  for (const Mode& mode : modes()) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return Net(); });
      auto local = seeded(1, [] { return Net(); });
      auto options = mode.options;
      options.delay_all_reduce_named_params = {"fc3.weight", "fc2.weight"};
      DistributedDataParallel model(net, world, options);
      const auto loss = [](auto& module, int rank) {
        return module.forward(input_of(rank, 0)).pow(2).sum();
      };
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        loss(model, r.id()).backward();
        expect_gradients(*net, mean_gradients(*local, 2, loss));
      }
      const auto buckets = model.reducer().buckets();
      EXPECT_EQ(buckets.front(), (std::vector<std::size_t>{0}));
      for (std::size_t b = 1; b < buckets.size(); ++b) {
        for (const std::size_t i : buckets[b]) EXPECT_NE(i, 0U);
      }
      // nothing but delayed ones
      options.delay_all_reduce_named_params.emplace_back("fc1.weight");
      DistributedDataParallel all(seeded(1, [] { return Net(); }), world, options);
      loss(all, r.id()).backward();
      expect_equal_on_all(world, gradients_of(*all));
    });
  }
}

TEST(DdpTest, SumAndWeights) {
  for (const bool views : {true, false}) {
    run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
      SharedWeight net;
      const double x = r.id() + 1;
      DistributedDataParallel sum(net, world,
                                  {.gradient_as_bucket_view = views, .reduce = GradReduce::kSum});
      // Accumulated over backwards: what was summed is not summed again.
      for (int i = 1; i <= 2; ++i) {
        (sum(at::ones({64, 64})) * x).backward();
        expect_close(net->p.grad(), full(12 * i, {64, 64}));
      }
      sum.sync_gradients();
      expect_close(net->p.grad(), full(24, {64, 64}));
      {
        const auto scope = sum.no_sync();
        (sum(at::ones({64, 64})) * x).backward();
      }
      (sum(at::ones({64, 64})) * x).backward();
      expect_close(net->p.grad(), full(48, {64, 64}));
      // What was set aside is gone with the gradient.
      {
        const auto scope = sum.no_sync();
        (sum(at::ones({64, 64})) * x).backward();
      }
      net->zero_grad();
      (sum(at::ones({64, 64})) * x).backward();
      expect_close(net->p.grad(), full(12, {64, 64}));
      // The module itself adds to a sum: that cannot be told apart any more.
      (net->forward(at::ones({64, 64})) * x).backward();
      EXPECT_THAT(text_of([&] { (sum(at::ones({64, 64})) * x).backward(); }),
                  testing::HasSubstr("was a sum over ranks already"));
      net->zero_grad(/*set_to_none=*/false);
      (sum(at::ones({64, 64})) * x).backward();
      expect_close(net->p.grad(), full(12, {64, 64}));
      net->zero_grad();
      SharedWeight other;
      DistributedDataParallel weighted(
          other, world, {.gradient_as_bucket_view = views, .reduce = GradReduce::weighted(1)});
      for (const double scale : {1.0, 10.0}) {
        other->zero_grad();
        weighted.set_reduce(GradReduce::weighted(scale * x));
        (weighted(at::ones({64, 64})) * x).backward();
        // (1 * 2 + 2 * 4 + 3 * 6) / 6
        expect_close(other->p.grad(), full(28.0 / 6, {64, 64}));
      }
      EXPECT_THROW(weighted.set_reduce(GradReduce::weighted(-1)), Error);
    });
  }
}

// Freezing and thawing after wrapping, on all ranks alike.
TEST(DdpTest, FreezeAndThaw) {
  for (const Mode& mode : modes()) {
    if (mode.options.static_graph) continue;
    SCOPED_TRACE(mode.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return Net(); });
      auto local = seeded(1, [] { return Net(); });
      net->fc1->weight.requires_grad_(false);
      DistributedDataParallel model(net, world, mode.options);
      const auto loss = [](auto& module, int rank) {
        return module.forward(input_of(rank, 0)).pow(2).sum();
      };
      const auto expect = [&] {
        net->zero_grad();
        loss(model, r.id()).backward();
        for (const auto& [a, b] : {std::pair{net->fc1, local->fc1}, {net->fc2, local->fc2}}) {
          b->weight.requires_grad_(a->weight.requires_grad());
        }
        expect_gradients(*net, mean_gradients(*local, 2, loss));
      };
      expect();
      expect();
      net->fc1->weight.requires_grad_(true);
      expect();
      expect();
      net->fc2->weight.requires_grad_(false);
      expect();
      net->fc2->weight.requires_grad_(true);
      expect();
    });
  }
}

// Sparse gradients of embeddings, also where a rank, or every rank, has none (B11).
TEST(DdpTest, SparseGradients) {
  struct BagImpl : torch::nn::Module {
    BagImpl()
        : table(register_module("table", torch::nn::EmbeddingBag(
                                             torch::nn::EmbeddingBagOptions(10, 3).sparse(true)))),
          fc(register_module("fc", Linear(3, 3))) {}
    at::Tensor forward(const at::Tensor& x, bool uses_table) {
      return fc(uses_table ? table(x) : at::ones({x.size(0), 3})).pow(2).sum();
    }
    torch::nn::EmbeddingBag table;
    Linear fc;
  };
  for (const bool views : {true, false}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return std::make_shared<BagImpl>(); });
      auto local = seeded(1, [] { return std::make_shared<BagImpl>(); });
      DistributedDataParallel model(
          net, world, {.find_unused_parameters = true, .gradient_as_bucket_view = views});
      for (int users = 2; users >= 0; --users) {  // both, rank 0 alone, nobody
        net->zero_grad();
        const auto loss = [&](auto& module, int rank) {
          return module.forward(at::arange(rank, rank + 4).view({2, 2}), rank < users);
        };
        loss(model, r.id()).backward();
        auto expected = mean_gradients(*local, 2, loss);
        if (expected[0].defined()) {
          ASSERT_TRUE(net->table->weight.grad().is_sparse());
          expect_close(net->table->weight.grad().to_dense(), expected[0].to_dense());
        } else {
          EXPECT_FALSE(net->table->weight.grad().defined());
        }
        expect_close(net->fc->weight.grad(), expected[1]);
      }
    });
  }
}

// torch::data's distributed samplers give each rank its part: one pass is one pass of one process.
TEST(DdpTest, DistributedSampler) {
  struct Numbers : torch::data::datasets::Dataset<Numbers> {
    torch::data::Example<> get(std::size_t index) override {
      const auto value = static_cast<std::uint64_t>(index);
      return {random(value, {2}), random(value + 100, {4})};
    }
    std::optional<std::size_t> size() const override { return 16; }
  };
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    auto local = seeded(1, [] { return Net(); });
    DistributedDataParallel model(net, world);
    const auto whole = Numbers().map(torch::data::transforms::Stack<>()).get_batch([] {
      std::vector<std::size_t> all(16);
      std::iota(all.begin(), all.end(), std::size_t{0});
      return all;
    }());
    torch::mse_loss(local->forward(whole.data), whole.target).backward();

    auto loader = torch::data::make_data_loader(
        Numbers().map(torch::data::transforms::Stack<>()),
        torch::data::samplers::DistributedSequentialSampler(
            16, static_cast<std::size_t>(world.size()), static_cast<std::size_t>(r.id())),
        torch::data::DataLoaderOptions(8));
    int batches = 0;
    for (const auto& batch : *loader) {
      ++batches;
      torch::mse_loss(model(batch.data), batch.target).backward();
    }
    EXPECT_EQ(batches, 1);
    expect_gradients(*net, gradients_of(*local));
  });
}

// The reducer by itself, for lists of parameters.
TEST(ReducerTest, AListOfParameters) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto a = at::ones({3}).requires_grad_(), b = at::ones({2}, at::kDouble).requires_grad_();
    Reducer reducer({a, b}, world, {}, {.names = {"a", "b"}});
    for (int step = 0; step < 3; ++step) {
      for (auto& p : {a, b}) p.mutable_grad().reset();
      const auto out = reducer.prepare_for_backward({(a * (r.id() + 1)).sum(), b.sum()});
      (out[0] + out[1] * 2).backward();
      expect_equal(a.grad(), full(1.5, {3}));
      expect_equal(b.grad(), full(2, {2}, at::kDouble));
    }
    Reducer other = std::move(reducer);
    const auto out = other.prepare_for_backward({(a * (r.id() + 1)).sum(), b.sum()});
    (out[0] + out[1]).backward();
    expect_equal(a.grad(), full(3, {3}));
  });
}

// Hooks go with the reducer: the module can be wrapped again, and graphs that remain are harmless.
TEST(ReducerTest, OptionsThatNeedAModule) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto a = at::ones({3}).requires_grad_();
    const auto refused = [&](const DdpOptions& options) {
      return text_of([&] { Reducer({a}, world, options); });
    };
    EXPECT_THAT(refused({.ignore = {"a"}}), HasSubstr("option ignore needs a module"));
    EXPECT_THAT(refused({.delay_all_reduce_named_params = {"a"}}), HasSubstr("needs a module"));
    EXPECT_THAT(refused({.parameter_groups = {{{"a"}, world}}}), HasSubstr("needs a module"));
    EXPECT_THAT(refused({.mixed_precision = MixedPrecision{.buffer_dtype = at::kHalf}}),
                HasSubstr("needs a module"));
    // What is reduced, but not what is computed.
    Reducer reducer({a}, world, {.mixed_precision = MixedPrecision{.reduce_dtype = at::kBFloat16}});
    const auto out = reducer.prepare_for_backward({a * (r.id() == 0 ? 1.0009765625 : 1)})[0];
    out.sum().backward();
    expect_equal(a.grad(), at::ones({3}));  // 1.0009765625 is 1 in this type
  });
}

TEST(ReducerTest, WrappedAgain) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    SharedWeight net;
    at::Tensor old;
    {
      DistributedDataParallel model(net, world);
      old = model(at::ones({64, 64})) * (r.id() + 1);
    }
    old.backward();
    expect_equal(net->p.grad(), full(2 * (r.id() + 1), {64, 64}));
    DistributedDataParallel model(net, world);
    net->zero_grad();
    (model(at::ones({64, 64})) * (r.id() + 1)).backward();
    expect_equal(net->p.grad(), full(3, {64, 64}));
  });
}

}  // namespace
}  // namespace convoy::test
