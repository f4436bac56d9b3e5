// Several forwards and backwards: scenarios 25 to 31 of ../shared/reference/ddp.md, B2.
#include "ddp/support.h"

namespace convoy::test {
namespace {

using torch::nn::Linear;

// test_accumulate_gradients_no_sync, _grad_is_view: local after the first, reduced after the
// second.
TEST(DdpTest, NoSync) {
  for (const Mode& mode : modes()) {
    SCOPED_TRACE(mode.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return Net(); });
      auto local = seeded(1, [] { return Net(); });
      DistributedDataParallel model(net, world, mode.options);
      const auto loss = [](auto& module, int rank, int step) {
        return module.forward(input_of(rank, step)).pow(2).sum();
      };
      for (int step = 0; step < 4; step += 2) {
        net->zero_grad();
        {
          const auto scope = model.no_sync();
          loss(model, r.id(), step).backward();
        }
        local->zero_grad();
        loss(*local, r.id(), step).backward();
        expect_gradients(*net, gradients_of(*local));
        loss(model, r.id(), step + 1).backward();
        expect_gradients(*net, mean_gradients(*local, 2, [&](auto& module, int rank) {
          return loss(module, rank, step) + loss(module, rank, step + 1);
        }));
        expect_equal_on_all(world, gradients_of(*net));
      }
    });
  }
}

// Weakness 8: read when backward runs, whatever it was at forward.
TEST(DdpTest, NoSyncIsReadAtBackward) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    SharedWeight net;
    DistributedDataParallel model(net, world);
    auto loss = model(at::ones({64, 64})) * (r.id() + 1);
    {
      const auto scope = model.no_sync();
      loss.backward();
    }
    expect_equal(net->p.grad(), full(2 * (r.id() + 1), {64, 64}));
    net->zero_grad();
    {
      const auto scope = model.no_sync();
      loss = model(at::ones({64, 64})) * (r.id() + 1);
    }
    loss.backward();
    expect_equal(net->p.grad(), full(3, {64, 64}));
  });
}

// The usual loop: one scope in each step, which counts in all but the last.
TEST(DdpTest, NoSyncByStep) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    SharedWeight net;
    DistributedDataParallel model(net, world);
    for (int step = 0; step < 4; ++step) {
      const auto scope = model.no_sync(step % 2 == 0);
      EXPECT_EQ(model.reducer().is_paused(), step % 2 == 0);
      (model(at::ones({64, 64})) * (r.id() + 1)).backward();
      // 2 for each use, times rank + 1; with the second one the mean of both ranks, 1.5.
      expect_equal(net->p.grad(), full(step % 2 == 0 ? 2 * (r.id() + 1) : 6, {64, 64}));
      if (step % 2 != 0) net->zero_grad();
    }
    EXPECT_FALSE(model.reducer().is_paused());
  });
}

// Weakness 8: reduce what was accumulated, with no further backward.
TEST(DdpTest, SyncGradients) {
  for (const Mode& mode : modes()) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      SharedWeight net;
      DistributedDataParallel model(net, world, mode.options);
      for (int round = 0; round < 3; ++round) {
        net->zero_grad();
        {
          const auto scope = model.no_sync();
          for (int i = 0; i < 2; ++i) (model(at::ones({64, 64})) * (r.id() + 1)).backward();
        }
        expect_equal(net->p.grad(), full(4 * (r.id() + 1), {64, 64}));
        model.sync_gradients();
        expect_equal(net->p.grad(), full(6, {64, 64}));
      }
    });
  }
}

// test_accumulate_gradients_module: the inner module on even iterations, the wrapper on odd ones.
TEST(DdpTest, InnerModuleAccumulates) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    auto local = seeded(1, [] { return Net(); });
    DistributedDataParallel model(net, world);
    const auto loss = [](auto& module, int rank, int step) {
      return module.forward(input_of(rank, step)).pow(2).sum();
    };
    for (int step = 0; step < 4; step += 2) {
      net->zero_grad();
      loss(*net, r.id(), step).backward();
      local->zero_grad();
      loss(*local, r.id(), step).backward();
      expect_gradients(*net, gradients_of(*local));
      loss(model, r.id(), step + 1).backward();
      expect_gradients(*net, mean_gradients(*local, 2, [&](auto& module, int rank) {
        return loss(module, rank, step) + loss(module, rank, step + 1);
      }));
    }
  });
}

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() : a(register_module("a", Linear(4, 4))), b(register_module("b", Linear(4, 4))) {}
  std::vector<at::Tensor> forward(const at::Tensor& x) { return {a(x), b(x)}; }
  Linear a, b;
};

// test_multiple_outputs_multiple_backward: both together are one reduction.
TEST(DdpTest, TwoOutputsTwoBackwards) {
  for (const Mode& mode : modes()) {
    if (mode.options.static_graph) continue;  // two backwards of one forward are two graphs
    SCOPED_TRACE(mode.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return std::make_shared<TwoHeadsImpl>(); });
      auto local = seeded(1, [] { return std::make_shared<TwoHeadsImpl>(); });
      DistributedDataParallel model(net, world, mode.options);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        const auto outputs = model(input_of(r.id(), step, {3, 4}));
        outputs[0].pow(2).sum().backward();
        outputs[1].pow(3).sum().backward();
        expect_gradients(*net, mean_gradients(*local, 2, [&](auto& module, int rank) {
          const auto both = module.forward(input_of(rank, step, {3, 4}));
          return both[0].pow(2).sum() + both[1].pow(3).sum();
        }));
      }
    });
  }
}

// test_ignored_output: forwards whose outputs are dropped leave no trace.
TEST(DdpTest, IgnoredOutputs) {
  for (const Mode& mode : modes()) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      DistributedDataParallel model(seeded(1, [] { return Net(); }), world, mode.options);
      for (int i = 0; i < 4; ++i) std::ignore = model(input_of(r.id(), i));
      for (int i = 0; i < 4; ++i) {
        model->zero_grad();
        model(input_of(r.id(), i)).sum().backward();
        expect_equal_on_all(world, gradients_of(*model));
      }
    });
  }
}

// Several forwards, one backward over their sum.
TEST(DdpTest, SeveralForwardsOneBackward) {
  for (const Mode& mode : modes()) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return Net(); });
      auto local = seeded(1, [] { return Net(); });
      DistributedDataParallel model(net, world, mode.options);
      const auto loss = [](auto& module, int rank) {
        return module.forward(input_of(rank, 0)).pow(2).sum() +
               module.forward(input_of(rank, 1)).pow(2).sum();
      };
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        loss(model, r.id()).backward();
        expect_gradients(*net, mean_gradients(*local, 2, loss));
      }
    });
  }
}

// B2: two forwards and two backwards, and one graph back-propagated twice: every one is reduced
// (PyTorch reduces the first and lets ranks drift apart: 2.5 and 3.5 instead of 3).
TEST(DdpTest, EveryBackwardIsReduced) {
  for (const Mode& mode : modes()) {
    SCOPED_TRACE(mode.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      SharedWeight net;
      DistributedDataParallel model(net, world, mode.options);
      auto first = model(at::ones({64, 64})) * (r.id() + 1);
      auto second = model(at::ones({64, 64})) * (r.id() + 1);
      first.backward();
      second.backward();
      expect_equal(net->p.grad(), full(6, {64, 64}));
      net->zero_grad();
      auto twice = model(at::ones({64, 64})) * (r.id() + 1);
      twice.backward({}, /*retain_graph=*/true);
      twice.backward();
      expect_equal(net->p.grad(), full(6, {64, 64}));
    });
  }
}

// test_ddp_create_graph; and a loss made of gradients has the right ones itself.
TEST(DdpTest, CreateGraph) {
  struct PowerImpl : torch::nn::Module {
    PowerImpl() : p(register_parameter("p", at::full({1}, 3.0, at::kDouble))) {}
    at::Tensor forward(double x) { return p.pow(3) * x; }
    at::Tensor p;
  };
  for (const Mode& mode : modes()) {
    SCOPED_TRACE(mode.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = std::make_shared<PowerImpl>();
      DistributedDataParallel model(net, world, mode.options);
      for (int step = 0; step < 6; ++step) {
        net->zero_grad();
        model(r.id() + 1.0).backward({}, std::nullopt, /*create_graph=*/true);
        // mean of 3 p^2 x over x = 1, 2
        EXPECT_DOUBLE_EQ(net->p.grad().item<double>(), 3 * 9 * 1.5);
        const auto gradient = net->p.grad();
        EXPECT_TRUE(gradient.requires_grad());
        expect_equal_on_all(world, {gradient});
        net->zero_grad();
        // d/dp (mean gradient)^2 = 2 * 40.5 * 6 p * 1.5
        gradient.pow(2).backward();
        EXPECT_DOUBLE_EQ(net->p.grad().item<double>(), 2 * 40.5 * 6 * 3 * 1.5);
      }
    });
  }
}

// autograd::grad computes no parameter's gradient: nothing is reduced, nothing is missing.
TEST(DdpTest, AutogradGradStaysLocal) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    DistributedDataParallel model(net, world);
    auto x = input_of(r.id(), 0).requires_grad_();
    const auto loss = model(x).pow(2).sum();
    if (r.id() == 0) {
      EXPECT_TRUE(torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0].defined());
      EXPECT_TRUE(torch::autograd::grad({loss}, {net->fc1->weight})[0].defined());
    }
    for (const auto& p : net->parameters()) EXPECT_FALSE(p.grad().defined());
    model(x).sum().backward();
    expect_equal_on_all(world, gradients_of(*net));
  });
}

// A loss made of gradients (a penalty on them): its backward goes around the sink, and is reduced.
TEST(DdpTest, GradientPenalty) {
  for (const Mode& mode : modes()) {
    SCOPED_TRACE(mode.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return Net(); });
      auto local = seeded(1, [] { return Net(); });
      DistributedDataParallel model(net, world, mode.options);
      const auto loss = [](auto& module, int rank) {
        auto x = input_of(rank, 0).requires_grad_();
        const auto gradient =
            torch::autograd::grad({module.forward(x).pow(2).sum()}, {x}, {},
                                  /*retain_graph=*/true, /*create_graph=*/true)[0];
        return (gradient.pow(2).sum() - 1).pow(2);
      };
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        loss(model, r.id()).backward();
        expect_gradients(*net, mean_gradients(*local, 2, loss));
        expect_equal_on_all(world, gradients_of(*net));
      }
    });
  }
}

// Two models in one backward, on one group. Ranks that come to them in another order are told.
TEST(DdpTest, TwoModels) {
  for (const Mode& mode : modes()) {
    SCOPED_TRACE(mode.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto a = seeded(1, [] { return Net(); }), b = seeded(2, [] { return Net(); });
      DistributedDataParallel first(a, world, mode.options), second(b, world, mode.options);
      for (int step = 0; step < 3; ++step) {
        a->zero_grad();
        b->zero_grad();
        const auto x = input_of(r.id(), step);
        if (step == 1) {
          const auto mixed = r.id() == 0 ? first(x) + second(x) : second(x) + first(x);
          EXPECT_THAT(text_of([&] { mixed.pow(2).sum().backward(); }),
                      testing::HasSubstr("another model's backward"));
          continue;
        }
        (first(x) + second(x)).pow(2).sum().backward();
        expect_equal_on_all(world, gradients_of(*a));
        expect_equal_on_all(world, gradients_of(*b));
      }
    });
  }
}

// Gradients that somebody else has computed, or moved.
TEST(DdpTest, GradientsOfTheUser) {
  for (const bool views : {true, false}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      SharedWeight net;
      DistributedDataParallel model(net, world, {.gradient_as_bucket_view = views});
      for (int round = 0; round < 3; ++round) {
        net->p.mutable_grad() = full(r.id() + 1, {64, 64});
        model.sync_gradients();
        expect_equal(net->p.grad(), full(1.5, {64, 64}));
        model.sync_gradients();  // of what is reduced already
        expect_equal(net->p.grad(), full(1.5, {64, 64}));
        net->p.mutable_grad().set_data(full(10, {64, 64}));
        (model(at::ones({64, 64})) * (r.id() + 1)).backward();
        expect_equal(net->p.grad(), full(13, {64, 64}));
      }
    });
  }
}

// Ranks may accumulate over different numbers of batches.
TEST(DdpTest, UnevenAccumulation) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    SharedWeight net;
    DistributedDataParallel model(net, world, {.reduce = GradReduce::weighted(1)});
    for (int round = 0; round < 2; ++round) {
      net->zero_grad();
      const int batches = r.id() + 1;
      model.set_reduce(GradReduce::weighted(batches));
      for (int i = 0; i < batches; ++i) {
        const auto scope = model.no_sync();
        (model(at::ones({64, 64})) / batches).backward();
      }
      model.sync_gradients();
      expect_close(net->p.grad(), full(2, {64, 64}));
    }
  });
}

}  // namespace
}  // namespace convoy::test
