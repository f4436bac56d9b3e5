// Ranks that differ, fail or die: scenarios 20, 39, 51, 52, 72 of ../shared/reference/ddp.md, B12,
// B13, B15.
#include <csignal>

#include "ddp/support.h"

namespace convoy::test {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using torch::nn::Linear;

// Making the model must fail on every rank with a text that holds these.
template <class Make, class... Texts>
void expect_refused(Make make, const Texts&... texts) {
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    const auto text = text_of([&] { make(r.id(), world); });
    EXPECT_THAT(text, AllOf(HasSubstr(texts)...));
    world.barrier();  // the group is as good as before
  });
}

// test_DistributedDataParallel_requires_grad
TEST(ConstructionTest, NothingToTrain) {
  expect_refused(
      [](int, const ProcessGroup& world) {
        Linear net(2, 2);
        for (auto& p : net->parameters()) p.requires_grad_(false);
        DistributedDataParallel model(net, world);
      },
      "no parameter that requires a gradient");
  // on one rank only: everyone hears of it
  expect_refused(
      [](int rank, const ProcessGroup& world) {
        Linear net(2, 2);
        if (rank == 1) {
          for (auto& p : net->parameters()) p.requires_grad_(false);
        }
        DistributedDataParallel model(net, world);
      },
      "rank 1: there is no parameter that requires a gradient");
}

TEST(ConstructionTest, ArgumentsThatAreNone) {
  run_ranks(1, [](Rank&, const ProcessGroup& world) {
    EXPECT_THROW(DistributedDataParallel(std::shared_ptr<torch::nn::LinearImpl>(), world), Error);
    EXPECT_THROW(DistributedDataParallel(Linear(2, 2), ProcessGroup()), Error);
  });
  expect_refused(
      [](int, const ProcessGroup& world) {
        DistributedDataParallel model(Linear(2, 2), world, {.ignore = {"wieght"}});
      },
      "'wieght'");
  expect_refused(
      [](int rank, const ProcessGroup& world) {
        DistributedDataParallel model(Linear(2, 2), world, {.bucket_cap_mb = rank == 0 ? 25 : -1});
      },
      "rank 1: the bucket cap must be > 0 MB, got -1");
}

// test_ddp_model_diff_shape_across_ranks, _diff_num_params_across_ranks
TEST(ConstructionTest, ShapesAndNumbers) {
  expect_refused(
      [](int rank, const ProcessGroup& world) {
        DistributedDataParallel model(torch::nn::Embedding(5, rank == 0 ? 500 : 50), world);
      },
      "parameter weight", "[5, 500]", "[5, 50]");
  expect_refused(
      [](int rank, const ProcessGroup& world) {
        DistributedDataParallel model(Linear(torch::nn::LinearOptions(2, 2).bias(rank == 1)),
                                      world);
      },
      "rank 0 has", "rank 1 has parameter bias");
}

// test_param_layout_mismatch_error
TEST(ConstructionTest, Strides) {
  expect_refused(
      [](int rank, const ProcessGroup& world) {
        torch::nn::Conv2d net(torch::nn::Conv2dOptions(3, 4, 2));
        if (rank == 1) {
          const torch::NoGradGuard no_grad;
          net->weight.set_data(net->weight.contiguous(at::MemoryFormat::ChannelsLast));
        }
        DistributedDataParallel model(net, world);
      },
      "parameter weight", "strides");
}

// B12, B13 and issue 68803: types, frozen layers, ignored names, options, buffers.
TEST(ConstructionTest, WhatPyTorchDoesNotCompare) {
  expect_refused(
      [](int rank, const ProcessGroup& world) {
        Linear net(2, 2);
        if (rank == 1) net->to(at::kDouble);
        DistributedDataParallel model(net, world);
      },
      "Float", "Double");
  expect_refused(
      [](int rank, const ProcessGroup& world) {
        torch::nn::Sequential net(Linear(2, 2), Linear(2, 2));
        net[static_cast<std::size_t>(rank)]->parameters()[0].requires_grad_(false);
        DistributedDataParallel model(net, world);
      },
      "parameter 0.weight", "frozen");
  expect_refused(
      [](int rank, const ProcessGroup& world) {
        DistributedDataParallel model(Linear(2, 2), world,
                                      {.ignore = {rank == 0 ? "bias" : "weight"}});
      },
      "rank 0 has parameter weight", "rank 1 has parameter bias");
  expect_refused(
      [](int rank, const ProcessGroup& world) {
        DistributedDataParallel model(Linear(2, 2), world, {.find_unused_parameters = rank == 0});
      },
      "find_unused_parameters: 1", "find_unused_parameters: 0");
  expect_refused(
      [](int rank, const ProcessGroup& world) {
        DistributedDataParallel model(
            torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(4).track_running_stats(rank == 0)),
            world);
      },
      "buffer running_mean");
}

// Frozen on one rank only, after wrapping: an error on all ranks.
TEST(AgreementTest, FrozenOnOneRank) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    DistributedDataParallel model(net, world);
    model(at::ones({2, 2})).sum().backward();
    if (r.id() == 1) net->fc2->weight.requires_grad_(false);
    EXPECT_THAT(text_of([&] { model(at::ones({2, 2})).sum().backward(); }),
                HasSubstr("rank 1 trains other parameters than rank 0"));
    net->fc2->weight.requires_grad_(true);
    net->zero_grad();
    model(at::ones({2, 2})).sum().backward();
    expect_equal_on_all(world, gradients_of(*net));
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

struct FailingNetImpl : torch::nn::Module {
  FailingNetImpl() : net(register_module("net", Net())) {}
  at::Tensor forward(const at::Tensor& x, int fails_after) {
    auto y = torch::relu(net->fc1(x));
    if (fails_after == 1) y = Fails::apply(y);
    y = torch::relu(net->fc2(y));
    if (fails_after == 2) y = Fails::apply(y);
    y = net->fc3(y);
    if (fails_after == 3) y = Fails::apply(y);
    return y;
  }
  Net net;
};

// B15, test_failure_recovery's first half: backward throws on one rank, at any place, at any step,
// and on all of them; all ranks throw, naming rank and cause; the next step works.
TEST(FailureTest, BackwardThrowsOnOneRank) {
  std::vector<DdpOptions> options = {
      {},
      {.bucket_cap_mb = 1e-6, .launch = BucketLaunch::kEarly},
      {.bucket_cap_mb = 1e-6, .find_unused_parameters = true, .launch = BucketLaunch::kEarly},
      {.static_graph = true, .gradient_as_bucket_view = false}};
  for (const DdpOptions& one : options) {
    run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return std::make_shared<FailingNetImpl>(); });
      auto local = seeded(1, [] { return std::make_shared<FailingNetImpl>(); });
      DistributedDataParallel model(net, world, one);
      const auto loss = [](auto& module, int rank, int fails_after) {
        return module.forward(random(static_cast<std::uint64_t>(rank), {2, 2}), fails_after)
            .pow(2)
            .sum();
      };
      for (int place = 1; place <= 3; ++place) {
        for (const int culprit : {1, -1}) {
          const bool fails = culprit == -1 || culprit == r.id();
          const auto text = text_of([&] { loss(model, r.id(), fails ? place : 0).backward(); });
          EXPECT_THAT(text, HasSubstr("the disk is full"));
          if (!fails) {
            EXPECT_THAT(text, AllOf(HasSubstr("rank 1: "), HasSubstr("backward ")));
          }
          net->zero_grad();
          loss(model, r.id(), 0).backward();
          expect_gradients(*net, mean_gradients(*local, 3, [&](auto& module, int rank) {
            return loss(module, rank, 0);
          }));
        }
      }
    });
  }
}

// A backward that fails in the loss, before it comes to the model, is its rank's own matter; the
// others hear of it when it goes on.
TEST(FailureTest, BackwardThrowsBeforeTheModel) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    DistributedDataParallel model(net, world);
    const auto step = [&](bool fails) {
      net->zero_grad();
      auto y = model(at::ones({2, 2}));
      (fails ? Fails::apply(y) : y).sum().backward();
    };
    EXPECT_THAT(text_of([&] { step(r.id() == 1); }),
                HasSubstr(r.id() == 1 ? "the disk is full"
                                      : "rank 1: an exception was thrown between forward 1"));
    step(false);
    expect_equal_on_all(world, gradients_of(*net));
  });
}

// If the output lives on, ranks notice when their backwards meet.
TEST(FailureTest, ABackwardIsLeftOut) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    DistributedDataParallel model(net, world);
    std::vector<at::Tensor> kept;
    if (r.id() == 1) kept.push_back(model(at::ones({2, 2})));
    EXPECT_THAT(text_of([&] { model(at::ones({2, 2})).sum().backward(); }),
                HasSubstr("rank 0 ran forward 1 times, rank 1 2"));
    net->zero_grad();
    model(at::ones({2, 2})).sum().backward();
    expect_equal_on_all(world, gradients_of(*net));
  });
}

// A rank that dies in any phase: the others throw at once, naming rank, backward and bucket or
// operation.
enum class Phase { kConstruction, kForward, kBackward, kHook, kBetween };

void train_until_death(Rank& r, Phase phase) {
  const auto die = [&](Phase now, int step) {
    if (r.id() != 1 || now != phase || step != 2) return;
    r.mark("dies here");
    r.wait_for("never");
  };
  const auto world = make_world(r);
  if (phase == Phase::kConstruction) die(phase, 2);
  auto net = seeded(1, [] {
    return torch::nn::Sequential(Linear(2, 40), torch::nn::BatchNorm1d(40), Linear(40, 2));
  });
  DistributedDataParallel model(net, world,
                                {.bucket_cap_mb = 0.0001, .launch = BucketLaunch::kEarly});
  int step = 0;
  if (phase == Phase::kHook) {
    model.register_comm_hook([&](const GradBucket& bucket) {
      if (bucket.index() == 1) die(Phase::kHook, step);
      return hooks::all_reduce(bucket);
    });
  }
  for (;; ++step) {
    net->zero_grad();
    die(Phase::kForward, step);
    auto y = model(random(static_cast<std::uint64_t>(r.id()), {4, 2}));
    y.register_hook([&](const at::Tensor& gradient) {
      die(Phase::kBackward, step);
      return gradient;
    });
    y.pow(2).sum().backward();
    die(Phase::kBetween, step);
  }
}

TEST(DeathTest, OthersHearOfItInEveryPhase) {
  for (const auto phase :
       {Phase::kConstruction, Phase::kForward, Phase::kBackward, Phase::kHook, Phase::kBetween}) {
    SCOPED_TRACE(static_cast<int>(phase));
    RankGroup ranks(3, RankMode::kProcesses);
    ranks.start([phase](Rank& r) {
      try {
        train_until_death(r, phase);
        FAIL() << "it went on";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
        EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1"), HasSubstr("SIGKILL")));
        if (phase == Phase::kBackward || phase == Phase::kHook) {
          EXPECT_THAT(error.what(), AllOf(HasSubstr("backward 3"), HasSubstr("bucket ")));
        }
      }
    });
    ranks.wait_mark("dies here", 1);
    ranks.kill(1, SIGKILL);
    ranks.join();
  }
}

}  // namespace
}  // namespace convoy::test
