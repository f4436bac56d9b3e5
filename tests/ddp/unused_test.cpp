// Parameters that a backward does not use: scenarios 17, 18 and 34 to 50 of
// ../shared/reference/ddp.md, and B1, B4, B10, B16, B19.
#include "ddp/support.h"

namespace convoy::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using torch::nn::Linear;

// Tasks whose parameters are used by choice: task i multiplies x by its weight.
struct TasksImpl : torch::nn::Module {
  TasksImpl()
      : t0(register_parameter("t0", at::ones({2, 2}))),
        t1(register_parameter("t1", at::ones({2, 2}))),
        t2(register_parameter("t2", at::ones({2, 2}))) {}
  at::Tensor forward(const at::Tensor& x, const std::vector<int>& tasks) {
    at::Tensor y = x;
    for (const int task : tasks) y = y * std::array{t0, t1, t2}[static_cast<std::size_t>(task)];
    return y;
  }
  at::Tensor t0, t1, t2;
};
TORCH_MODULE(Tasks);

std::vector<DdpOptions> searching() {
  return {{.find_unused_parameters = true},
          {.find_unused_parameters = true, .gradient_as_bucket_view = false},
          {.bucket_cap_mb = 1e-6, .find_unused_parameters = true, .launch = BucketLaunch::kEarly},
          {.bucket_cap_mb = 1e-6,
           .find_unused_parameters = true,
           .skip_all_reduce_unused_params = true,
           .launch = BucketLaunch::kEarly},
          {.static_graph = true},
          {.bucket_cap_mb = 1e-6, .static_graph = true, .launch = BucketLaunch::kEarly},
          {.bucket_cap_mb = 1e-6, .static_graph = true, .gradient_as_bucket_view = false}};
}

// test_global_local_unused_params_grad*: t0 on rank 0, t1 on rank 1, t2 nowhere.
TEST(UnusedTest, GlobalAndLocal) {
  for (const DdpOptions& options : searching()) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      Tasks net;
      DistributedDataParallel model(net, world, options);
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        model(at::ones({2, 2}), std::vector{r.id()}).mean().backward();
        expect_equal(net->t0.grad(), full(0.125, {2, 2}));
        expect_equal(net->t1.grad(), full(0.125, {2, 2}));
        EXPECT_FALSE(net->t2.grad().defined());
        EXPECT_EQ(model.reducer().used(), (std::vector{true, true, false}));
      }
    });
  }
}

// A gradient that nobody adds to stays what it was, to the bit, with three ranks too.
TEST(UnusedTest, AGloballyUnusedGradientIsUntouched) {
  for (const DdpOptions& options : searching()) {
    run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
      Tasks net;
      DistributedDataParallel model(net, world, options);
      const auto before = random(3, {2, 2});
      net->t2.mutable_grad() = before.clone();
      for (int step = 0; step < 3; ++step) {
        for (auto& p : {net->t0, net->t1}) p.mutable_grad().reset();
        model(at::ones({2, 2}), std::vector{r.id() % 2}).mean().backward();
        expect_equal(net->t2.grad(), before);
      }
    });
  }
}

// test_find_unused_parameters_when_unused_parameters_empty
TEST(UnusedTest, OneRankUsesAll) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    Tasks net;
    DistributedDataParallel model(net, world, {.find_unused_parameters = true});
    model(at::ones({2, 2}), r.id() == 0 ? std::vector{0, 1, 2} : std::vector{1, 2})
        .mean()
        .backward();
    for (const auto& p : net->parameters()) EXPECT_TRUE(p.grad().defined());
    expect_equal(net->t0.grad(), full(0.125, {2, 2}));
  });
}

// test_ddp_control_flow_same_across_ranks, and with another choice on each rank and step.
TEST(UnusedTest, ControlFlow) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    Tasks net, local;
    DistributedDataParallel model(
        net, world,
        {.bucket_cap_mb = 1e-6, .find_unused_parameters = true, .launch = BucketLaunch::kEarly});
    const auto tasks = [](int rank, int step) {
      std::vector<int> chosen;
      for (int i = 0; i < 3; ++i) {
        if (((step * 5 + rank * 3 + i * 7) % 4) < 2) chosen.push_back(i);
      }
      if (chosen.empty()) chosen.push_back(step % 3);
      return chosen;
    };
    for (int step = 0; step < 12; ++step) {
      net->zero_grad();
      model(at::ones({2, 2}), tasks(r.id(), step)).mean().backward();
      expect_gradients(*net, mean_gradients(*local, 2, [&](auto& module, int rank) {
        return module.forward(at::ones({2, 2}), tasks(rank, step)).mean();
      }));
    }
  });
}

// test_forward_backward_unused_parameters, test_forward_backward_optimizer
TEST(UnusedTest, WithAnOptimizer) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    Tasks net;
    DistributedDataParallel model(net, world, {.find_unused_parameters = true});
    torch::optim::Adam adam(net->parameters(), 0.01);
    for (int step = 0; step < 3; ++step) {
      adam.zero_grad();
      model(at::full({2, 2}, r.id() + 1.0), step == 0 ? std::vector{0, 1} : std::vector{0, 1, 2})
          .mean()
          .backward();
      EXPECT_EQ(net->t2.grad().defined(), step > 0);
      adam.step();
      expect_equal_on_all(world, net->parameters());
    }
  });
}

// B4: a rank that uses no parameter, with and without an output that needs a gradient.
TEST(UnusedTest, ARankThatUsesNothingDoesNotBlockTheOthers) {
  for (const bool input_needs_it : {true, false}) {
    run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
      Tasks net;
      DistributedDataParallel model(net, world, {.find_unused_parameters = true});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        auto x = at::ones({2, 2}).requires_grad_(input_needs_it);
        model(x, r.id() == 1 ? std::vector<int>{} : std::vector{0, 1, 2}).sum().backward();
        expect_close(net->t0.grad(), full(2.0 / 3, {2, 2}));
      }
    });
  }
}

// In the other modes too nobody waits: a static graph may have such a rank, and without options it
// is an error with names on all ranks.
TEST(UnusedTest, ARankThatUsesNothingInOtherModes) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto tasks = r.id() == 1 ? std::vector<int>{} : std::vector{0, 1};
    Tasks net, other;
    DistributedDataParallel model(net, world, {.static_graph = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(at::ones({2, 2}), tasks).sum().backward();
      expect_equal(net->t0.grad(), full(0.5, {2, 2}));
    }
    DistributedDataParallel strict(other, world);
    EXPECT_THAT(text_of([&] { strict(at::ones({2, 2}), tasks).sum().backward(); }),
                AllOf(HasSubstr("rank 1: no gradient came for t0 (0), t1 (1), t2 (2)")));
  });
}

// --- what forward returns ---

struct Output {
  std::optional<at::Tensor> first;
  std::map<std::string, at::Tensor> rest;
  int steps = 0;
};
template <class F>
void for_each_tensor(Output& output, F&& function) {
  convoy::for_each_tensor(output.first, function);
  convoy::for_each_tensor(output.rest, function);
}

struct StructNetImpl : torch::nn::Module {
  StructNetImpl()
      : seq1(register_module("seq1", Linear(3, 3))), seq2(register_module("seq2", Linear(3, 3))) {}
  Output forward(const at::Tensor& x, bool skip) {
    Output output;
    if (!skip) output.first = seq1(x);
    output.rest = {{"a", seq2(x)}, {"b", seq2(x) * 2}};
    return output;
  }
  Linear seq1, seq2;
};

// test_dataclass_output_unused_param
TEST(UnusedTest, AStructAsOutput) {
  for (const DdpOptions& options : searching()) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return std::make_shared<StructNetImpl>(); });
      auto local = seeded(1, [] { return std::make_shared<StructNetImpl>(); });
      DistributedDataParallel model(net, world, options);
      const auto loss = [](auto& module, int rank) {
        auto output = module.forward(random(static_cast<std::uint64_t>(rank), {2, 3}), true);
        return output.rest["a"].pow(2).sum() + output.rest["b"].sum();
      };
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        loss(model, r.id()).backward();
        expect_gradients(*net, mean_gradients(*local, 2, loss));
        EXPECT_FALSE(net->seq1->weight.grad().defined());
      }
    });
  }
}

template <class Make>
struct ShapedImpl : torch::nn::Module {
  ShapedImpl() : a(register_module("a", Linear(2, 2))), b(register_module("b", Linear(2, 2))) {}
  auto forward(const at::Tensor& x) { return Make()(a(x), b(x)); }
  Linear a, b;
};

// The loss uses the part that comes from b; the other is held, or not there.
template <class Make, class Pick>
void expect_shape_works(Make, Pick pick) {
  for (const DdpOptions& options : searching()) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return std::make_shared<ShapedImpl<Make>>(); });
      auto local = seeded(1, [] { return std::make_shared<ShapedImpl<Make>>(); });
      DistributedDataParallel model(net, world, options);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        auto output = model(random(static_cast<std::uint64_t>(r.id()), {2, 2}));
        pick(output).pow(2).sum().backward();
        expect_gradients(*net, mean_gradients(*local, 2, [&](auto& module, int rank) {
          auto whole = module.forward(random(static_cast<std::uint64_t>(rank), {2, 2}));
          return pick(whole).pow(2).sum();
        }));
      }
    });
  }
}

// test_arbitrary_forward_return_value, B16: an output that is not in the loss.
TEST(UnusedTest, AnyShapeOfOutput) {
  using T = at::Tensor;
  expect_shape_works([](const T& a, const T& b) { return std::pair(a, b); },
                     [](auto& out) { return out.second; });
  expect_shape_works([](const T& a, const T& b) { return std::tuple(1, a, std::optional(b)); },
                     [](auto& out) { return *std::get<2>(out); });
  expect_shape_works([](const T& a, const T& b) { return std::vector{a, b}; },
                     [](auto& out) { return out[1]; });
  expect_shape_works(
      [](const T& a, const T& b) {
        return std::vector<std::map<std::string, T>>{{{"a", a}}, {{"b", b}}};
      },
      [](auto& out) { return out[1]["b"]; });
  expect_shape_works(
      [](const T& a, const T& b) {
        return std::map<std::string, std::vector<T>>{{"a", {a}}, {"b", {b}}};
      },
      [](auto& out) { return out["b"][0]; });
  expect_shape_works([](const T& a, const T& b) { return std::array{a, b}; },
                     [](auto& out) { return out[1]; });
  expect_shape_works([](const T& a, const T& b) { return std::pair(a, std::variant<int, T>(b)); },
                     [](auto& out) { return std::get<T>(out.second); });
}

// B10: a parameter that is itself an output.
TEST(UnusedTest, AParameterAsOutput) {
  struct ReturnsImpl : torch::nn::Module {
    ReturnsImpl() : w(register_parameter("w", at::ones({3}))) {}
    std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {x.sum(), w}; }
    at::Tensor w;
  };
  for (const DdpOptions& options : searching()) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = std::make_shared<ReturnsImpl>();
      DistributedDataParallel model(net, world, options);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        const auto [sum, w] = model(at::ones({2}));
        (sum + w.sum() * (r.id() + 1)).backward();
        expect_equal(net->w.grad(), full(1.5, {3}));
      }
    });
  }
}

// test_undefined_grad_parity_unused_parameters
TEST(UnusedTest, UndefinedGradients) {
  struct Drop : torch::autograd::Function<Drop> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
      return x.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   const torch::autograd::variable_list&) {
      return {at::Tensor()};
    }
  };
  auto options = searching();
  options.emplace_back();  // also without being asked: the hooks run
  for (const DdpOptions& one : options) {
    run_ranks(2, [&](Rank&, const ProcessGroup& world) {
      Tasks net;
      DistributedDataParallel model(net, world, one);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        const auto y = model(at::ones({2, 2}), std::vector{0, 1, 2});
        Drop::apply(y).sum().backward();
        for (const auto& p : net->parameters()) EXPECT_FALSE(p.grad().defined());
      }
    });
  }
}

// test_ddp_shared_grad_acc_unused_params
TEST(UnusedTest, SharedBiasOnAnUnusedLayer) {
  struct SharedBiasImpl : torch::nn::Module {
    SharedBiasImpl()
        : used(register_module("used", Linear(3, 3))), idle(register_module("idle", Linear(3, 3))) {
      bias = register_parameter("bias", at::ones({3}));
    }
    at::Tensor forward(const at::Tensor& x) { return (used(x) + bias).sum(); }
    Linear used, idle;
    at::Tensor bias;
  };
  for (const DdpOptions& options : searching()) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = std::make_shared<SharedBiasImpl>();
      DistributedDataParallel model(net, world, options);
      for (int step = 0; step < 6; ++step) {
        net->zero_grad();
        auto loss = model(random(static_cast<std::uint64_t>(r.id()), {2, 3}));
        loss /= 10;  // in place on what forward returned
        loss.backward();
        expect_close(net->bias.grad(), full(0.2, {3}));
        EXPECT_FALSE(net->idle->weight.grad().defined());
      }
    });
  }
}

// --- without being told ---

// B3, test_ddp_unused_params_rebuild_buckets_exception: an error in that very backward, on every
// rank, with names; and the next step works.
TEST(UnusedTest, AnUnusedParameterIsAnErrorAtOnce) {
  for (const double cap : {25.0, 1e-6}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      Tasks net;
      DistributedDataParallel model(net, world,
                                    {.bucket_cap_mb = cap, .launch = BucketLaunch::kEarly});
      for (int step = 0; step < 3; ++step) {
        // only rank 1 leaves something out
        const auto tasks = r.id() == 1 ? std::vector{0} : std::vector{0, 1, 2};
        const auto text = text_of([&] { model(at::ones({2, 2}), tasks).mean().backward(); });
        EXPECT_THAT(text, AllOf(HasSubstr("rank 1: no gradient came for"), HasSubstr("t1 (1)"),
                                HasSubstr("t2 (2)"), Not(HasSubstr("t0")),
                                HasSubstr("find_unused_parameters")));
        net->zero_grad();
        model(at::ones({2, 2}), std::vector{0, 1, 2}).mean().backward();
        expect_equal(net->t2.grad(), full(0.25, {2, 2}));
        net->zero_grad();
      }
    });
  }
}

struct PairNetImpl : torch::nn::Module {
  PairNetImpl() : a(register_module("a", Linear(2, 2))), b(register_module("b", Linear(2, 2))) {}
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {a(x), b(x)}; }
  Linear a, b;
};

// An output that lives could still bring the missing ones: the check waits for it, and the next
// forward, which it does not outlive, is where it is missed.
TEST(UnusedTest, AnOutputThatNeverComes) {
  run_ranks(2, [](Rank&, const ProcessGroup& world) {
    auto net = std::make_shared<PairNetImpl>();
    DistributedDataParallel model(net, world);
    for (int step = 0; step < 2; ++step) {
      {
        auto [a, b] = model(at::ones({2, 2}));
        a.sum().backward();
        EXPECT_THAT(text_of([&] { std::ignore = model(at::ones({2, 2})); }),
                    AllOf(HasSubstr("b.weight"), HasSubstr("never back-propagated")));
      }
      {
        const at::Tensor a = model(at::ones({2, 2})).first;  // the other is gone
        EXPECT_THAT(text_of([&] { a.sum().backward(); }), HasSubstr("b.weight"));
      }
      net->zero_grad();
      auto [a, b] = model(at::ones({2, 2}));
      (a + b).sum().backward();
      expect_equal(net->b->bias.grad(), full(2, {2}));
    }
  });
}

// A parameter that the loss uses directly, beside the outputs.
TEST(UnusedTest, UsedOutsideOfForward) {
  auto options = searching();
  options.emplace_back();
  for (const DdpOptions& one : options) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      Tasks net;
      DistributedDataParallel model(net, world, one);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        const auto y = model(at::ones({2, 2}), std::vector{0, 1});
        (y.sum() + net->t2.sum() * (r.id() + 1)).backward();
        expect_equal(net->t2.grad(), full(1.5, {2, 2}));
        expect_equal(net->t0.grad(), full(1, {2, 2}));
      }
    });
  }
}

// --- static graph ---

// test_invalid_static_graph
TEST(StaticGraphTest, AChangeIsAnError) {
  run_ranks(2, [](Rank&, const ProcessGroup& world) {
    Tasks net;
    DistributedDataParallel model(net, world, {.static_graph = true});
    model(at::ones({2, 2}), std::vector{0, 1}).mean().backward();
    EXPECT_THAT(text_of([&] { model(at::ones({2, 2}), std::vector{0, 1, 2}).mean().backward(); }),
                AllOf(HasSubstr("static"), HasSubstr("t2")));
    EXPECT_THAT(text_of([&] { model(at::ones({2, 2}), std::vector{0}).mean().backward(); }),
                AllOf(HasSubstr("static"), HasSubstr("t1")));
    net->zero_grad();
    model(at::ones({2, 2}), std::vector{0, 1}).mean().backward();
    expect_equal(net->t0.grad(), full(0.25, {2, 2}));
  });
}

// B1: accumulation before the first reduction.
TEST(StaticGraphTest, NoSyncFirst) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    Tasks net;
    DistributedDataParallel model(net, world, {.static_graph = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      {
        const auto scope = model.no_sync();
        (model(at::ones({2, 2}), std::vector{0, 1}).mean() * (r.id() + 1)).backward();
      }
      (model(at::ones({2, 2}), std::vector{0, 1}).mean() * (r.id() + 1)).backward();
      expect_equal(net->t0.grad(), full(0.75, {2, 2}));
      EXPECT_FALSE(net->t2.grad().defined());
    }
  });
}

// --- checkpointing ---

// Runs a part of the model again in backward, by a backward inside of it.
struct Reentrant : torch::autograd::Function<Reentrant> {
  using Part = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const std::shared_ptr<Part>& part) {
    ctx->save_for_backward({x});
    ctx->saved_data["part"] = reinterpret_cast<std::int64_t>(part.get());
    const torch::NoGradGuard no_grad;
    return (*part)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    auto x = ctx->get_saved_variables()[0].detach().requires_grad_();
    const torch::AutoGradMode with_gradients(true);
    auto* part = reinterpret_cast<Part*>(ctx->saved_data["part"].toInt());
    (*part)(x).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

// Runs it again, too, but hands what autograd::grad gives to the backward outside.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, const at::Tensor& bias) {
    ctx->save_for_backward({x, weight, bias});
    return at::linear(x, weight, bias);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    torch::autograd::variable_list inputs = ctx->get_saved_variables();
    inputs[0] = inputs[0].detach().requires_grad_();
    const torch::AutoGradMode with_gradients(true);
    return torch::autograd::grad({at::linear(inputs[0], inputs[1], inputs[2])}, inputs, gradients);
  }
};

struct CheckpointedImpl : torch::nn::Module {
  explicit CheckpointedImpl(int times_used, bool is_reentrant = true)
      : l1(register_module("l1", Linear(20, 20))),
        l2(register_module("l2", Linear(20, 20))),
        times(times_used),
        reentrant(is_reentrant) {
    part = std::make_shared<Reentrant::Part>([this](const at::Tensor& x) { return l2(x); });
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = l1(x);
    for (int i = 0; i < times; ++i) {
      y = reentrant ? Reentrant::apply(y, part) : Recomputed::apply(y, l2->weight, l2->bias);
    }
    return y;
  }
  Linear l1, l2;
  int times;
  bool reentrant;
  std::shared_ptr<Reentrant::Part> part;
};

// test_ddp_checkpointing_once / _twice / _unused_params / _twice_static_graph, use_reentrant both
// ways: PyTorch refuses two of these; here the first backward learns how often each gradient comes.
enum class Checkpointing { kReentrant, kNotReentrant };
std::string name_of(Checkpointing kind) {
  return kind == Checkpointing::kReentrant ? "Reentrant" : "NotReentrant";
}
void PrintTo(Checkpointing kind, std::ostream* out) { *out << name_of(kind); }

class CheckpointTest : public testing::TestWithParam<Checkpointing> {};
INSTANTIATE_TEST_SUITE_P(Kinds, CheckpointTest,
                         testing::Values(Checkpointing::kReentrant, Checkpointing::kNotReentrant),
                         [](const auto& kind) { return name_of(kind.param); });

TEST_P(CheckpointTest, OnceAndTwice) {
  auto options = searching();
  options.emplace_back();
  options.push_back({.bucket_cap_mb = 1e-6, .launch = BucketLaunch::kEarly});
  for (const DdpOptions& one : options) {
    for (const int times : {1, 2}) {
      run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
        const bool reentrant = GetParam() == Checkpointing::kReentrant;
        const auto make = [&] { return std::make_shared<CheckpointedImpl>(times, reentrant); };
        auto net = seeded(1, make);
        auto local = seeded(1, make);
        DistributedDataParallel model(net, world, one);
        const auto loss = [](auto& module, int rank) {
          return module.forward(random(static_cast<std::uint64_t>(rank), {16, 20})).pow(2).mean();
        };
        for (int step = 0; step < 5; ++step) {
          net->zero_grad();
          loss(model, r.id()).backward();
          expect_gradients(*net, mean_gradients(*local, 2, loss));
        }
      });
    }
  }
}

// Twice only from the third step on: the gradient that comes too late is an error on all ranks, and
// the step after it works.
TEST(CheckpointReentrantTest, OneMoreThanBefore) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return std::make_shared<CheckpointedImpl>(1); });
    DistributedDataParallel model(net, world,
                                  {.bucket_cap_mb = 1e-6, .launch = BucketLaunch::kEarly});
    const auto step = [&] {
      net->zero_grad();
      model(random(static_cast<std::uint64_t>(r.id()), {16, 20})).pow(2).mean().backward();
    };
    step();
    step();
    net->times = 2;
    EXPECT_THAT(text_of(step), HasSubstr("after its bucket was reduced"));
    step();
    expect_equal_on_all(world, gradients_of(*net));
  });
}

}  // namespace
}  // namespace convoy::test
