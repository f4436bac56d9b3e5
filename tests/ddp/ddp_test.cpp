// DistributedDataParallel where all goes well: scenarios 9 to 33 of ../shared/reference/ddp.md,
// each with the name of PyTorch's test.
#include <numeric>
#include <sstream>

#include "ddp/support.h"

namespace convoy::test {
namespace {

using torch::nn::Linear;

// The modes that every numeric test runs in.
struct Mode {
  std::string name;
  DdpOptions options;
};
std::vector<Mode> modes() {
  return {{"views", {.launch = Launch::kEarly}},
          {"copies", {.gradient_as_bucket_view = false, .launch = Launch::kLate}},
          {"small buckets", {.bucket_cap_mb = 0.001, .launch = Launch::kEarly}},
          {"small buckets, late", {.bucket_cap_mb = 0.001, .launch = Launch::kLate}},
          {"find_unused",
           {.bucket_cap_mb = 0.001, .find_unused_parameters = true, .launch = Launch::kEarly}},
          {"static", {.bucket_cap_mb = 0.001, .static_graph = true, .launch = Launch::kEarly}},
          {"static copies", {.static_graph = true, .gradient_as_bucket_view = false}}};
}

at::Tensor input_of(int rank, int step, at::IntArrayRef sizes = {2, 2}) {
  return random(static_cast<std::uint64_t>(100 * step + rank + 1), sizes);
}

// test_gloo_backend_cpu_module, _grad_is_view, test_DistributedDataParallelCPU: some steps with W
// ranks are the same steps of one process on the whole batch.
TEST(DdpTest, TrainsAsOneProcessOnTheWholeBatch) {
  for (const int size : {1, 2, 3}) {
    for (const Mode& mode : modes()) {
      SCOPED_TRACE(mode.name);
      run_ranks(size, [&](Rank& r, const ProcessGroup& world) {
        auto local = seeded(1, [] { return Net(true); });
        auto net = seeded(1 + static_cast<std::uint64_t>(r.id()), [] { return Net(true); });
        DistributedDataParallel model(net, world, mode.options);
        torch::optim::SGD sgd(model->parameters(), 0.1), local_sgd(local->parameters(), 0.1);
        for (int step = 0; step < 4; ++step) {
          local_sgd.zero_grad();
          std::vector<at::Tensor> batch;
          for (int i = 0; i < size; ++i) batch.push_back(input_of(i, step));
          local->forward(at::cat(batch)).pow(2).mean().backward();
          local_sgd.step();

          sgd.zero_grad();
          model(input_of(r.id(), step)).pow(2).mean().backward();
          sgd.step();
          for (std::size_t i = 0; i < net->parameters().size(); ++i) {
            expect_close(net->parameters()[i], local->parameters()[i]);
          }
          expect_equal_on_all(world, net->parameters());
        }
      });
    }
  }
}

// B18: the same bits for views and copies, and for any size of buckets, at W = 3.
TEST(DdpTest, ModesGiveTheSameBits) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    std::vector<std::vector<at::Tensor>> results;
    for (const Mode& mode : modes()) {
      auto net = seeded(7, [] { return Net(true); });
      DistributedDataParallel model(net, world, mode.options);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        model(input_of(r.id(), step)).pow(2).sum().backward();
      }
      results.push_back(gradients_of(*net));
    }
    for (const auto& result : results) {
      for (std::size_t i = 0; i < result.size(); ++i) expect_equal(result[i], results[0][i]);
    }
  });
}

// test_ddp_logging_data_cpu (the layout in it): one bucket of 2 880 bytes, filled as gradients
// come.
TEST(DdpTest, BucketsFollowTheOrderOfArrival) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    DistributedDataParallel model(net, world);
    EXPECT_TRUE(model.reducer().buckets().empty());
    model(input_of(r.id(), 0)).sum().backward();
    EXPECT_EQ(model.reducer().buckets(), (std::vector<std::vector<std::size_t>>{{2, 1, 0}}));
    EXPECT_EQ(model.reducer().stats().bytes, 2880U);
    EXPECT_EQ(model.reducer().stats().backwards, 1U);
  });
}

// CommTest.test_broadcast_coalesced_gloo_cpu
TEST(DdpTest, BroadcastCoalesced) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    for (int root = 0; root < 2; ++root) {
      std::vector<at::Tensor> tensors;
      for (int i = 0; i < 30; ++i) {
        const auto type =
            std::array{at::kFloat, at::kDouble, at::kHalf}[static_cast<std::size_t>(i) % 3];
        tensors.push_back(full(r.id() * 100 + i, {12}, type));
      }
      tensors.push_back(full(r.id(), {3, 4}).t());  // strided
      tensors.push_back(at::empty({0}));
      tensors.push_back(at::full({}, r.id() + 5, at::kLong));
      broadcast_coalesced(world, tensors, {.root = root, .chunk_bytes = 256});
      for (int i = 0; i < 30; ++i) {
        EXPECT_TRUE(tensors[static_cast<std::size_t>(i)].eq(root * 100 + i).all().item<bool>());
      }
      EXPECT_TRUE(tensors[30].eq(root).all().item<bool>());
      EXPECT_EQ(tensors[32].item<int>(), root + 5);
    }
    EXPECT_THROW(broadcast_coalesced(world, {}, {.root = 2}), Error);
  });
}

struct SharedWeightImpl : torch::nn::Module {
  SharedWeightImpl() : p(register_parameter("p", at::ones({64, 64}))) {}
  at::Tensor forward(const at::Tensor& x) { return (p * x + p).sum(); }
  at::Tensor p;
};
TORCH_MODULE(SharedWeight);

// test_ddp_weight_sharing: used twice, gradient rank + 1 each: (W + 1) everywhere.
TEST(DdpTest, AParameterUsedTwice) {
  for (const Mode& mode : modes()) {
    for (const bool to_none : {true, false}) {
      SCOPED_TRACE(mode.name);
      run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
        SharedWeight net;
        DistributedDataParallel model(net, world, mode.options);
        for (int step = 0; step < 3; ++step) {
          net->zero_grad(to_none);
          (model(at::ones({64, 64})) * (r.id() + 1)).backward();
          expect_equal(net->p.grad(), full(3, {64, 64}));
        }
      });
    }
  }
}

// A module registered under two names is one set of parameters, which know both.
TEST(DdpTest, SharedModuleIsOneParameterWithTwoNames) {
  struct TwiceImpl : torch::nn::Module {
    TwiceImpl() : one(register_module("one", Linear(4, 4))) { register_module("two", one); }
    at::Tensor forward(const at::Tensor& x) { return one(one(x)); }
    Linear one;
  };
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(3, [] { return std::make_shared<TwiceImpl>(); });
    auto local = seeded(3, [] { return std::make_shared<TwiceImpl>(); });
    DistributedDataParallel model(net, world);
    EXPECT_EQ(model.reducer().parameters().size(), 2U);
    const auto loss = [](auto& module, int rank) {
      return module.forward(random(static_cast<std::uint64_t>(rank), {3, 4})).pow(2).sum();
    };
    loss(model, r.id()).backward();
    const auto expected = mean_gradients(*local, 2, loss);
    expect_close(net->one->weight.grad(), expected[0]);
  });
}

// test_ddp_complex_params
TEST(DdpTest, ComplexParameters) {
  struct FftImpl : torch::nn::Module {
    FftImpl()
        : w(register_parameter("w",
                               at::view_as_complex(random(5, {4, 4, 8, 5, 2}) * 0.02).clone())) {}
    at::Tensor forward(const at::Tensor& x) {
      return torch::fft::irfft2(torch::fft::rfft2(x) * w, at::IntArrayRef({8, 8}), {-2, -1},
                                "ortho");
    }
    at::Tensor w;
  };
  for (const Mode& mode : modes()) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = std::make_shared<FftImpl>();
      auto local = std::make_shared<FftImpl>();
      DistributedDataParallel model(net, world, mode.options);
      const auto loss = [](auto& module, int rank) {
        return module.forward(random(static_cast<std::uint64_t>(rank), {4, 4, 8, 8})).pow(2).mean();
      };
      for (int step = 0; step < 2; ++step) {
        net->zero_grad();
        loss(model, r.id()).backward();
        expect_gradients(*net, mean_gradients(*local, 2, loss));
      }
    });
  }
}

// Layouts of 2.7 and mixed types: channels last, transposed, with holes, half and double.
TEST(DdpTest, AnyLayoutAndType) {
  struct MixedImpl : torch::nn::Module {
    MixedImpl() {
      conv = register_parameter("conv",
                                random(1, {4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
      turned = register_parameter("turned", random(2, {3, 5}).t());
      wide = register_parameter("wide", random(3, {6}, at::kDouble));
      narrow = register_parameter("narrow", random(4, {7}).to(at::kBFloat16));
      empty = register_parameter("empty", at::empty({0, 3}));
      holes = register_parameter("holes", random(5, {3, 8}).narrow(1, 2, 4));
    }
    at::Tensor forward(double x) {
      return (conv * x).pow(2).sum() + (turned * x).pow(3).sum() + (wide * x).pow(2).sum() +
             (narrow * x).pow(2).sum() + (empty * x).sum() + (holes * x).pow(2).sum();
    }
    at::Tensor conv, turned, wide, narrow, empty, holes;
  };
  for (const Mode& mode : modes()) {
    SCOPED_TRACE(mode.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = std::make_shared<MixedImpl>();
      auto local = std::make_shared<MixedImpl>();
      DistributedDataParallel model(net, world, mode.options);
      const auto loss = [](auto& module, int rank) { return module.forward(1.0 + rank); };
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        loss(model, r.id()).backward();
        const auto expected = mean_gradients(*local, 2, loss);
        expect_gradients(*net, expected);
      }
      EXPECT_EQ(net->conv.grad().strides(), net->conv.strides());
      EXPECT_EQ(net->turned.grad().strides(), net->turned.strides());
    });
  }
}

// test_ddp_zero_output_features
TEST(DdpTest, ZeroOutputFeatures) {
  run_ranks(2, [](Rank&, const ProcessGroup& world) {
    DistributedDataParallel model(Linear(10, 0), world);
    model(at::ones({2, 10})).sum().backward();
    EXPECT_EQ(model->weight.grad().sizes(), model->weight.sizes());
  });
}

// test_no_grad
TEST(DdpTest, ForwardWithoutGradients) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    DistributedDataParallel model(Net(), world);
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(model(input_of(r.id(), 0)).requires_grad());
    for (const auto& p : model->parameters()) EXPECT_FALSE(p.grad().defined());
  });
}

// test_ddp_inference: rank 0 alone, in evaluation, also of a model with buffers.
TEST(DdpTest, OneRankEvaluatesAlone) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] {
      return torch::nn::Sequential(Linear(2, 4), torch::nn::BatchNorm1d(4), Linear(4, 2));
    });
    DistributedDataParallel model(net, world);
    model(input_of(r.id(), 0, {4, 2})).sum().backward();
    net->eval();
    if (r.id() == 0) {
      for (int i = 0; i < 6; ++i) {
        const auto x = input_of(0, i, {4, 2});
        expect_equal(model(x), net->forward(x));
      }
    }
    net->train();
    world.barrier();
    model(input_of(r.id(), 1, {4, 2})).sum().backward();
    expect_equal_on_all(world, gradients_of(*net));
  });
}

// test_ddp_returns_tensor_with_no_grad
TEST(DdpTest, AnOutputWithoutGradientStaysSo) {
  struct TwoImpl : torch::nn::Module {
    TwoImpl() : fc(register_module("fc", Linear(10, 10))) {}
    std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
      const auto y = fc(x);
      return {y.detach(), y.clone()};
    }
    Linear fc;
  };
  for (const Mode& mode : modes()) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      DistributedDataParallel model(std::make_shared<TwoImpl>(), world, mode.options);
      for (int i = 0; i < 6; ++i) {
        const auto [x, y] = model(random(static_cast<std::uint64_t>(r.id()), {2, 10}));
        EXPECT_FALSE(x.requires_grad());
        EXPECT_TRUE(y.requires_grad());
        (x + y).sum().backward();
      }
    });
  }
}

// test_save_load_checkpoint: what is saved is the module's, and loads into the bare module and
// back.
TEST(DdpTest, SavedAndLoadedAsTheBareModule) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    auto whole = seeded(1, [] { return Net(); });
    DistributedDataParallel model(net, world), undisturbed(whole, world);
    const auto train = [&](auto& one, int from, int to) {
      torch::optim::SGD sgd(one->parameters(), 0.1);
      for (int step = from; step < to; ++step) {
        sgd.zero_grad();
        one(input_of(r.id(), step)).pow(2).sum().backward();
        sgd.step();
      }
    };
    train(undisturbed, 0, 6);
    train(model, 0, 3);
    std::stringstream bytes, bare_bytes;
    torch::save(model, bytes);
    torch::save(net, bare_bytes);
    auto bare = seeded(2, [] { return Net(); });
    torch::load(bare, bytes);
    DistributedDataParallel loaded(seeded(3, [] { return Net(); }), world);
    torch::load(loaded, bare_bytes);
    train(loaded, 3, 6);
    DistributedDataParallel wrapped(bare, world);
    train(wrapped, 3, 6);
    for (std::size_t i = 0; i < whole->parameters().size(); ++i) {
      expect_equal(loaded->parameters()[i], whole->parameters()[i]);
      expect_equal(bare->parameters()[i], whole->parameters()[i]);
    }
  });
}

// --- accumulation ---

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
    Reducer reducer({a, b}, world, {.names = {"a", "b"}});
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
