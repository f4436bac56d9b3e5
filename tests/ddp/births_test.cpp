// Gradients that are born in shared memory, with the step allocator.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "convoy/allocator.h"
#include "convoy/sharded_optimizer.h"
#include "ddp/reducer_impl.h"
#include "ddp/support.h"
#include "tensor/memory.h"

namespace convoy::test {
namespace {

using torch::nn::Linear;

torch::nn::Sequential make_net() {
  return seeded(5, [] {
    return torch::nn::Sequential(Linear(8, 256), torch::nn::Tanh(), Linear(256, 128),
                                 torch::nn::Tanh(), Linear(128, 256));
  });
}

std::uint64_t seed_of(int step, int rank) {
  return std::uint64_t{100} * static_cast<std::uint64_t>(step) + static_cast<std::uint64_t>(rank);
}

at::Tensor loss_of(auto& module, int rank, int step) {
  return module(random(seed_of(step, rank), {4, 8})).pow(2).mean();
}

// Ranks that are processes: the allocator is one for all threads.
void run_processes(int size, const std::function<void(Rank&, const ProcessGroup&)>& function) {
  RankGroup(size, RankMode::kProcesses).run([&](Rank& r) { function(r, make_world(r)); });
}

// The mean over ranks, computed by this one alone.
std::vector<at::Tensor> expected_gradients(int ranks, int step) {
  auto net = make_net();
  const auto forward = [&](const at::Tensor& x) { return net->forward(x); };
  for (int r = 0; r < ranks; ++r) (loss_of(forward, r, step) / ranks).backward();
  return gradients_of(*net);
}

void expect_gradients_of_step(const torch::nn::Module& net, int ranks, int step) {
  const auto expected = expected_gradients(ranks, step);
  const auto actual = gradients_of(net);
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) expect_close(actual[i], expected[i]);
}

bool is_born_shared(const at::Tensor& gradient) {
  return is_shared_memory(gradient) && gradient.storage().nbytes() == gradient.nbytes();
}

TEST(BirthsTest, GradientsAreReducedWhereTheyAre) {
  run_processes(3, [](Rank& r, const ProcessGroup& world) {
    install_allocator();
    for (const Mode& mode : modes()) {
      SCOPED_TRACE(mode.name);
      auto net = make_net();
      DistributedDataParallel model(net, world, mode.options);
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        loss_of(model, r.id(), step).backward();
        expect_gradients_of_step(*net, 3, step);
        expect_equal_on_all(world, gradients_of(*net));
        for (const auto& parameter : net->parameters()) {
          // Only at its end, nobody else needs the memory.
          const bool stays =
              parameter.nbytes() >= 64 << 10 && mode.options.launch == BucketLaunch::kLate;
          // A small bucket may be just as large as a gradient; and kAuto depends on the machine.
          if (mode.options.bucket_cap_mb || mode.options.launch == BucketLaunch::kAuto) continue;
          EXPECT_EQ(is_born_shared(parameter.grad()), stays) << parameter.sizes();
        }
      }
    }
    EXPECT_FALSE(is_shared_memory(at::empty({256, 128})));  // outside of a backward
  });
}

// Bytes of a tensor's whole pages that have memory behind them.
std::size_t resident_bytes(const at::Tensor& tensor) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  auto* const data = static_cast<std::byte*>(tensor.mutable_data_ptr());
  const std::size_t before = (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
  std::vector<unsigned char> pages((tensor.nbytes() - before) / page);
  EXPECT_EQ(::mincore(data + before, pages.size() * page, pages.data()), 0);
  return page * static_cast<std::size_t>(
                    std::count_if(pages.begin(), pages.end(), [](auto bits) { return bits & 1; }));
}

// Gradients that are elsewhere leave their buckets without memory; those that come later get it.
TEST(BirthsTest, BucketsThatAreNotUsedTakeNoMemory) {
  for (const bool shards : {false, true}) {
    run_processes(2, [shards](Rank& r, const ProcessGroup& world) {
      install_allocator();
      auto net = make_net();
      DistributedDataParallel model(net, world, {.launch = BucketLaunch::kLate});
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      if (shards) {
        optimizer = std::make_unique<ShardedOptimizer<torch::optim::SGD>>(model.reducer(), 0.0);
      }
      const auto slot = [&] {
        const auto place = ReducerAccess::impl(model.reducer())->place_of(2);
        return place.bucket->slots[place.slot];
      };
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        loss_of(model, r.id(), step).backward();
        EXPECT_TRUE(is_born_shared(net->parameters()[2].grad()));
        EXPECT_EQ(resident_bytes(slot()), 0);
        if (!shards) expect_gradients_of_step(*net, 2, step);
        if (shards) optimizer->step();
      }
      for (const auto& parameter : net->parameters()) {
        parameter.mutable_grad() = at::zeros_like(parameter);  // private: is copied into its bucket
      }
      loss_of(model, r.id(), 3).backward();
      EXPECT_GT(resident_bytes(slot()), 0);
      if (!shards) expect_gradients_of_step(*net, 2, 3);
      if (shards) optimizer->step();
      expect_equal_on_all(world, net->parameters());
    });
  }
}

// A sharded optimizer moves parameters into shared memory: where they were, nothing is kept.
TEST(BirthsTest, ParametersThatHaveMovedLeaveNoMemory) {
  run_processes(2, [](Rank&, const ProcessGroup& world) {
    install_allocator();
    Linear net(1024, 1024);
    DistributedDataParallel model(net, world);
    const ShardedOptimizer<torch::optim::SGD> optimizer(model.reducer(), 0.1);
    EXPECT_TRUE(is_shared_memory(net->weight));
    EXPECT_LT(allocator_stats().cached_bytes, net->weight.nbytes());
  });
}

// What a rank has is its own affair.
TEST(BirthsTest, OnlySomeRanksHaveTheAllocator) {
  run_processes(3, [](Rank& r, const ProcessGroup& world) {
    r.id() == 1 ? install_allocator() : uninstall_allocator();
    auto net = make_net();
    DistributedDataParallel model(net, world, {.launch = BucketLaunch::kLate});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      loss_of(model, r.id(), step).backward();
      expect_gradients_of_step(*net, 3, step);
    }
    EXPECT_EQ(is_born_shared(net->parameters()[2].grad()), r.id() == 1);
  });
}

// Gradients that are added to stay where they are; those that a user made are copied.
TEST(BirthsTest, AccumulatedAndReplaced) {
  run_processes(2, [](Rank& r, const ProcessGroup& world) {
    install_allocator();
    auto net = make_net();
    DistributedDataParallel model(net, world, {.launch = BucketLaunch::kLate});
    const auto loss = [&](int step) { return loss_of(model, r.id(), step); };
    {
      const auto scope = model.no_sync();
      loss(0).backward();
    }
    loss(1).backward();
    const auto first = expected_gradients(2, 0), second = expected_gradients(2, 1);
    auto actual = gradients_of(*net);
    for (std::size_t i = 0; i < actual.size(); ++i) expect_close(actual[i], first[i] + second[i]);
    EXPECT_TRUE(is_born_shared(net->parameters()[2].grad()));

    net->zero_grad(/*set_to_none=*/false);
    loss(2).backward();
    expect_gradients_of_step(*net, 2, 2);
    EXPECT_TRUE(is_born_shared(net->parameters()[2].grad()));

    net->zero_grad();
    for (const auto& parameter : net->parameters()) {
      parameter.mutable_grad() = at::zeros_like(parameter);
    }
    loss(3).backward();
    expect_gradients_of_step(*net, 2, 3);
    expect_equal_on_all(world, gradients_of(*net));
  });
}

struct PositionsImpl : torch::nn::Module {
  PositionsImpl()
      : fc(register_module("fc", Linear(8, 128))),
        positions(register_parameter("positions", at::ones({256, 128}))),
        offsets(register_parameter("offsets", at::ones({1, 256, 128}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return fc(x).unsqueeze(0) + (positions.unsqueeze(0) + offsets);
  }
  Linear fc;
  at::Tensor positions, offsets;
};

// The gradient of `positions` is a view of the one that still goes on to `fc` and to `offsets`:
// reducing it in place while backward runs would change that.
TEST(BirthsTest, GradientsThatAutogradStillNeeds) {
  run_processes(2, [](Rank& r, const ProcessGroup& world) {
    install_allocator();
    const auto make = [] { return seeded(3, [] { return std::make_shared<PositionsImpl>(); }); };
    for (const BucketLaunch launch : {BucketLaunch::kEarly, BucketLaunch::kLate}) {
      auto net = make();
      DistributedDataParallel model(net, world, {.bucket_cap_mb = 0.01, .launch = launch});
      for (int step = 0; step < 6; ++step) {
        const auto input = [&](int rank) { return random(seed_of(step, rank), {256, 8}); };
        net->zero_grad();
        model(input(r.id())).pow(2).sum().backward();
        auto local = make();
        for (int rank = 0; rank < 2; ++rank) {
          (local->forward(input(rank)).pow(2).sum() / 2).backward();
        }
        const auto actual = gradients_of(*net), expected = gradients_of(*local);
        for (std::size_t i = 0; i < actual.size(); ++i) expect_close(actual[i], expected[i]);
      }
    }
  });
}

struct TwinsImpl : torch::nn::Module {
  TwinsImpl()
      : a(register_parameter("a", at::ones({128, 256}))),
        b(register_parameter("b", at::ones({128, 256}))) {}
  at::Tensor forward(const at::Tensor& x) { return (a.unsqueeze(0) + b.unsqueeze(0)) * x; }
  at::Tensor a, b;
};

// Autograd may give two parameters views of one memory: it must not be reduced twice.
TEST(BirthsTest, GradientsThatAreOne) {
  run_processes(2, [](Rank& r, const ProcessGroup& world) {
    install_allocator();
    const auto input = [&](int rank, int step) {
      return random(seed_of(step, rank), {1, 128, 256});
    };
    for (const bool sums : {false, true}) {
      SCOPED_TRACE(sums);
      auto net = std::make_shared<TwinsImpl>();
      DistributedDataParallel model(
          net, world,
          {.reduce = sums ? GradReduce::kSum : GradReduce::kMean, .launch = BucketLaunch::kLate});
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        model(input(r.id(), step)).pow(2).sum().backward();
        // Of ((a + b) x)^2, where both are 1.
        auto sum = 4 * (input(0, step).pow(2) + input(1, step).pow(2));
        if (!sums) sum = sum / 2;
        for (const auto& p : net->parameters()) expect_close(p.grad(), sum[0]);
      }
    }
    // Neither by a sharded optimizer, for the norm of them.
    auto net = std::make_shared<TwinsImpl>();
    DistributedDataParallel model(net, world, {.launch = BucketLaunch::kLate});
    ShardedOptimizer<torch::optim::SGD> optimizer(model.reducer(), 1e-3, {.max_norm = 1e6});
    for (int step = 0; step < 3; ++step) {
      const auto before = net->a.detach().clone();
      model(input(r.id(), step)).pow(2).sum().backward();
      optimizer.step();
      auto gradient = at::zeros({128, 256});
      for (int rank = 0; rank < 2; ++rank) {
        const auto x = input(rank, step)[0];
        gradient += 2 * (before + before) * x * x / 2;
      }
      expect_close(net->a.detach(), before - 1e-3 * gradient);
      expect_close(net->b.detach(), net->a.detach());
    }
  });
}

// Whoever needs gradients in their bucket gets them there.
TEST(BirthsTest, WithAHook) {
  run_processes(2, [](Rank& r, const ProcessGroup& world) {
    install_allocator();
    auto net = make_net();
    DistributedDataParallel model(net, world, {.launch = BucketLaunch::kLate});
    model.register_comm_hook(hooks::all_reduce);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      loss_of(model, r.id(), step).backward();
      expect_gradients_of_step(*net, 2, step);
    }
    EXPECT_FALSE(is_born_shared(net->parameters()[2].grad()));
  });
}

}  // namespace
}  // namespace convoy::test
