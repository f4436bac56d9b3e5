// DistributedDataParallel where all goes well: scenarios 9 to 24 of ../shared/reference/ddp.md,
// each with the name of PyTorch's test.
#include <sstream>

#include "ddp/support.h"

namespace convoy::test {
namespace {

using torch::nn::Linear;

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

}  // namespace
}  // namespace convoy::test
