// ShardedOptimizer: what must not happen when ranks wait for each other, differ, or fail.
#include <atomic>
#include <condition_variable>

#include "convoy/optimizer_in_backward.h"
#include "group/fake_backend.h"
#include "optim/shard_support.h"
#include "support/expect_error.h"

namespace convoy::test {
namespace {

using testing::HasSubstr;
using torch::nn::Linear;
namespace optim = torch::optim;

// step() is collective: nothing is written before all ranks have come.
TEST(ShardedOptimizerTest, NothingIsWrittenBeforeAllHaveCome) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto world = make_world(r);
    auto net = make_net();
    DistributedDataParallel model(net, world);
    ShardedOptimizer<optim::SGD> optimizer(model.reducer(), 0.1);
    model(input_of(r.id(), 0, {4, 6})).sum().backward();
    const auto before = copies_of(*net);
    r.barrier();
    if (r.id() == 0) {
      world.set_timeout(200ms);
      EXPECT_THAT(text_of([&] { optimizer.step(); }), HasSubstr("Timed out"));
    }
    r.barrier();
    const auto after = net->parameters();
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i]));
  });
}

// What libtorch throws on one rank before the ranks meet is told to all of them: nobody waits.
TEST(ShardedOptimizerTest, AnErrorOfLibtorchBeforeTheStep) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_net();
    DistributedDataParallel model(net, world);
    ShardedOptimizer<optim::SGD> optimizer(model.reducer(), 0.1);
    model(input_of(r.id(), 0, {4, 6})).sum().backward();
    const at::Tensor weight = net->parameters()[0];
    const at::Tensor kept = weight.detach();
    if (r.id() == 1) {
      at::Tensor gone = kept.clone();
      gone.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
          "this memory is no more");
      weight.set_data(gone);
    }
    EXPECT_THAT(text_of([&] { optimizer.step(); }),
                HasSubstr(r.id() == 1 ? "this memory is no more" : "rank 1 has refused the step"));
    if (r.id() == 1) weight.set_data(kept);
    optimizer.step();
    expect_equal_on_all(world, net->parameters());
  });
}

// Every rank moves the version counters of all parameters, also of what others have written.
TEST(ShardedOptimizerTest, ARetainedGraphThrows) {
  for (const How& how : hows()) {
    SCOPED_TRACE(how.name);
    run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
      auto net = make_net();
      DistributedDataParallel model(net, world, how.options);
      ShardedOptimizer<optim::SGD> optimizer(model.reducer(), 0.1,
                                             {.in_backward = how.in_backward});
      const auto loss = model(input_of(r.id(), 0, {4, 6})).sum();
      std::vector<std::int64_t> versions;
      for (const auto& p : net->parameters()) versions.push_back(p._version());
      loss.backward({}, true);
      if (!how.in_backward) optimizer.step();
      const auto parameters = net->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_GT(parameters[i]._version(), versions[i]) << i;
      }
      EXPECT_THAT(text_of([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
    });
  }
}

// Rank 1 stands in the middle of its backward while rank 0 has computed all: no parameter of rank 1
// that it still needs has changed.
TEST(ShardedOptimizerTest, ABucketIsUpdatedWhenAllRanksHaveIt) {
  std::atomic<bool> complete{false};
  std::mutex mutex;
  std::condition_variable changed;
  RankGroup(2, RankMode::kThreads).run([&](Rank& r) {
    const auto world = make_world(r);
    auto net = make_net(), twin = make_net();
    DistributedDataParallel model(net, world,
                                  {.bucket_cap_mb = 0.01, .launch = BucketLaunch::kEarly});
    DistributedDataParallel replicated(twin, world);
    const ShardedOptimizer<optim::SGD> optimizer(model.reducer(), 0.1, {.in_backward = true});
    const OptimizerInBackward other(replicated.reducer(), Sgd{.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      auto x = input_of(r.id(), step, {4, 6}).requires_grad_();
      const auto before = copies_of(*net);
      const auto out = model(x);
      if (step == 2 && r.id() == 0) {
        x.register_hook([&](const at::Tensor&) {  // the last one
          const std::lock_guard lock(mutex);
          complete = true;
          changed.notify_all();
        });
      }
      if (step == 2 && r.id() == 1) {
        out.register_hook([&](const at::Tensor&) {  // the first one
          std::unique_lock lock(mutex);
          EXPECT_TRUE(changed.wait_for(lock, 20s, [&] { return complete.load(); }));
          const auto now = net->parameters();
          for (std::size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(at::equal(now[i], before[i]));
        });
      }
      out.pow(2).mean().backward();
      replicated(x.detach()).pow(2).mean().backward();
      expect_equal_parameters(*net, *twin);
    }
    expect_equal_on_all(world, net->parameters());
  });
}

// A backward that fails on one rank changes nothing at its end; what was updated before it failed
// is the same on all ranks.
TEST(ShardedOptimizerTest, AFailedBackward) {
  for (const How& how : hows()) {
    SCOPED_TRACE(how.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = make_net();
      DistributedDataParallel model(net, world, how.options);
      ShardedOptimizer<optim::AdamW> optimizer(model.reducer(), 0.01,
                                               {.in_backward = how.in_backward});
      const auto before = copies_of(*net);
      for (int step = 0; step < 3; ++step) {
        auto x = input_of(r.id(), step, {4, 6}).requires_grad_();
        if (step == 1 && r.id() == 1) {
          x.register_hook([](const at::Tensor&) { throw std::runtime_error("on purpose"); });
        }
        const auto out = model(x).pow(2).mean();
        if (step == 1) {
          EXPECT_THAT(text_of([&] { out.backward(); }), HasSubstr("on purpose"));
          net->zero_grad();
        } else {
          out.backward();
        }
        if (!how.in_backward) optimizer.step();
        expect_equal_on_all(world, net->parameters());
      }
      EXPECT_FALSE(at::equal(before[0], net->parameters()[0]));
    });
  }
}

// What ranks must agree on is an error on all of them, and nothing has changed.
TEST(ShardedOptimizerTest, RanksThatDiffer) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_net();
    DistributedDataParallel model(net, world);
    ShardedOptimizer<optim::SGD> optimizer(model.reducer(), 0.1);
    const auto before = copies_of(*net);
    const auto backward = [&] { model(input_of(r.id(), 0, {4, 6})).sum().backward(); };
    backward();
    if (r.id() == 1) optimizer.param_groups()[0].options().set_lr(0.1 + 1e-9);
    EXPECT_THAT(text_of([&] { optimizer.step(); }), HasSubstr("other options"));
    optimizer.param_groups()[0].options().set_lr(0.1);
    if (r.id() == 1) net->parameters()[0].mutable_grad().reset();
    EXPECT_THAT(text_of([&] { optimizer.step(); }),
                HasSubstr("rank 1 has no gradient for 0.weight"));
    if (r.id() == 1) optimizer.param_groups()[0].options().set_lr(-1);
    EXPECT_THAT(text_of([&] { optimizer.step(); }),
                HasSubstr(r.id() == 1 ? "lr must be >= 0, got -1" : "rank 1 has refused"));
    optimizer.param_groups()[0].options().set_lr(0.1);
    const auto after = net->parameters();
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i]));
    // Without gradients there is nothing to do.
    net->zero_grad();
    optimizer.step();
    EXPECT_TRUE(at::equal(net->parameters()[0], before[0]));
    backward();
    optimizer.step();
    EXPECT_FALSE(at::equal(net->parameters()[0], before[0]));
    expect_equal_on_all(world, net->parameters());
  });
}

TEST(ShardedOptimizerTest, WhatItRefuses) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_net();
    DistributedDataParallel model(net, world);
    const auto text = [&](const std::vector<optim::OptimizerParamGroup>& groups,
                          const optim::SGDOptions& options, const ShardedOptimizerOptions& more) {
      return text_of(
          [&] { const ShardedOptimizer<optim::SGD> made(model.reducer(), groups, options, more); });
    };
    const std::vector<optim::OptimizerParamGroup> all = {
        optim::OptimizerParamGroup(net->parameters())};
    const optim::OptimizerParamGroup one({net->parameters()[0]});
    EXPECT_THAT(text(all, optim::SGDOptions(r.id() == 1 ? -1 : 1), {}),
                HasSubstr("rank 1: ShardedOptimizer: lr must be >= 0, got -1"));
    EXPECT_THAT(text(all, optim::SGDOptions(r.id() + 1), {}), HasSubstr("group 0: SGD, lr 2"));
    EXPECT_THAT(text({one, one}, optim::SGDOptions(1), {}), HasSubstr("in two groups"));
    EXPECT_THAT(text({optim::OptimizerParamGroup({at::ones({2})})}, optim::SGDOptions(1), {}),
                HasSubstr("not a parameter of the reducer"));
    EXPECT_THAT(text(all, optim::SGDOptions(1), {.max_norm = -1}),
                HasSubstr("max_norm must be >= 0, got -1"));
    {
      ShardedOptimizer<optim::SGD> first(model.reducer(), {one}, 0.1, {.in_backward = true});
      EXPECT_THAT(text(all, optim::SGDOptions(1), {}), HasSubstr("taken by another optimizer"));
      EXPECT_THAT(text_of([&] { first.step(); }), HasSubstr("backward() is the step"));
    }
    ShardedOptimizer<optim::SGD> second(model.reducer(), 0.1);  // the first has let go
    second.add_param_group(optim::OptimizerParamGroup({at::ones({2}, at::requires_grad())}));
    EXPECT_THAT(text_of([&] { second.step(); }), HasSubstr("groups cannot be added"));
  });
}

// The same where backward is the step: the group can go on.
TEST(ShardedOptimizerTest, RanksThatDifferInBackward) {
  for (const How& how : hows()) {
    if (!how.in_backward) continue;
    SCOPED_TRACE(how.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = make_net();
      DistributedDataParallel model(net, world, how.options);
      ShardedOptimizer<optim::SGD> optimizer(model.reducer(), 0.1, {.in_backward = true});
      const auto backward = [&](int step) {
        net->zero_grad();
        model(input_of(r.id(), step, {4, 6})).pow(2).mean().backward();
      };
      auto& options = optimizer.param_groups()[0].options();
      backward(0);
      const auto before = copies_of(*net);
      if (r.id() == 1) options.set_lr(0.1 + 1e-9);
      EXPECT_THAT(text_of([&] { backward(1); }), HasSubstr("other options"));
      if (r.id() == 1) options.set_lr(-1);
      EXPECT_THAT(text_of([&] { backward(2); }),
                  HasSubstr(r.id() == 1 ? "lr must be >= 0, got -1" : "rank 1"));
      options.set_lr(0.1);
      const auto after = net->parameters();
      for (std::size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i]));
      for (int step = 3; step < 5; ++step) {
        backward(step);
        expect_equal_on_all(world, net->parameters());
      }
      EXPECT_FALSE(at::equal(net->parameters()[0], before[0]));
      EXPECT_EQ(optimizer.stats().steps, 3U);
    });
  }
}

// A step that is left out for gradients that are no numbers is left out wholly: these may come
// last, when other buckets could have been updated.
TEST(ShardedOptimizerTest, NoNumbersInTheLastBucket) {
  for (const How& how : hows()) {
    if (!how.in_backward) continue;
    SCOPED_TRACE(how.name);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = make_net();
      auto options = how.options;
      options.nonfinite = NonFinite::kSkip;
      DistributedDataParallel model(net, world, options);
      const ShardedOptimizer<optim::SGD> optimizer(model.reducer(), 0.1, {.in_backward = true});
      bool is_number = true;
      net->parameters()[0].register_hook(
          [&](const at::Tensor& gradient) { return is_number ? gradient : gradient / 0; });
      for (int step = 0; step < 4; ++step) {
        is_number = step != 2 || r.id() != 1;
        const auto before = copies_of(*net);
        model(input_of(r.id(), step, {4, 6})).pow(2).mean().backward();
        const auto after = net->parameters();
        for (std::size_t i = 0; i < after.size(); ++i) {
          EXPECT_EQ(at::equal(after[i], before[i]), step == 2) << step << ", " << i;
        }
        expect_equal_on_all(world, net->parameters());
      }
      EXPECT_EQ(optimizer.stats().steps, 3U);
    });
  }
}

// A gradient that the user has replaced by one that does not fit: an error on all ranks, at once.
TEST(ShardedOptimizerTest, GradientsThatDoNotFit) {
  for (const bool shares : {true, false}) {
    SCOPED_TRACE(shares);
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      const auto group =
          shares ? world
                 : ProcessGroup::from(c10::make_intrusive<FakeBackend>(make_backend(r, "foreign")));
      auto net = make_net();
      DistributedDataParallel model(net, group);
      ShardedOptimizer<optim::SGD> optimizer(model.reducer(), 0.1);
      const auto before = copies_of(*net);
      const auto backward = [&] {
        net->zero_grad();
        model(input_of(r.id(), 0, {4, 6})).sum().backward();
      };
      const auto wrong = {at::ones({1}), at::eye(300).to_sparse()};
      for (const at::Tensor& gradient : wrong) {
        backward();
        if (r.id() == 1) net->parameters()[0].mutable_grad() = gradient;
        EXPECT_THAT(text_of([&] { optimizer.step(); }),
                    HasSubstr(r.id() == 1 ? "the gradient of 0.weight" : "rank 1 has refused"));
      }
      EXPECT_TRUE(at::equal(net->parameters()[0], before[0]));
      backward();
      optimizer.step();
      EXPECT_FALSE(at::equal(net->parameters()[0], before[0]));
      expect_equal_on_all(world, net->parameters());
    });
  }
}

// Each parameter gets memory of its own: two that are one would part.
TEST(ShardedOptimizerTest, ParametersThatShareMemory) {
  run_ranks(2, [](Rank&, const ProcessGroup& world) {
    torch::nn::Sequential net(Linear(4, 4), Linear(4, 4));
    const auto parameters = net->parameters();
    parameters[2].set_data(parameters[0].data());
    DistributedDataParallel model(net, world);
    expect_error(ErrorKind::kUnsupported, "0.weight and 1.weight share memory",
                 [&] { ShardedOptimizer<optim::SGD>(model.reducer(), 0.1); });
  });
}

}  // namespace
}  // namespace convoy::test
