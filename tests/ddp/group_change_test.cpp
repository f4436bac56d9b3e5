// Another group: scenario 73 of ../shared/reference/ddp.md, deaths in the middle of a step, ranks
// that join.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <sstream>

#include "base/concat.h"
#include "convoy/optimizer_in_backward.h"
#include "convoy/sharded_optimizer.h"
#include "ddp/hook_state.h"
#include "ddp/support.h"
#include "optim/shard_layout.h"

namespace convoy::test {
namespace {

using testing::HasSubstr;
using torch::nn::Linear;
namespace optim = torch::optim;

ProcessGroup make_group(const Rank& r, int rank, int size, const std::string& name) {
  return new_group("convoy",
                   {.timeout = 60s, .store = r.store(), .rank = rank, .size = size, .name = name});
}

torch::nn::Sequential make_net() {
  return seeded(21, [] {
    return torch::nn::Sequential(Linear(6, 400), torch::nn::Tanh(), Linear(400, 300),
                                 torch::nn::Tanh(), Linear(300, 3));
  });
}

// The state that it keeps, whole: by name and parameter.
template <class Optimizer>
std::vector<at::Tensor> states_of(const Optimizer& optimizer, const char* name, int parameters) {
  torch::serialize::OutputArchive out;
  optimizer.save(out);
  std::stringstream bytes;
  out.save_to(bytes);
  torch::serialize::InputArchive in;
  in.load_from(bytes);
  std::vector<at::Tensor> found(static_cast<std::size_t>(parameters));
  for (auto& [index, tensor] : read_state(in, name)) found.at(index) = tensor;
  return found;
}

// Groups {0, 1}, then {1, 2, 3}, then all, with a backward that fails each time. Ranks that are not
// in a group wait; those that join have trained nothing.
TEST(GroupChangeTest, MembersComeAndGo) {
  for (const bool sharded : {false, true}) {
    SCOPED_TRACE(sharded);
    RankGroup(4, RankMode::kThreads).run([&](Rank& r) {
      auto net = make_net();
      {
        const at::NoGradGuard no_grad;  // they bring something else
        if (r.id() >= 2) net->parameters()[0].fill_(r.id());
      }
      const std::vector<std::vector<int>> groups = {{0, 1}, {1, 2, 3}, {0, 1, 2, 3}};
      const auto own = make_group(r, 0, 1, concat("own ", r.id()));
      DistributedDataParallel model(net, own);
      std::unique_ptr<ShardedOptimizer<optim::AdamW>> shards;
      if (sharded) {
        shards = std::make_unique<ShardedOptimizer<optim::AdamW>>(model.reducer(), 0.01);
      }
      optim::SGD sgd(net->parameters(), 0.05);
      for (std::size_t g = 0; g < groups.size(); ++g) {
        const auto place = std::find(groups[g].begin(), groups[g].end(), r.id());
        if (place == groups[g].end()) continue;
        const auto group = make_group(r, static_cast<int>(place - groups[g].begin()),
                                      static_cast<int>(groups[g].size()), concat("epoch ", g));
        model.update_process_group(group);
        EXPECT_EQ(model.group(), group);
        EXPECT_EQ(model.reducer().stats().backwards, 4 * g);
        expect_equal_on_all(group, net->parameters());
        for (int step = 0; step < 4; ++step) {
          sgd.zero_grad();
          auto x = input_of(r.id(), static_cast<int>(g) * 10 + step, {4, 6}).requires_grad_();
          if (step == 2 && group.rank() == 1) {
            x.register_hook([](const at::Tensor&) { throw std::runtime_error("on purpose"); });
          }
          const auto loss = model(x).pow(2).mean();
          if (step == 2) {
            EXPECT_THAT(text_of([&] { loss.backward(); }), HasSubstr("on purpose"));
            continue;
          }
          loss.backward();
          if (sharded) {
            shards->step();
          } else {
            sgd.step();
          }
          expect_equal_on_all(group, net->parameters());
        }
        if (sharded) {
          EXPECT_EQ(shards->stats().steps, 3 * (g + 1));
        }
      }
    });
  }
}

// To the bit what a replicated optimizer makes of it, over a change from four ranks to three to
// two, and learning rates come with the state.
TEST(GroupChangeTest, ShardsMove) {
  RankGroup(4, RankMode::kThreads).run([](Rank& r) {
    auto net = make_net(), twin = make_net();
    DistributedDataParallel model(net, make_group(r, 0, 1, concat("a ", r.id())));
    DistributedDataParallel replicated(twin, make_group(r, 0, 1, concat("b ", r.id())));
    ShardedOptimizer<optim::AdamW> optimizer(model.reducer(),
                                             optim::AdamWOptions(0.01).amsgrad(true));
    OptimizerInBackward other(replicated.reducer(), AdamW{.lr = 0.01, .amsgrad = true});
    for (int size = 4; size > 1; --size) {
      if (r.id() >= size) break;
      model.update_process_group(make_group(r, r.id(), size, concat("model ", size)));
      replicated.update_process_group(make_group(r, r.id(), size, concat("twin ", size)));
      for (int step = 0; step < 3; ++step) {
        const auto x = input_of(r.id(), 10 * size + step, {4, 6});
        model(x).pow(2).mean().backward();
        optimizer.step();
        replicated(x).pow(2).mean().backward();
        const auto a = net->parameters(), b = twin->parameters();
        for (std::size_t i = 0; i < a.size(); ++i) ASSERT_TRUE(at::equal(a[i], b[i])) << i;
      }
      for (const char* name : {"first", "second", "third"}) {
        const auto mine = states_of(optimizer, name, 6), theirs = states_of(other, name, 6);
        for (std::size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(at::equal(mine[i], theirs[i]));
      }
      // Rank 0 gives the state to all.
      if (r.id() == 0) optimizer.param_groups()[0].options().set_lr(0.01 * size);
      other.set_lr(0.01 * size);
    }
  });
}

// What watches backwards comes along: replicas are compared where they are kept in full precision.
TEST(GroupChangeTest, MixedPrecisionAndReplicas) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_net();
    DistributedDataParallel model(
        net, make_group(r, 0, 1, concat("own ", r.id())),
        {.check_replicas_every = 1,
         .mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
    model.update_process_group(world);
    const auto backward = [&](int step) {
      net->zero_grad();
      model(input_of(r.id(), step, {4, 6})).to(at::kFloat).pow(2).mean().backward();
    };
    backward(0);
    if (r.id() == 1) {
      const at::NoGradGuard no_grad;
      net->parameters()[0][0][0] += 1e-5;  // less than bf16 tells apart
    }
    EXPECT_THAT(text_of([&] { backward(1); }), HasSubstr("parameter 0.weight"));
  });
}

// Who joins must have the same optimizers: otherwise all hear of it, and stay as they were.
TEST(GroupChangeTest, OptimizersThatDiffer) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_net();
    DistributedDataParallel model(net, make_group(r, 0, 1, concat("own ", r.id())));
    const auto text = [&] { return text_of([&] { model.update_process_group(world); }); };
    {
      const ShardedOptimizer<optim::AdamW> optimizer(model.reducer(), 0.01,
                                                     {.max_norm = r.id() == 0 ? 0.0 : 1.0});
      EXPECT_THAT(text(), HasSubstr("norm 1 of type 2"));
    }
    {
      std::unique_ptr<OptimizerInBackward> optimizer;
      if (r.id() == 0) {
        optimizer = std::make_unique<OptimizerInBackward>(model.reducer(), AdamW{.lr = 0.01});
      }
      EXPECT_THAT(text(), HasSubstr("consumers: 1"));
    }
    EXPECT_EQ(model.group().size(), 1);
    model(input_of(r.id(), 0, {4, 6})).sum().backward();
  });
}

TEST(GroupChangeTest, WhatItRefuses) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = make_net();
    DistributedDataParallel model(net, world);
    EXPECT_THAT(text_of([&] { model.update_process_group({}); }),
                HasSubstr("the new group is empty"));
    {
      const auto scope = model.no_sync();
      EXPECT_THAT(text_of([&] { model.update_process_group(world); }), HasSubstr("no_sync"));
    }
    join({&model}, [&] {
      EXPECT_THAT(text_of([&] { model.update_process_group(world); }), HasSubstr("Join"));
    });
    auto another = torch::nn::Sequential(Linear(6, 2 + r.id()));
    DistributedDataParallel alone(another, make_group(r, 0, 1, concat("own ", r.id())));
    EXPECT_THAT(text_of([&] { alone.update_process_group(world); }), HasSubstr("[3, 6]"));
    model(input_of(r.id(), 0, {4, 6})).sum().backward();  // as it was
  });
}

// A process that ends in the middle of changing a chunk: where a page of its own parameters cannot
// be written.
void end_at(const at::Tensor& parameter, std::int64_t number) {
  struct sigaction action = {};
  action.sa_handler = [](int) { ::_exit(3); };
  ::sigaction(SIGSEGV, &action, nullptr);
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(parameter.data_ptr<float>() + number);
  ASSERT_EQ(::mprotect(reinterpret_cast<void*>(address / page * page), page, PROT_READ), 0);
}

// Rank 1 dies with one of its chunks half changed. The survivors take its shard over: what it had
// finished is of this step, the rest of the one before, parameters and states alike, and both
// survivors have the same. Then training goes on.
TEST(GroupChangeTest, SurvivorsAdoptAShard) {
  RankGroup ranks(3, RankMode::kProcesses, {.limit = 100s});
  ranks.start([](Rank& r) {
    auto group = make_group(r, r.id(), r.size(), "world");
    auto net = make_net(), twin = make_net();
    DistributedDataParallel model(net, group), replicated(twin, group);
    ShardedOptimizer<optim::AdamW> optimizer(model.reducer(), 0.01);
    auto other = std::make_unique<OptimizerInBackward>(replicated.reducer(), AdamW{.lr = 0.01});
    const auto backward = [&](auto& trained, int step) {
      trained(input_of(r.id(), step, {4, 6})).pow(2).mean().backward();
    };
    struct Snapshot {
      std::vector<at::Tensor> parameters, means, squares;
    };
    const auto snapshot = [&] {
      Snapshot made;
      for (const auto& p : twin->parameters()) made.parameters.push_back(p.detach().clone());
      made.means = states_of(*other, "first", 6);
      made.squares = states_of(*other, "second", 6);
      return made;
    };
    Snapshot before, after;
    for (int step = 0; step < 3; ++step) {
      if (step == 2) before = snapshot();
      backward(replicated, step);
    }
    after = snapshot();

    for (int step = 0; step < 2; ++step) {
      backward(model, step);
      optimizer.step();
    }
    backward(model, 2);
    // Which of the big matrix's blocks are rank 1's?
    std::vector<ShardLayout::Item> items;
    for (const auto& p : net->parameters()) items.push_back({.numbers = p.numel(), .states = 3});
    const ShardLayout layout(items, 3);
    std::int64_t torn = -1;
    for (const auto& block : layout.blocks()) {
      if (block.item == 2 && block.owner == 1 && torn < 0) {
        torn = block.begin + ShardLayout::kChunk + ShardLayout::kChunk / 2;  // in its second chunk
      }
    }
    ASSERT_GE(torn, 0);
    if (r.id() == 1) end_at(net->parameters()[2], torn);
    r.mark("ready");
    r.wait_for("go");
    EXPECT_THAT(text_of([&] { optimizer.step(); }), HasSubstr("rank 1"));
    ASSERT_NE(r.id(), 1);
    group = group.shrink();
    model.update_process_group(group);
    expect_equal_on_all(group, net->parameters());

    const auto means = states_of(optimizer, "first", 6),
               squares = states_of(optimizer, "second", 6);
    const auto parameters = net->parameters();
    std::int64_t old_numbers = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      // Parameter, mean and square of a number are all of one step.
      const auto is = [&](const Snapshot& of) {
        return parameters[i].eq(of.parameters[i]) & means[i].eq(of.means[i]) &
               squares[i].eq(of.squares[i]);
      };
      const auto fresh = is(after), old = is(before) & ~fresh;
      EXPECT_TRUE((fresh | old).all().item<bool>()) << i;
      if (i == 2) {
        EXPECT_TRUE(old.flatten()[torn].item<bool>());
        EXPECT_TRUE(old.flatten()[torn - ShardLayout::kChunk / 2].item<bool>());
        EXPECT_FALSE(old.flatten()[torn - ShardLayout::kChunk].item<bool>());
      }
      old_numbers += old.sum().item<std::int64_t>();
    }
    EXPECT_GE(old_numbers, ShardLayout::kChunk);
    for (int step = 3; step < 6; ++step) {
      backward(model, step);
      optimizer.step();
      expect_equal_on_all(group, net->parameters());
    }
  });
  ranks.wait_mark("ready");
  ranks.kill(1, SIGCONT);  // it may end in any way
  ranks.post("go");
  ranks.join();
}

}  // namespace
}  // namespace convoy::test
