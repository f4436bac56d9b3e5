// ShardedOptimizer: beside libtorch's optimizers, and to the bit beside the replicated one.
#include <random>
#include <sstream>

#include "convoy/hooks.h"
#include "convoy/optimizer_in_backward.h"
#include "group/fake_backend.h"
#include "optim/shard_layout.h"
#include "optim/shard_support.h"

namespace convoy::test {
namespace {

using testing::HasSubstr;
using torch::nn::Linear;
namespace optim = torch::optim;

using Made = std::unique_ptr<ShardedOptimizerBase>;
struct ShardedCase {
  std::string name;
  OptimizerRule rule;
  std::function<std::unique_ptr<optim::Optimizer>(std::vector<at::Tensor>)> reference;
  std::function<Made(Reducer&, const ShardedOptimizerOptions&)> sharded;
};
template <class Optimizer, class Options>
ShardedCase make_case(const std::string& name, const OptimizerRule& rule, const Options& options) {
  return {name, rule,
          [options](std::vector<at::Tensor> parameters) {
            return std::make_unique<Optimizer>(std::move(parameters), options);
          },
          [options](Reducer& reducer, const ShardedOptimizerOptions& more) {
            return std::make_unique<ShardedOptimizer<Optimizer>>(reducer, options, more);
          }};
}

std::vector<ShardedCase> sharded_cases() {
  return {
      make_case<optim::SGD>("SGD", Sgd{.lr = 0.03}, optim::SGDOptions(0.03)),
      make_case<optim::SGD>(
          "SGD with momentum, dampening and decay",
          Sgd{.lr = 0.03, .momentum = 0.9, .dampening = 0.2, .weight_decay = 0.01},
          optim::SGDOptions(0.03).momentum(0.9).dampening(0.2).weight_decay(0.01)),
      make_case<optim::SGD>("Nesterov", Sgd{.lr = 0.03, .momentum = 0.9, .nesterov = true},
                            optim::SGDOptions(0.03).momentum(0.9).nesterov(true)),
      make_case<optim::Adam>("Adam with decay and amsgrad",
                             Adam{.lr = 0.003, .weight_decay = 0.1, .amsgrad = true},
                             optim::AdamOptions(0.003).weight_decay(0.1).amsgrad(true)),
      make_case<optim::AdamW>(
          "AdamW", AdamW{.lr = 0.003, .beta1 = 0.8, .weight_decay = 0.1},
          optim::AdamWOptions(0.003).betas(std::make_tuple(0.8, 0.999)).weight_decay(0.1)),
      make_case<optim::Adagrad>(
          "Adagrad",
          Adagrad{
              .lr = 0.003, .lr_decay = 0.1, .weight_decay = 0.01, .initial_accumulator_value = 0.2},
          optim::AdagradOptions(0.003).lr_decay(0.1).weight_decay(0.01).initial_accumulator_value(
              0.2)),
      make_case<optim::RMSprop>("RMSprop", RmsProp{.lr = 0.003, .eps = 1e-3, .weight_decay = 0.01},
                                optim::RMSpropOptions(0.003).eps(1e-3).weight_decay(0.01)),
      make_case<optim::RMSprop>(
          "RMSprop, centered, with momentum",
          RmsProp{.lr = 0.003, .alpha = 0.9, .eps = 1e-3, .momentum = 0.9, .centered = true},
          optim::RMSpropOptions(0.003).alpha(0.9).eps(1e-3).momentum(0.9).centered(true))};
}

// The same to the bit as the replicated kernel, and within rounding as libtorch's; gradients are
// undefined afterwards, states are divided.
TEST(ShardedOptimizerTest, EqualsReplicatedOnes) {
  for (const ShardedCase& one : sharded_cases()) {
    for (const How& how : hows()) {
      SCOPED_TRACE(one.name + ", " + how.name);
      run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
        auto net = make_net(), twin = make_net(), other = make_net();
        DistributedDataParallel model(net, world, how.options), replicated(twin, world),
            plain(other, world);
        const auto sharded = one.sharded(model.reducer(), {.in_backward = how.in_backward});
        const OptimizerInBackward in_backward(replicated.reducer(), one.rule);
        const auto reference = one.reference(other->parameters());
        for (int step = 0; step < 4; ++step) {
          const auto x = input_of(r.id(), step, {4, 6});
          model(x).pow(2).mean().backward();
          if (!how.in_backward) sharded->step();
          for (const auto& p : net->parameters()) EXPECT_FALSE(p.grad().defined());
          replicated(x).pow(2).mean().backward();
          expect_equal_parameters(*net, *twin);
          reference->zero_grad();
          plain(x).pow(2).mean().backward();
          reference->step();
          expect_close_parameters(*net, *other);
        }
        EXPECT_EQ(sharded->stats().steps, 4U);
        expect_equal_on_all(world, net->parameters());
      });
    }
  }
}

// Rules of ours, also those that libtorch does not have: to the bit as the replicated kernel.
TEST(ShardedOptimizerTest, TakesRules) {
  const std::vector<OptimizerRule> rules{AdamW{.lr = 0.003, .maximize = true},
                                         Adadelta{.lr = 0.5, .weight_decay = 0.1},
                                         Adamax{.lr = 0.01, .maximize = true}, Rprop{.lr = 0.002}};
  for (const OptimizerRule& rule : rules) {
    SCOPED_TRACE(describe(rule));
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = make_net(), twin = make_net();
      DistributedDataParallel model(net, world), replicated(twin, world);
      ShardedOptimizer sharded(model.reducer(), rule);
      OptimizerInBackward in_backward(replicated.reducer(), rule);
      for (int step = 0; step < 4; ++step) {
        if (step == 2) {  // as a scheduler does
          sharded.param_groups()[0].options().set_lr(0.001);
          in_backward.set_lr(0.001);
        }
        const auto x = input_of(r.id(), step, {4, 6});
        model(x).pow(2).mean().backward();
        sharded.step();
        replicated(x).pow(2).mean().backward();
        expect_equal_parameters(*net, *twin);
      }
      expect_equal_on_all(world, net->parameters());
    });
  }
}

// A model whose gradients are lazy conjugates, large enough for the allocator's shared memory.
struct ConjugateImpl : torch::nn::Module {
  ConjugateImpl()
      : w(register_parameter("w", torch::complex(random(1, {64, 200}), random(2, {64, 200})))),
        small(register_parameter("small", torch::complex(random(3, {5}), random(4, {5})))) {}
  at::Tensor forward(const at::Tensor& x) const {
    return (w.conj() * x - 1).abs().square().mean() + (small.conj() * x[0][0]).abs().square().sum();
  }
  at::Tensor w, small;
};
at::Tensor complex_input(int rank, int step) {
  const auto seed = static_cast<std::uint64_t>(1000 + 10 * step + rank);
  return torch::complex(random(seed, {64, 200}), random(seed + 500, {64, 200}));
}

// Both optimizers, and a reducer that only reduces, beside libtorch's in one process.
TEST(ShardedOptimizerTest, ComplexParameters) {
  for (const int ranks : {1, 2}) {
    for (const How& how : hows()) {
      SCOPED_TRACE(how.name + ", ranks: " + std::to_string(ranks));
      run_ranks(ranks, [&](Rank& r, const ProcessGroup& world) {
        const auto net = std::make_shared<ConjugateImpl>(),
                   twin = std::make_shared<ConjugateImpl>(),
                   apart = std::make_shared<ConjugateImpl>(),
                   whole = std::make_shared<ConjugateImpl>();
        DistributedDataParallel<ConjugateImpl> model(net, world, how.options),
            replicated(twin, world, how.options), plain(apart, world, how.options);
        const auto options = optim::SGDOptions(0.1).momentum(0.9);
        ShardedOptimizer sharded(model.reducer(), options, {.in_backward = how.in_backward});
        const OptimizerInBackward in_backward(replicated.reducer(), options);
        optim::SGD separate(apart->parameters(), options), reference(whole->parameters(), options);
        for (int step = 0; step < 3; ++step) {
          const auto x = complex_input(r.id(), step);
          model(x).backward();
          if (!how.in_backward) {
            // Replaced by what is the same number, with another bit.
            if (step == 1) {
              for (const auto& p : net->parameters()) {
                p.mutable_grad() = p.grad().conj().resolve_conj().conj();
              }
            }
            sharded.step();
          }
          replicated(x).backward();
          separate.zero_grad();
          plain(x).backward();
          separate.step();
          reference.zero_grad();
          for (int rank = 0; rank < ranks; ++rank) {
            (whole->forward(complex_input(rank, step)) / ranks).backward();
          }
          reference.step();
          expect_equal_parameters(*net, *twin);
          expect_close_parameters(*net, *whole);
          expect_close_parameters(*apart, *whole);
        }
      });
    }
  }
}

// A gradient that the user has turned into its conjugate, where it lies in a bucket.
TEST(ShardedOptimizerTest, AConjugatedGradient) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto net = std::make_shared<ConjugateImpl>();
    DistributedDataParallel<ConjugateImpl> model(net, world);
    ShardedOptimizer optimizer(model.reducer(), Sgd{.lr = 1});
    for (int step = 0; step < 2; ++step) {  // buckets are made in the first
      const auto before = copies_of(*net);
      model(complex_input(0, r.id())).backward();
      std::vector<at::Tensor> gradients;
      for (const auto& p : net->parameters()) {
        p.mutable_grad() = p.grad().conj();
        gradients.push_back(p.grad().resolve_conj().clone());
        world.all_reduce(gradients.back(), {.op = ReduceOp::kAvg});
      }
      optimizer.step();
      const auto after = net->parameters();
      for (std::size_t i = 0; i < after.size(); ++i) {
        EXPECT_TRUE(at::allclose(after[i], before[i] - gradients[i], 1e-5, 1e-6)) << step << i;
      }
    }
  });
}

// Zeros without memory (ZeroTensor) on one of the ranks.
TEST(ShardedOptimizerTest, AZeroTensorAsGradient) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto net = std::make_shared<ConjugateImpl>();
    DistributedDataParallel<ConjugateImpl> model(net, world);
    ShardedOptimizer optimizer(model.reducer(), Sgd{.lr = 1});
    for (int step = 0; step < 2; ++step) {  // buckets are made in the first
      const auto before = copies_of(*net);
      model(complex_input(0, r.id())).backward();
      std::vector<at::Tensor> gradients;
      for (const auto& p : net->parameters()) {
        if (r.id() == 1) p.mutable_grad() = at::_efficientzerotensor(p.sizes(), p.options());
        gradients.push_back(p.grad().clone());
        if (r.id() == 1) gradients.back() = torch::zeros_like(p);
        world.all_reduce(gradients.back(), {.op = ReduceOp::kAvg});
      }
      optimizer.step();
      const auto after = net->parameters();
      for (std::size_t i = 0; i < after.size(); ++i) {
        EXPECT_TRUE(at::allclose(after[i], before[i] - gradients[i], 1e-5, 1e-6)) << step << i;
      }
    }
  });
}

// One vocabulary: libtorch's options become rules, and groups have rules of their own.
TEST(ShardedOptimizerTest, OptionsBecomeRules) {
  const auto torchs = optim::AdamWOptions(0.003).weight_decay(0.2);
  EXPECT_EQ(describe(rule_of(torchs)), describe(AdamW{.lr = 0.003, .weight_decay = 0.2}));
  EXPECT_THROW(rule_of(optim::LBFGSOptions(1)), Error);
  run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
    auto net = make_net(), twin = make_net();
    DistributedDataParallel model(net, world), other(twin, world);
    const auto p = net->parameters(), q = twin->parameters();
    const std::vector<OptimizerGroup> groups{{{p[0], p[1]}, Sgd{.lr = 0.1}},
                                             {{p.begin() + 2, p.end()}, rule_of(torchs)}};
    ShardedOptimizer sharded(model.reducer(), groups);
    const OptimizerInBackward in_backward(
        other.reducer(), std::vector<OptimizerGroup>{{{q[0], q[1]}, Sgd{.lr = 0.1}},
                                                     {{q.begin() + 2, q.end()}, rule_of(torchs)}});
    for (int step = 0; step < 3; ++step) {
      const auto x = input_of(r.id(), step, {4, 6});
      model(x).pow(2).mean().backward();
      sharded.step();
      other(x).pow(2).mean().backward();
      expect_equal_parameters(*net, *twin);
    }
  });
}

TEST(ShardedOptimizerTest, StateIsDivided) {
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](Rank&, const ProcessGroup& world) {
      auto net = make_net();
      DistributedDataParallel model(net, world);
      const ShardedOptimizer<optim::AdamW> optimizer(model.reducer(), 1e-3);
      std::int64_t all = 0;
      for (const auto& p : net->parameters()) all += p.numel();
      const auto mine =
          at::full({1}, static_cast<std::int64_t>(optimizer.stats().numbers), at::kLong);
      world.all_reduce(mine);
      EXPECT_EQ(mine.item<std::int64_t>(), all);
      // No further from an equal part than a block.
      EXPECT_LE(optimizer.stats().numbers,
                static_cast<std::uint64_t>(all / world.size() + ShardLayout::kBlock));
      EXPECT_LE(optimizer.stats().state_bytes, 2 * 4 * optimizer.stats().numbers + 64 * 64);
    });
  }
}

// Clipping by the norm of all gradients, and steps that are left out: as the replicated one.
TEST(ShardedOptimizerTest, ClipsByTheGlobalNorm) {
  for (const double type : {2.0, double(INFINITY)}) {
    for (const bool in_backward : {false, true}) {
      run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
        auto net = make_net(), twin = make_net();
        DistributedDataParallel model(net, world), replicated(twin, world);
        ShardedOptimizer<optim::AdamW> sharded(model.reducer(), 0.01,
                                               {.in_backward = in_backward,
                                                .max_norm = 0.05,
                                                .norm_type = type,
                                                .skip_nonfinite = true});
        const OptimizerInBackward other(
            replicated.reducer(), AdamW{.lr = 0.01},
            {.max_norm = 0.05, .norm_type = type, .skip_nonfinite = true});
        for (int step = 0; step < 5; ++step) {
          auto x = input_of(r.id(), step, {4, 6}) * (step % 2 == 0 ? 1 : 1e-3);
          if (step == 3 && r.id() == 1) x[0][0] = NAN;
          model(x).pow(2).mean().backward();
          if (!in_backward) sharded.step();
          replicated(x).pow(2).mean().backward();
          if (step != 3) {
            EXPECT_EQ(sharded.stats().norm, other.stats().norm);
          }
          expect_equal_parameters(*net, *twin);
        }
        EXPECT_EQ(sharded.stats().skipped, 1U);
        EXPECT_EQ(sharded.stats().steps, 4U);
      });
    }
  }
}

// Groups with options of their own, and a scheduler: as libtorch's optimizer has them.
TEST(ShardedOptimizerTest, GroupsAndSchedulers) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_net(), other = make_net();
    DistributedDataParallel model(net, world), plain(other, world);
    const auto groups = [](const std::vector<at::Tensor>& p) {
      std::vector<optim::OptimizerParamGroup> made;
      made.emplace_back(std::vector<at::Tensor>{p[0], p[2], p[4]});
      made.emplace_back(
          std::vector<at::Tensor>{p[1], p[3]},
          std::make_unique<optim::AdamWOptions>(optim::AdamWOptions().lr(0.02).weight_decay(0.3)));
      return made;  // the last bias is in none
    };
    ShardedOptimizer<optim::AdamW> sharded(model.reducer(), groups(net->parameters()),
                                           optim::AdamWOptions(0.01));
    optim::AdamW reference(groups(other->parameters()), optim::AdamWOptions(0.01));
    optim::StepLR ours(sharded, 2, 0.5), theirs(reference, 2, 0.5);
    for (int step = 0; step < 6; ++step) {
      const auto x = input_of(r.id(), step, {4, 6});
      net->zero_grad();
      other->zero_grad();
      model(x).pow(2).mean().backward();
      plain(x).pow(2).mean().backward();
      // Others' gradients are reduced as ever.
      expect_close(net->parameters()[5].grad(), other->parameters()[5].grad());
      sharded.step();
      reference.step();
      EXPECT_TRUE(net->parameters()[5].grad().defined());
      ours.step();
      theirs.step();
      expect_close_parameters(*net, *other);
    }
    EXPECT_NEAR(sharded.param_groups()[1].options().get_lr(), 0.02 / 4, 1e-12);
    // Options may begin to need a state that was not there.
    dynamic_cast<optim::AdamWOptions&>(sharded.param_groups()[0].options()).amsgrad(true);
    model(input_of(r.id(), 7, {4, 6})).pow(2).mean().backward();
    sharded.step();
    expect_equal_on_all(world, net->parameters());
  });
}

// Accumulation, comm hooks, weights, unused parameters, data that was replaced: as a plain
// optimizer after a plain backward.
TEST(ShardedOptimizerTest, WithEverythingElse) {
  struct Way {
    std::string name;
    DdpOptions options = {};
    bool hook = false, accumulates = false, weighted = false;
  };
  const std::vector<Way> ways = {
      {.name = "accumulated", .accumulates = true},
      {.name = "sum", .options = {.reduce = GradReduce::kSum}, .accumulates = true},
      {.name = "hook", .hook = true},
      {.name = "weighted", .weighted = true},
      {.name = "unused", .options = {.find_unused_parameters = true}},
      {.name = "static", .options = {.static_graph = true}},
      {.name = "reduced in f64",
       .options = {.mixed_precision = MixedPrecision{.reduce_dtype = at::kDouble}}}};
  for (const Way& way : ways) {
    for (const bool in_backward : {false, true}) {
      SCOPED_TRACE(way.name + (in_backward ? ", in backward" : ""));
      run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
        auto net = make_net(), other = make_net();
        DistributedDataParallel model(net, world, way.options), plain(other, world, way.options);
        if (way.hook) {
          model.register_comm_hook(hooks::all_reduce);
          plain.register_comm_hook(hooks::all_reduce);
        }
        ShardedOptimizer<optim::SGD> optimizer(
            model.reducer(), optim::SGDOptions(0.03).momentum(0.9), {.in_backward = in_backward});
        optim::SGD reference(other->parameters(), optim::SGDOptions(0.03).momentum(0.9));
        for (int step = 0; step < 4; ++step) {
          reference.zero_grad();
          const auto x = input_of(r.id(), step, {4, 6});
          if (way.accumulates) {
            const auto one = model.no_sync(), two = plain.no_sync();
            model(x * 2).pow(2).mean().backward();
            plain(x * 2).pow(2).mean().backward();
          }
          if (way.weighted) {
            model.set_reduce(GradReduce::weighted(r.id() + 1));
            plain.set_reduce(GradReduce::weighted(r.id() + 1));
          }
          model(x).pow(2).mean().backward();
          plain(x).pow(2).mean().backward();
          if (step == 1 && !in_backward) {  // twice without zeroing
            model(x).pow(2).mean().backward();
            plain(x).pow(2).mean().backward();
          }
          if (!in_backward) optimizer.step();
          reference.step();
          expect_close_parameters(*net, *other);
          if (step == 2) {  // as torch::load does
            const at::NoGradGuard no_grad;
            for (auto& p : net->parameters()) p.set_data(p.detach().clone());
          }
        }
        expect_equal_on_all(world, net->parameters());
      });
    }
  }
}

// Buckets are laid out anew between a backward that has reduced nothing and the step. Also where
// the optimizer has not all parameters, so that others come into a bucket with its own.
TEST(ShardedOptimizerTest, FrozenAndThawed) {
  for (const std::size_t taken : {6U, 3U}) {
    SCOPED_TRACE(taken);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = make_net(), other = make_net();
      const DdpOptions options{.bucket_cap_mb = 0.01};
      DistributedDataParallel model(net, world, options), plain(other, world, options);
      const auto mine = net->parameters();
      const auto split = mine.begin() + static_cast<std::ptrdiff_t>(taken);
      ShardedOptimizer<optim::SGD> optimizer(
          model.reducer(), {optim::OptimizerParamGroup({mine.begin(), split})}, 0.1);
      optim::SGD rest(std::vector<at::Tensor>{mine.back()}, taken == 6 ? 0.0 : 0.1);
      if (taken == 3) {
        rest.param_groups()[0].params() = {split, mine.end()};
      }
      optim::SGD reference(other->parameters(), 0.1);
      for (int step = 0; step < 7; ++step) {
        if (step == 2 || step == 4) {
          for (auto* trained : {&net, &other}) {
            const auto parameters = (*trained)->parameters();
            parameters[1].requires_grad_(step == 4);
            parameters[2].requires_grad_(step == 4);
          }
        }
        const auto x = input_of(r.id(), step, {4, 6});
        model(x).pow(2).mean().backward();
        optimizer.step();
        rest.step();
        rest.zero_grad();
        reference.zero_grad();
        plain(x).pow(2).mean().backward();
        reference.step();
        expect_close_parameters(*net, *other);
      }
      expect_equal_on_all(world, net->parameters());
    });
  }
}

// With the step allocator, a large gradient stays where it was made, and other ranks read it there;
// one that is private on one rank is copied there.
TEST(ShardedOptimizerTest, GradientsAreReadWhereTheyAre) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_net(), twin = make_net();
    DistributedDataParallel model(net, world), replicated(twin, world);
    ShardedOptimizer<optim::AdamW> optimizer(model.reducer(), 0.01);
    const OptimizerInBackward other(replicated.reducer(), AdamW{.lr = 0.01});
    for (int step = 0; step < 4; ++step) {
      const auto x = input_of(r.id(), step, {4, 6});
      model(x).pow(2).mean().backward();
      at::Tensor& large = net->parameters()[2].mutable_grad();
      if (is_allocator_installed() && step > 0) {
        EXPECT_EQ(large.storage().nbytes(), large.nbytes());  // no part of a bucket
      }
      if (step == 2 && r.id() == 1) large = large.clone();
      optimizer.step();
      replicated(x).pow(2).mean().backward();
      expect_equal_parameters(*net, *twin);
    }
  });
}

// All backwards inside of no_sync(), also before there are buckets: step() reduces.
TEST(ShardedOptimizerTest, StepsWithoutAReducedBackward) {
  for (const bool shares : {true, false}) {
    SCOPED_TRACE(shares);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      const auto group =
          shares ? world
                 : ProcessGroup::from(c10::make_intrusive<FakeBackend>(make_backend(r, "foreign")));
      auto net = make_net(), other = make_net();
      DistributedDataParallel model(net, group), plain(other, group);
      ShardedOptimizer<optim::SGD> optimizer(model.reducer(), 0.1);
      optim::SGD reference(other->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        {
          const auto one = model.no_sync(), two = plain.no_sync();
          for (int part = 0; part < 2; ++part) {
            model(input_of(r.id(), 2 * step + part, {4, 6})).pow(2).mean().backward();
            plain(input_of(r.id(), 2 * step + part, {4, 6})).pow(2).mean().backward();
          }
        }
        optimizer.step();
        plain.sync_gradients();
        reference.step();
        reference.zero_grad();
        expect_close_parameters(*net, *other);
        expect_equal_on_all(world, net->parameters());
      }
      EXPECT_EQ(model.reducer().stats().backwards, shares ? 1U : 3U);
    });
  }
}

// On a backend whose ranks share no memory: reduced in backward, gathered after the step.
TEST(ShardedOptimizerTest, OverABackendOfSomebodyElses) {
  run_ranks(3, [](Rank& r, const ProcessGroup&) {
    const auto foreign =
        ProcessGroup::from(c10::make_intrusive<FakeBackend>(make_backend(r, "foreign")));
    auto net = make_net(), other = make_net();
    DistributedDataParallel model(net, foreign), plain(other, foreign);
    ShardedOptimizer<optim::AdamW> optimizer(model.reducer(), 0.01, {.max_norm = 0.1});
    const OptimizerInBackward replicated(plain.reducer(), AdamW{.lr = 0.01}, {.max_norm = 0.1});
    for (int step = 0; step < 3; ++step) {
      const auto x = input_of(r.id(), step, {4, 6});
      model(x).pow(2).mean().backward();
      optimizer.step();
      plain(x).pow(2).mean().backward();
      expect_equal_parameters(*net, *other);
    }
    std::ostringstream saved, expected;
    torch::save(optimizer, saved);
    torch::save(replicated, expected);
    EXPECT_EQ(saved.str().size(), expected.str().size());
  });
}

// A state that four ranks saved goes on with two and with one, and with the replicated optimizer.
TEST(ShardedOptimizerTest, StateLoadsAtAnotherSize) {
  std::string state, module;
  const auto train = [](auto& model, auto step, int first, int last) {
    for (int i = first; i < last; ++i) {
      model(input_of(0, i, {4, 6})).pow(2).mean().backward();  // the same on all ranks
      step();
    }
  };
  run_ranks(4, [&](Rank& r, const ProcessGroup& world) {
    auto net = make_net();
    DistributedDataParallel model(net, world);
    ShardedOptimizer<optim::AdamW> optimizer(model.reducer(), 0.01);
    train(model, [&] { optimizer.step(); }, 0, 3);
    std::ostringstream out, parameters;
    torch::save(optimizer, out);  // collective
    torch::save(net, parameters);
    EXPECT_LT(parameters.str().size(), 400'000U);  // each with a storage of its own
    if (r.id() == 0) state = out.str(), module = parameters.str();
  });
  std::vector<at::Tensor> results;
  for (const int ranks : {1, 2, 0}) {
    run_ranks(std::max(1, ranks), [&](Rank& r, const ProcessGroup& world) {
      auto net = make_net();
      DistributedDataParallel model(net, world);
      std::istringstream parameters(module), in(state);
      torch::load(net, parameters);
      if (ranks == 0) {
        OptimizerInBackward optimizer(model.reducer(), AdamW{.lr = 0.01});
        torch::load(optimizer, in);
        train(model, [] {}, 3, 6);
      } else {
        ShardedOptimizer<optim::AdamW> optimizer(model.reducer(), 0.01);
        torch::load(optimizer, in);
        EXPECT_EQ(optimizer.stats().steps, 3U);
        train(model, [&] { optimizer.step(); }, 3, 6);
        std::istringstream again(state);
        Linear small(2, 2);
        DistributedDataParallel tiny(small, world);
        ShardedOptimizer<optim::AdamW> wrong(tiny.reducer(), 0.01);
        EXPECT_THAT(text_of([&] { torch::load(wrong, again); }), HasSubstr("6 parameters, not 2"));
      }
      if (r.id() == 0)
        results.push_back(at::cat(
            {net->parameters()[0].flatten().detach(), net->parameters()[2].flatten().detach()}));
    });
  }
  EXPECT_TRUE(at::equal(results[0], results[1]));
  EXPECT_TRUE(at::equal(results[0], results[2]));
}

// Ranks without inputs go on to update their shards.
TEST(ShardedOptimizerTest, Join) {
  for (const bool in_backward : {false, true}) {
    for (const bool by_live : {false, true}) {
      run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
        auto net = make_net(), other = make_net();
        DistributedDataParallel model(net, world), plain(other, world);
        ShardedOptimizer<optim::AdamW> optimizer(model.reducer(), 0.01,
                                                 {.in_backward = in_backward});
        const OptimizerInBackward replicated(plain.reducer(), AdamW{.lr = 0.01});
        const JoinOptions options{.divide_by_initial_world_size = !by_live};
        const auto loop = [&](auto& trained, const auto& step) {
          for (int i = 0; i < 2 * (r.id() + 1); ++i) {
            trained(input_of(r.id(), i, {4, 6})).pow(2).mean().backward();
            step();
          }
        };
        join(
            {&model, &optimizer},
            [&] {
              loop(model, [&] {
                if (!in_backward) optimizer.step();
              });
            },
            options);
        join({&plain}, [&] { loop(plain, [] {}); }, options);
        EXPECT_EQ(optimizer.stats().steps, 6U);
        expect_equal_parameters(*net, *other);
        expect_equal_on_all(world, net->parameters());
      });
    }
  }
}

TEST(ShardLayoutTest, EveryNumberHasOneOwner) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 9);
    std::vector<ShardLayout::Item> items(1 + random() % 12);
    std::int64_t all = 0;
    for (auto& item : items) {
      item = {.numbers = static_cast<std::int64_t>(random() % (random() % 3 == 0 ? 10 : 200'000)),
              .number_bytes = random() % 2 == 0 ? 4U : 8U,
              .states = static_cast<unsigned>(random() % 8)};
      all += item.numbers;
    }
    const ShardLayout layout(items, ranks);
    std::vector<std::vector<std::pair<std::size_t, std::size_t>>> pieces(
        static_cast<std::size_t>(ranks));
    std::vector<std::size_t> words(static_cast<std::size_t>(ranks));
    for (std::size_t i = 0; i < items.size(); ++i) {
      std::int64_t at = 0;
      const auto [first, last] = layout.blocks_of(i);
      for (std::size_t b = first; b < last; ++b) {
        const auto& block = layout.blocks()[b];
        const auto owner = static_cast<std::size_t>(block.owner);
        ASSERT_EQ(block.item, i);
        ASSERT_EQ(block.begin, at);
        ASSERT_EQ(block.word, words[owner]);
        at = block.end;
        words[owner] += static_cast<std::size_t>(
            (block.end - block.begin + ShardLayout::kChunk - 1) / ShardLayout::kChunk);
        for (std::size_t k = 0; k < kMostStates; ++k) {
          ASSERT_EQ(block.states[k] != ShardLayout::kNoState, (items[i].states >> k & 1) != 0);
          if (block.states[k] == ShardLayout::kNoState) continue;
          const auto bytes =
              static_cast<std::size_t>(block.end - block.begin) * items[i].number_bytes;
          pieces[owner].emplace_back(block.states[k], block.states[k] + bytes);
        }
      }
      ASSERT_EQ(at, items[i].numbers);
    }
    for (int r = 0; r < ranks; ++r) {
      auto& mine = pieces[static_cast<std::size_t>(r)];
      std::sort(mine.begin(), mine.end());
      std::size_t end = layout.journal(r, ShardLayout::kJournals, 0);
      for (const auto& piece : mine) {
        ASSERT_GE(piece.first, end);
        end = piece.second;
      }
      ASSERT_LE(end, layout.bytes_of(r));
      ASSERT_LE(layout.numbers_of(r), all / ranks + ShardLayout::kBlock);
    }
  }
}

}  // namespace
}  // namespace convoy::test
