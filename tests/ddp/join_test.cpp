// Uneven inputs: scenarios 64 and 66 to 70 of ../shared/reference/ddp.md, and what goes beyond.
#include <csignal>
#include <optional>
#include <random>

#include "convoy/join.h"
#include "ddp/support.h"

namespace convoy::test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::nn::Linear;

Linear weight_of_one() {
  Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  const at::NoGradGuard no_grad;
  net->weight.fill_(1);
  return net;
}

// test_ddp_join_model_equivalence: rank r has 2 (r + 1) inputs, whose gradient is 1.
TEST(JoinTest, ModelEquivalence) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    auto net = weight_of_one();
    DistributedDataParallel model(net, world);
    torch::optim::SGD sgd(net->parameters(), 0.01 * 3);
    join({&model}, [&] {
      for (int i = 0; i < 2 * (r.id() + 1); ++i) {
        sgd.zero_grad();
        model(at::ones({1, 1})).sum().backward();
        sgd.step();
      }
    });
    EXPECT_NEAR(net->weight.item<double>(), 1 - 0.01 * (2 + 4 + 6), 1e-6);
    expect_equal_on_all(world, net->parameters());
  });
}

// A loop that zeroes gradients after each step: those of the others' last steps are not left
// behind.
TEST(JoinTest, GradientsAfterwards) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = weight_of_one();
    DistributedDataParallel model(net, world);
    join({&model}, [&] {
      for (int i = 0; i < 1 + r.id(); ++i) {
        model(at::ones({1, 1})).sum().backward();
        net->zero_grad();
      }
    });
    EXPECT_FALSE(net->weight.grad().defined());
    model(at::ones({1, 1})).sum().backward();
    EXPECT_EQ(net->weight.grad().item<double>(), 1);
  });
}

struct Work {
  std::string name;
  DdpOptions options = {};
  JoinOptions join = {};
  bool hook = false;
  int syncs_every = 1;
};

// The model that one process gets from the inputs of all.
void train_alone(const Work& work, NetImpl& net, const std::vector<int>& inputs) {
  torch::optim::SGD sgd(net.parameters(), 0.5);
  const int most = *std::max_element(inputs.begin(), inputs.end());
  const auto ranks = static_cast<int>(inputs.size());
  for (int first = 0; first < most; first += work.syncs_every) {
    sgd.zero_grad();
    int live = 0;
    const int last = first + work.syncs_every - 1;
    std::vector<at::Tensor> losses;
    for (int rank = 0; rank < ranks; ++rank) {
      const int count = inputs[static_cast<std::size_t>(rank)];
      if (count <= last) continue;
      ++live;
      for (int step = first; step <= last; ++step) {
        losses.push_back(net.forward(input_of(rank, step)).pow(2).sum());
      }
    }
    // Leftovers go into the next round there is.
    if (live == 0) break;
    for (int rank = 0; rank < ranks; ++rank) {
      const int count = inputs[static_cast<std::size_t>(rank)];
      if (count <= first || count > last) continue;
      for (int step = first; step < count; ++step) {
        losses.push_back(net.forward(input_of(rank, step)).pow(2).sum());
      }
    }
    const int divisor = work.join.divide_by_initial_world_size ? ranks : live;
    (at::stack(losses).sum() / divisor).backward();
    sgd.step();
  }
}

void train_together(const Work& work, const std::vector<int>& inputs, Rank& r,
                    const ProcessGroup& world) {
  SCOPED_TRACE(work.name + " of " + ::testing::PrintToString(inputs));
  auto net = seeded(1, [] { return Net(); });
  auto local = seeded(1, [] { return Net(); });
  DistributedDataParallel model(net, world, work.options);
  if (work.hook) model.register_comm_hook(hooks::all_reduce);
  torch::optim::SGD sgd(net->parameters(), 0.5);
  join(
      {&model},
      [&] {
        sgd.zero_grad();
        for (int step = 0; step < inputs[static_cast<std::size_t>(r.id())]; ++step) {
          const auto loss = [&] { return model(input_of(r.id(), step)).pow(2).sum(); };
          if ((step + 1) % work.syncs_every != 0) {
            const auto scope = model.no_sync();
            loss().backward();
            continue;
          }
          loss().backward();
          sgd.step();
          sgd.zero_grad();
        }
      },
      work.join);
  train_alone(work, *local, inputs);
  const auto expected = local->parameters();
  const auto actual = net->parameters();
  for (std::size_t i = 0; i < expected.size(); ++i) expect_close(actual[i], expected[i]);
  expect_equal_on_all(world, actual);
}

std::vector<Work> works() {
  std::vector<Work> all;
  for (const Mode& mode : modes()) {
    for (const bool by_all : {true, false}) {
      for (const int every : {1, 3}) {
        all.push_back(
            {mode.name + (by_all ? ", by all" : ", by live") + (every == 1 ? "" : ", accumulating"),
             mode.options,
             {.divide_by_initial_world_size = by_all},
             by_all && every == 1,
             every});
      }
    }
  }
  all.push_back({"skips unused",
                 {.bucket_cap_mb = 0.001,
                  .find_unused_parameters = true,
                  .skip_all_reduce_unused_params = true}});
  return all;
}

// test_ddp_uneven_inputs: baselines 0 and 5, offsets 2, 3 and 10, one or two ranks that end early.
TEST(JoinTest, UnevenInputs) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    for (const Work& work : works()) {
      for (const int base : {0, 5}) {
        for (const int offset : {2, 10}) {
          train_together(work, {base, base + offset, base + offset}, r, world);
        }
        train_together(work, {base, base, base + 3}, r, world);
        train_together(work, {base + 3, base, base}, r, world);
      }
    }
  });
}

// Any numbers of inputs, 2 to 5 ranks, all options: no hang, and the model that one process gets.
TEST(JoinTest, RandomInputs) {
  std::mt19937 random_numbers(7);
  const auto all = works();
  for (int round = 0; round < 24; ++round) {
    const int size = 2 + static_cast<int>(random_numbers() % 4);
    std::vector<int> inputs;
    for (int rank = 0; rank < size; ++rank) {
      inputs.push_back(static_cast<int>(random_numbers() % 6));
    }
    const Work& work = all[random_numbers() % all.size()];
    run_ranks(size, [&](Rank& r, const ProcessGroup& world) {
      train_together(work, inputs, r, world);
      train_together(work, {inputs.rbegin(), inputs.rend()}, r, world);
    });
  }
}

// What gradients become, beyond the mean.
TEST(JoinTest, SumsAndWeights) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    for (const bool by_all : {true, false}) {
      auto net = weight_of_one();
      DistributedDataParallel sum(net, world, {.reduce = GradReduce::kSum});
      auto other = weight_of_one();
      DistributedDataParallel weighted(other, world, {.reduce = GradReduce::weighted(1)});
      join({&sum, &weighted},
           [&] {
             for (int step = 0; step <= r.id(); ++step) {
               net->zero_grad();
               other->zero_grad();
               (sum(at::ones({1, 1})) * (r.id() + 1)).sum().backward();
               weighted.set_reduce(GradReduce::weighted(r.id()));
               (weighted(at::ones({1, 1})) * (r.id() + 1)).sum().backward();
               const double sums[] = {6, 5, 3}, means[] = {(2 + 2 * 3) / 3.0, (2 + 2 * 3) / 3.0, 3};
               EXPECT_NEAR(net->weight.grad().item<double>(), sums[step], 1e-6);
               EXPECT_NEAR(other->weight.grad().item<double>(), means[step], 1e-6);
             }
           },
           {.divide_by_initial_world_size = by_all});
    }
  });
}

struct TablesImpl : torch::nn::Module {
  TablesImpl() {
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true)));
    unused = register_module("unused", Linear(2, 2));
    fc = register_module("fc", Linear(2, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return fc(table(x)).sum(); }
  torch::nn::Embedding table{nullptr};
  Linear unused{nullptr}, fc{nullptr};
};
TORCH_MODULE(Tables);

// Sparse gradients, parameters that nobody uses, static graphs that begin without this rank.
TEST(JoinTest, SparseAndUnused) {
  for (const bool is_static : {false, true}) {
    for (const bool by_all : {true, false}) {
      run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
        auto net = seeded(1, [] { return Tables(); });
        DistributedDataParallel model(
            net, world, {.find_unused_parameters = !is_static, .static_graph = is_static});
        const auto row = [](int rank) { return at::full({1}, rank, at::kLong); };
        const auto fc = net->fc->weight.detach().clone()[0];
        for (int epoch = 0; epoch < 2; ++epoch) {
          // In the first epoch rank 0 has nothing, in the second the last one.
          const int inputs = epoch == 0 ? 2 * r.id() : 4 - 2 * r.id();
          join({&model},
               [&] {
                 for (int step = 0; step < inputs; ++step) {
                   net->zero_grad();
                   model(row(r.id())).backward();
                   const int live = step < 2 ? 2 : 1;
                   const auto dense = net->table->weight.grad().to_dense();
                   expect_close(dense[r.id()], fc / (by_all ? 3 : live));
                   EXPECT_EQ(net->table->weight.grad().coalesce()._nnz(), live);
                   EXPECT_FALSE(net->unused->weight.grad().defined());
                 }
               },
               {.divide_by_initial_world_size = by_all});
          expect_equal_on_all(world, net->parameters());
        }
      });
    }
  }
}

// Buffers follow the ranks that live, without a message of their own.
TEST(JoinTest, Buffers) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    for (const bool syncs : {true, false}) {
      auto net = seeded(1, [] {
        return torch::nn::Sequential(Linear(2, 4), torch::nn::BatchNorm1d(4), Linear(4, 1));
      });
      DistributedDataParallel model(net, world, {.forward_sync_buffers = syncs});
      torch::optim::SGD sgd(net->parameters(), 0.1);
      if (r.id() == 2) net->buffers()[0].fill_(9);  // gone with the first step, or kept
      join({&model}, [&] {
        for (int step = 0; step < 3 - r.id(); ++step) {
          sgd.zero_grad();
          model(input_of(r.id(), step, {4, 2})).pow(2).sum().backward();
          if (syncs && step == 0) expect_equal_on_all(world, net->buffers());
          sgd.step();
        }
      });
      expect_equal_on_all(world, net->parameters());
      const auto counts = world.all_gather(net->buffers()[2]);
      const std::vector<std::int64_t> seen(counts.data_ptr<std::int64_t>(),
                                           counts.data_ptr<std::int64_t>() + 3);
      // test_ddp_join_respects_forward_sync_buffers_false
      EXPECT_THAT(seen, syncs ? ElementsAre(3, 3, 3) : ElementsAre(3, 2, 1));
      if (syncs) expect_equal_on_all(world, net->buffers());
    }
  });
}

// By a hook, and by hand.
TEST(JoinTest, BufferHookAndSyncBuffers) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    torch::nn::Sequential net(Linear(2, 4), torch::nn::BatchNorm1d(4));
    DistributedDataParallel model(net, world);
    int calls = 0;
    model.register_buffer_hook([&](const ProcessGroup& group, const NamedTensors& buffers) {
      ++calls;
      group.all_reduce(buffers[0].second, {.op = ReduceOp::kAvg});
    });
    join({&model}, [&] {
      for (int step = 0; step < 2 * r.id() + 1; ++step) {
        model(at::ones({2, 2})).sum().backward();
        model.sync_buffers();
      }
    });
    EXPECT_EQ(calls, 1 + 2 * 3);  // at the start, and twice in a step, also where there are none
  });
}

// A joinable of one's own, as in PyTorch's TestJoin: all-reduces ones, or zeros in the place of a
// rank that has come to its end.
class Counter : public Joinable {
 public:
  explicit Counter(ProcessGroup group) : group_(std::move(group)) {}

  void step() {
    notify_join_context();
    add(1);
  }
  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override {
    struct Hook : JoinHook {
      explicit Hook(Counter& it) : counter(it) {}
      void main_hook(const JoinStep& step) override {
        counter.lives.push_back(step.live);
        counter.add(0);
      }
      void post_hook(const JoinEnd& end) override { counter.ends.push_back(end); }
      Counter& counter;
    };
    return std::make_unique<Hook>(*this);
  }
  const ProcessGroup& join_process_group() const override { return group_; }

  int total = 0;  // as long as this rank has inputs
  std::vector<std::vector<int>> lives;
  std::vector<JoinEnd> ends;

 private:
  void add(int mine) {
    const auto sum = full(mine, {1});
    group_.all_reduce(sum);
    if (mine != 0) total += sum.item<int>();
  }
  ProcessGroup group_;
};

// test_single_joinable_main_hooks, test_multiple_joinables
TEST(JoinTest, JoinablesOfOnesOwn) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    Counter a(world), b(world), c(world);
    join({&a}, [&] {
      for (int i = 0; i < 3 + r.id(); ++i) a.step();
    });
    EXPECT_EQ(a.total, 6 + r.id());
    if (r.id() == 0) {
      EXPECT_THAT(a.lives, ElementsAre(ElementsAre(1)));
    }
    ASSERT_EQ(a.ends.size(), 1U);
    EXPECT_EQ(a.ends[0].last_joiner, 1);
    EXPECT_EQ(a.ends[0].is_last_joiner, r.id() == 1);
    a.total = 0;
    Join scope({&a, &b, &c});
    for (int i = 0; i < 3 + r.id(); ++i) {
      a.step();
      b.step();
      c.step();
    }
    scope.finish();
    EXPECT_EQ(a.total + b.total + c.total, 3 * (6 + r.id()));
  });
}

// A model and a joinable that does something once a step, as a sharded optimizer would.
TEST(JoinTest, ModelAndAnother) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    auto net = weight_of_one();
    DistributedDataParallel model(net, world);
    Counter steps(world);
    join({&model, &steps}, [&] {
      for (int i = 0; i <= r.id(); ++i) {
        net->zero_grad();
        model(at::ones({1, 1})).sum().backward();
        steps.step();
        const int live = 3 - i;
        EXPECT_NEAR(net->weight.grad().item<double>(), live / 3.0, 1e-6);
      }
    });
    EXPECT_EQ(steps.total, r.id() == 0 ? 3 : r.id() == 1 ? 5 : 6);
  });
}

// The reducer alone.
TEST(JoinTest, Reducers) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto p = at::ones({2}).requires_grad_();
    Reducer reducer({p}, world);
    join({&reducer}, [&] {
      for (int i = 0; i <= r.id(); ++i) {
        p.mutable_grad().reset();
        reducer.prepare_for_backward({(p * 2).sum()})[0].backward();
        expect_equal(p.grad(), full(i == 0 ? 2 : 1, {2}));
        const at::NoGradGuard no_grad;
        p.add_(p.grad(), -1);
      }
    });
    expect_equal(p, full(-2, {2}));
  });
}

// test_ddp_uneven_inputs_stop_iteration_sync_bn without its layer: exactly the least number of
// steps, and both texts.
TEST(JoinTest, ThrowsOnEarlyTermination) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] {
      return torch::nn::Sequential(Linear(2, 4), torch::nn::BatchNorm1d(4), Linear(4, 1));
    });
    DistributedDataParallel model(net, world);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    int steps = 0;
    const auto train = [&](int inputs) {
      for (int step = 0; step < inputs; ++step) {
        sgd.zero_grad();
        model(input_of(r.id(), step, {4, 2})).pow(2).sum().backward();
        sgd.step();
        ++steps;
      }
    };
    const JoinOptions options{.throw_on_early_termination = true};
    join({&model}, [&] { train(3); }, options);  // nobody is early
    const auto text =
        text_of([&] { join({&model}, [&] { train(r.id() == 1 ? 5 : 10); }, options); });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1 ran out of inputs after 5 steps"),
                            HasSubstr("throw_on_early_termination")));
    EXPECT_EQ(steps, 3 + 5);
    expect_equal_on_all(world, net->parameters());
    model.sync_buffers();
    train(1);  // works as before
    expect_equal_on_all(world, net->parameters());
  });
}

// test_ddp_uneven_input_join_disable
TEST(JoinTest, Disabled) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    auto net = weight_of_one();
    DistributedDataParallel model(net, world);
    join({&model},
         [&] {
           for (int i = 0; i < 5; ++i) {
             net->zero_grad();
             model(full(r.id(), {1, 1})).sum().backward();
             EXPECT_NEAR(net->weight.grad().item<double>(), 1, 1e-6);
           }
         },
         {.enable = false});
  });
}

// test_ddp_uneven_input_exception: on one rank, whatever the others do: live in a step, or joined.
TEST(JoinTest, ExceptionsAreEverybodys) {
  for (const int fails_at : {0, 1, 3}) {
    run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return Net(); });
      DistributedDataParallel model(net, world);
      const auto step = [&](int i) {
        net->zero_grad();
        model(input_of(r.id(), i)).sum().backward();
      };
      const auto text = text_of([&] {
        join({&model}, [&] {
          for (int i = 0; i < 2 * r.id(); ++i) {
            if (r.id() == 2 && i == fails_at) throw std::runtime_error("the disk is full");
            step(i);
          }
        });
      });
      if (r.id() == 2) {
        EXPECT_EQ(text, "the disk is full");
      } else {
        EXPECT_THAT(text, HasSubstr("rank 2 left the loop by an exception: the disk is full"));
      }
      step(0);  // everything works as before
      expect_equal_on_all(world, gradients_of(*net));
    });
  }
}

struct FailingStep : torch::autograd::Function<FailingStep> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("no memory");
  }
};

// A backward that fails on one of those that live: these throw, and may go on.
TEST(JoinTest, FailedBackwards) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    auto net = weight_of_one();
    DistributedDataParallel model(net, world);
    torch::optim::SGD sgd(net->parameters(), 0.3);
    join({&model}, [&] {
      for (int i = 0; i < 3 * r.id(); ++i) {
        sgd.zero_grad();
        auto x = at::ones({1, 1}).requires_grad_();
        if (i == 1 && r.id() == 2) x = FailingStep::apply(x);
        const auto y = model(x).sum();
        if (i == 1) {
          EXPECT_THAT(text_of([&] { y.backward(); }), HasSubstr("no memory"));
          continue;
        }
        y.backward();
        sgd.step();
      }
    });
    EXPECT_NEAR(net->weight.item<double>(), 1 - 0.1 * (2 + 2 + 3), 1e-6);
    expect_equal_on_all(world, net->parameters());
  });
}

TEST(JoinTest, WhatIsRefused) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto second = make_world(r, "second");
    auto net = weight_of_one(), other = weight_of_one();
    DistributedDataParallel model(net, world), elsewhere(other, second);
    const auto refused = [&](std::vector<Joinable*> joinables, const JoinOptions& options = {}) {
      return text_of([&] { Join scope(std::move(joinables), options); });
    };
    EXPECT_THAT(refused({}), HasSubstr("list of joinables is empty"));
    EXPECT_THAT(refused({&model, &elsewhere}), HasSubstr("joinable 1 uses group \"second\""));
    EXPECT_THAT(refused({&model, &model}), HasSubstr("joinable 0 was passed twice"));
    EXPECT_THAT(refused({&model}, {.divide_by_initial_world_size = r.id() == 0}),
                HasSubstr("option divide_by_initial_world_size"));
    {
      Join scope({&model});
      EXPECT_THAT(refused({&model}), HasSubstr("in a Join already"));
      Counter counter(world);
      EXPECT_THAT(refused({&counter}), HasSubstr("a Join of this group already"));
      scope.finish();
      EXPECT_THAT(text_of([&] { scope.finish(); }), HasSubstr("has ended"));
    }
    model.register_comm_hook(hooks::all_reduce);
    EXPECT_THAT(refused({&model}, {.divide_by_initial_world_size = false}),
                HasSubstr("the model has a comm hook"));
    Counter first(world), next(world);
    const auto text = text_of([&] { join({&first, &next}, [&] { next.step(); }); });
    EXPECT_THAT(text, HasSubstr("before joinable 0"));
    world.barrier();
  });
}

// Ranks that do different things are told so; the joined one hears what they make of it.
TEST(JoinTest, RanksOutOfStep) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    torch::nn::Sequential net(Linear(2, 4), torch::nn::BatchNorm1d(4));
    DistributedDataParallel model(net, world);
    const auto text = text_of([&] {
      join({&model}, [&] {
        if (r.id() == 0) return;
        if (r.id() == 1) model.sync_buffers();
        model(at::ones({2, 2})).sum().backward();
      });
    });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1 begins sync_buffers, rank 2 a step")));
  });
}

// A Join that somebody else conducts, as torch.distributed.algorithms.Join does in Python: ranks
// are told when there is a step. tests/python/join_test.py has more.
TEST(JoinTest, AnothersJoin) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    auto net = weight_of_one();
    DdpCore core(net.ptr(), world, {});
    torch::optim::SGD sgd(net->parameters(), 0.01 * 3);
    const auto forward = [&](const at::Tensor& x = at::ones({1, 1})) {
      core.before_forward();
      at::Tensor y = net->forward(x).sum();
      core.after_forward({&y});
      return y;
    };
    {
      JoinPart part(core, {});
      for (int i = 0; i < 6; ++i) {
        sgd.zero_grad();
        if (i >= 2 * (r.id() + 1)) {
          part.shadow();
          continue;
        }
        part.step();
        forward().backward();
        sgd.step();
      }
      part.finish(r.id() == 2);
      EXPECT_NEAR(net->weight.item<double>(), 1 - 0.01 * (2 + 4 + 6), 1e-6);
      expect_equal_on_all(world, net->parameters());
      // Ranks that are not in the same step.
      std::optional<Reducer::NoSync> pause;
      if (r.id() == 1) pause.emplace(core.reducer());
      EXPECT_THAT(text_of([&] { r.id() == 2 ? part.shadow() : part.step(); }),
                  HasSubstr("rank 1 is inside of no_sync(), rank 0 is not"));
      pause.reset();
      // A backward that fails is an error of those that have no inputs, too.
      const auto text = text_of([&] {
        if (r.id() == 2) return part.shadow();
        part.step();
        const auto x = at::ones({1, 1}).requires_grad_();
        forward(r.id() == 0 ? FailingStep::apply(x) : x).backward();
      });
      EXPECT_THAT(text, HasSubstr(r.id() == 2 ? "of the ranks that have inputs" : "no memory"));
    }
    forward().backward();  // goes on without it
    expect_equal_on_all(world, {net->weight.grad()});
  });
}

// A rank that dies while others have come to their end.
TEST(JoinTest, Death) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto world = make_world(r);
    auto net = seeded(1, [] { return Net(); });
    DistributedDataParallel model(net, world);
    try {
      join({&model}, [&] {
        for (int i = 0; i < 2 * r.id(); ++i) {
          model(input_of(r.id(), i)).sum().backward();
          if (r.id() == 2 && i == 2) {
            r.mark("dies here");
            r.wait_for("never");
          }
        }
      });
      FAIL() << "it went on";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 2"), HasSubstr("SIGKILL")));
    }
  });
  ranks.wait_mark("dies here", 2);
  ranks.kill(2, SIGKILL);
  ranks.join();
}

// A scope that is left without a word ends the waiting of the others.
TEST(JoinTest, ScopeThatIsLeft) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = weight_of_one();
    DistributedDataParallel model(net, world);
    if (r.id() == 0) {
      Join scope({&model});
      return;
    }
    EXPECT_NE(text_of([&] { join({&model}, [] {}); }), "");
  });
}

}  // namespace
}  // namespace convoy::test
