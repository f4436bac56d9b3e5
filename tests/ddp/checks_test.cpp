// Checks that can be switched on, parameters of other groups, and options as text.
#include <torch/serialize.h>

#include <sstream>

#include "convoy/join.h"
#include "ddp/support.h"

namespace convoy::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::nn::Linear;

// Gradients of `net` that are no numbers on one rank, in one parameter.
at::Tensor loss_of(auto& model, int rank, bool bad) {
  auto y = model(input_of(rank, 1)).pow(2).sum();
  if (!bad) return y;
  return y + model->fc2->weight[0][0] * std::numeric_limits<double>::quiet_NaN();
}

TEST(NonFiniteTest, RaisesOnAllRanks) {
  for (const bool hook : {false, true}) {
    for (const Mode& mode : modes()) {
      run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
        auto net = seeded(1, [] { return Net(); });
        DdpOptions options = mode.options;
        options.nonfinite = NonFinite::kRaise;
        DistributedDataParallel model(net, world, options);
        if (hook) model.register_comm_hook(hooks::all_reduce);
        for (int step = 0; step < 4; ++step) {
          net->zero_grad();
          const bool bad = step % 2 == 1;
          const auto backward = [&] { loss_of(model, r.id(), bad && r.id() == 1).backward(); };
          if (!bad) {
            backward();
            expect_equal_on_all(world, gradients_of(*net));
            continue;
          }
          const auto text = text_of(backward);
          EXPECT_THAT(text, AllOf(HasSubstr("rank 1: the gradient of fc2.weight"),
                                  HasSubstr("1 of 500 values are not finite, the first is nan")));
        }
      });
    }
  }
}

TEST(NonFiniteTest, SkipsOnAllRanks) {
  for (const int size : {1, 2}) {
    run_ranks(size, [](Rank& r, const ProcessGroup& world) {
      auto net = seeded(1, [] { return Net(); });
      DistributedDataParallel model(net, world, {.nonfinite = NonFinite::kSkip});
      torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      std::vector<at::Tensor> before;
      for (int step = 0; step < 5; ++step) {
        sgd.zero_grad();
        const bool bad = step == 2 || step == 3;
        before.clear();
        for (const auto& p : net->parameters()) before.push_back(p.detach().clone());
        loss_of(model, r.id(), bad && r.id() == world.size() - 1).backward();
        EXPECT_EQ(model.skipped(), bad);
        for (const auto& p : net->parameters()) EXPECT_EQ(p.grad().defined(), !bad);
        sgd.step();
        for (std::size_t i = 0; i < before.size(); ++i) {
          EXPECT_EQ(at::equal(net->parameters()[i], before[i]), bad);
        }
        expect_equal_on_all(world, net->parameters());
      }
      EXPECT_EQ(model.stats().skipped, 2U);
      EXPECT_FALSE(model.stats().has_error);
    });
  }
}

// Infinite values, half precision whose sum overflows, complex and sparse gradients.
TEST(NonFiniteTest, OtherTypes) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto half = at::ones({4}, at::kHalf).requires_grad_();
    const auto wave = at::ones({2}, at::kComplexFloat).requires_grad_();
    const auto rows = at::ones({4, 2}).requires_grad_();
    Reducer reducer({half, wave, rows}, world, {.nonfinite = NonFinite::kRaise},
                    {.names = {"half", "wave", "rows"}, .sparse = {2}});
    const auto backward = [&](double a, double b, double c) {
      for (const auto& p : {half, wave, rows}) p.mutable_grad().reset();
      const auto row = at::embedding(rows, full(1, {1}, at::kLong), -1, false, true);
      const bool mine = r.id() == 1;
      auto loss = (half * (mine ? a : 1)).to(at::kFloat).sum() +
                  (at::view_as_real(wave) * (mine ? b : 1)).sum() + (row * (mine ? c : 1)).sum();
      reducer.prepare_for_backward({loss})[0].backward();
    };
    const double inf = std::numeric_limits<double>::infinity();
    backward(60000, 1, 1);  // whose sum is none of its type
    EXPECT_THAT(text_of([&] { backward(1, inf, 1); }), HasSubstr("rank 1: the gradient of wave"));
    EXPECT_THAT(text_of([&] { backward(inf, 1, 1); }), HasSubstr("the first is inf at 0"));
    EXPECT_THAT(text_of([&] { backward(1, 1, inf); }), HasSubstr("rank 1: the gradient of rows"));
    backward(1, 1, 1);
  });
}

TEST(ReplicasTest, NamesTheMinority) {
  run_ranks(4, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    DistributedDataParallel model(net, world, {.check_replicas_every = 2});
    const auto step = [&] {
      net->zero_grad();
      model(input_of(r.id(), 1)).sum().backward();
    };
    for (int i = 0; i < 3; ++i) step();
    if (r.id() == 2) {
      const at::NoGradGuard no_grad;
      net->fc2->weight[3][4] += 1e-3;
    }
    step();  // backward 4 does not look
    EXPECT_THAT(text_of(step), AllOf(HasSubstr("parameter fc2.weight: rank 2 has other values "
                                               "than ranks 0, 1, 3"),
                                     HasSubstr("backward 5")));
    broadcast_coalesced(world, net->parameters());
    for (int i = 0; i < 4; ++i) step();
    expect_equal_on_all(world, gradients_of(*net));
  });
}

// Ranks that have no more inputs have an older model, and are not asked.
TEST(ReplicasTest, InAJoin) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    auto net = seeded(1, [] { return Net(); });
    DistributedDataParallel model(net, world, {.check_replicas_every = 1});
    torch::optim::SGD sgd(net->parameters(), 0.1);
    std::string text;
    join({&model}, [&] {
      for (int i = 0; i < 3 * r.id(); ++i) {
        sgd.zero_grad();
        if (i == 2 && r.id() == 2) {
          const at::NoGradGuard no_grad;
          net->fc1->weight.mul_(2);
        }
        try {
          model(input_of(r.id(), i)).sum().backward();
        } catch (const Error& error) {
          text = error.what();
          break;
        }
        sgd.step();
      }
    });
    if (r.id() > 0) {
      EXPECT_THAT(text, HasSubstr("parameter fc1.weight: rank 2 has other values than rank 1"));
    }
    expect_equal_on_all(world, net->parameters());
  });
}

// CONVOY_DEBUG=detail compares by itself.
TEST(ReplicasTest, ByTheEnvironment) {
  RankGroup(2, RankMode::kProcesses, {.environment = {"CONVOY_DEBUG=detail"}}).run([](Rank& r) {
    const auto world = make_world(r);
    auto net = seeded(static_cast<std::uint64_t>(r.id()), [] { return Net(); });
    DistributedDataParallel model(net, world, {.init_sync = false});
    EXPECT_THAT(text_of([&] { model(input_of(0, 1)).sum().backward(); }),
                HasSubstr("parameter fc1.weight: rank 1 has other values than rank 0"));
  });
  RankGroup(2, RankMode::kProcesses, {.environment = {"CONVOY_DEBUG=loud"}}).run([](Rank& r) {
    const auto world = make_world(r);
    EXPECT_THAT(text_of([&] { DistributedDataParallel model(Net(), world); }),
                AllOf(HasSubstr("CONVOY_DEBUG is "), HasSubstr("loud")));
  });
}

// --- sparse metadata ---

TEST(SparseMetadataTest, OnlyValuesTravel) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto table = at::ones({6, 2}).requires_grad_();
    Reducer reducer({table}, world, {}, {.names = {"table"}, .sparse = {0}});
    const auto backward = [&](const std::vector<std::int64_t>& rows) {
      table.mutable_grad().reset();
      const auto out = at::embedding(table, at::tensor(rows), -1, false, true).sum();
      reducer.prepare_for_backward({out})[0].backward();
    };
    reducer.set_sparse_metadata({{"table", at::tensor({5, 1, 3})}});
    backward({1, 1, 3 + 2 * r.id()});
    expect_equal(table.grad().coalesce().indices()[0], at::tensor({1, 3, 5}, at::kLong));
    expect_equal(table.grad().to_dense().select(1, 0),
                 at::tensor({0., 2., 0., .5, 0., .5}).to(at::kFloat));
    backward({r.id()});  // for one round only
    EXPECT_EQ(table.grad().coalesce()._nnz(), 2);
    reducer.set_sparse_metadata({{"table", at::tensor({0, 1})}});
    EXPECT_THAT(text_of([&] { backward({r.id() * 2}); }),
                HasSubstr("rank 1: the gradient of table has row 2"));
    reducer.set_sparse_metadata({{"table", at::arange(1 + r.id(), at::kLong)}});
    EXPECT_THAT(text_of([&] { backward({0}); }), HasSubstr("in another way"));
    backward({0});
    const auto refused = [&](const std::string& name, const at::Tensor& rows) {
      return text_of([&] { reducer.set_sparse_metadata({{name, rows}}); });
    };
    EXPECT_THAT(refused("tables", at::tensor({1})),
                AllOf(HasSubstr("no sparse parameter "), HasSubstr("tables")));
    EXPECT_THAT(refused("table", at::tensor({6})), HasSubstr("from 0 to 5, got 6"));
    EXPECT_THAT(refused("table", at::ones({2})), HasSubstr("not a list of integers"));
  });
}

// --- parameters of other groups ---

struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl()
      : shared(register_module("shared", Linear(2, 2))),
        expert(register_module("expert", Linear(2, 1))) {}
  at::Tensor forward(const at::Tensor& x) { return expert(shared(x)); }
  Linear shared, expert;
};

// Ranks 0 and 1 have one expert, ranks 2 and 3 another: theirs are reduced by twos.
TEST(ParameterGroupTest, Experts) {
  for (const BucketLaunch launch : {BucketLaunch::kEarly, BucketLaunch::kLate}) {
    run_ranks(4, [launch](Rank& r, const ProcessGroup& world) {
      const int pair = r.id() / 2;
      const auto own = world.split_by(pair);
      auto net = seeded(1, [] { return std::make_shared<ExpertsImpl>(); });
      {
        const at::NoGradGuard no_grad;
        net->expert->weight.fill_(pair + 1);
        if (r.id() % 2 == 1) net->expert->bias.fill_(7);  // becomes the first one's
      }
      DistributedDataParallel model(
          net, world,
          {.launch = launch, .parameter_groups = {{{"expert.weight", "expert.bias"}, own}}});
      EXPECT_NE(net->expert->bias.item<double>(), 7);
      EXPECT_EQ(net->expert->weight[0][0].item<double>(), pair + 1);
      const auto x = [](int rank) { return at::full({1, 2}, rank + 1.0); };
      const auto loss = [&](ExpertsImpl& module, int rank) {
        return module.forward(x(rank)).sum();
      };
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        if (step == 1) {
          const auto scope = model.no_sync();
          model(x(r.id())).sum().backward();
          expect_close(net->expert->bias.grad(), at::ones({1}));
          net->zero_grad();
        }
        model(x(r.id())).sum().backward();
        // of this rank's own, and of its partner
        auto local = std::make_shared<ExpertsImpl>();
        const auto gradient = [&](int rank, const char* name) {
          const at::NoGradGuard no_grad;
          for (const auto& item : net->named_parameters()) {
            local->named_parameters()[item.key()].copy_(item.value());
          }
          local->expert->weight.fill_(rank / 2 + 1);
          local->zero_grad();
          {
            const at::AutoGradMode on(true);
            loss(*local, rank).backward();
          }
          return local->named_parameters()[name].grad().clone();
        };
        const int first = 2 * pair;
        expect_close(net->expert->weight.grad(),
                     (gradient(first, "expert.weight") + gradient(first + 1, "expert.weight")) / 2);
        at::Tensor sum = at::zeros({2, 2});
        for (int rank = 0; rank < 4; ++rank) sum += gradient(rank, "shared.weight");
        expect_close(net->shared->weight.grad(), sum / 4);
      }
      EXPECT_THAT(text_of([&] { Join scope({&model}); }), HasSubstr("parameter_groups"));
    });
  }
}

TEST(ParameterGroupTest, WhatIsRefused) {
  run_ranks(2, [](Rank&, const ProcessGroup& world) {
    const auto refused = [&](std::vector<ParameterGroup> groups) {
      return text_of([&] {
        DistributedDataParallel model(std::make_shared<ExpertsImpl>(), world,
                                      {.parameter_groups = std::move(groups)});
      });
    };
    EXPECT_THAT(refused({{{"experts.weight"}, world}}), HasSubstr("experts.weight"));
    EXPECT_THAT(refused({{{"expert.weight"}, {}}}), HasSubstr("is empty"));
    EXPECT_THAT(refused({{{"expert.weight"}, world}, {{"expert.weight"}, world}}),
                HasSubstr("named twice"));
  });
}

// --- options ---

TEST(OptionsTextTest, ThereAndBack) {
  const DdpOptions options{.bucket_cap_mb = 0.1,
                           .bucket_cap_mb_list = {1, 2.5},
                           .find_unused_parameters = true,
                           .gradient_as_bucket_view = false,
                           .reduce = GradReduce::weighted(3),
                           .launch = BucketLaunch::kLate,
                           .nonfinite = NonFinite::kSkip,
                           .check_replicas_every = 7,
                           .forward_sync_buffers = false,
                           .buffer_sync = BufferSync::kAfterForward,
                           .ignore = {"a b", "c"},
                           .delay_all_reduce_named_params = {"d"}};
  const auto again = DdpOptions::from_text(options.to_text());
  EXPECT_EQ(again.to_text(), options.to_text());
  EXPECT_EQ(again.bucket_cap_mb, 0.1);
  EXPECT_EQ(again.reduce.samples(), 3);
  EXPECT_EQ(again.ignore, options.ignore);
  EXPECT_EQ(DdpOptions::from_text(DdpOptions().to_text()).to_text(), DdpOptions().to_text());

  torch::serialize::OutputArchive out;
  options.save(out);
  std::stringstream file;
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  EXPECT_EQ(DdpOptions::load(in).to_text(), options.to_text());

  const auto refused = [](const std::string& text) {
    return text_of([&] { DdpOptions::from_text(text); });
  };
  EXPECT_THAT(refused("something"), HasSubstr("something"));
  for (const std::string line :
       {"launch 9", "static_graph yes", "bucket_cap_mb 1x", "word", "new 1", "reduce most"}) {
    EXPECT_THAT(refused("convoy::DdpOptions 1\n" + line + "\n"), HasSubstr(line));
  }
}

}  // namespace
}  // namespace convoy::test
