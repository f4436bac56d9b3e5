// Gradients that are kept over several reductions: what was reduced once is not reduced again.
#include "base/error.h"
#include "convoy/join.h"
#include "ddp/support.h"

namespace convoy::test {
namespace {

// Parameters a and b; the gradient of each is the sum of the factors that it was used with.
struct TwoImpl : torch::nn::Module {
  TwoImpl()
      : a(register_parameter("a", at::ones({5}, at::kDouble))),
        b(register_parameter("b", at::ones({3}, at::kDouble))) {}
  at::Tensor forward(double of_a, double of_b) {
    at::Tensor sum = at::zeros({}, at::kDouble);
    if (of_a != 0) sum = sum + (a * of_a).sum();
    if (of_b != 0) sum = sum + (b * of_b).sum();
    return sum;
  }
  at::Tensor a, b;
};

std::vector<DdpOptions> kept_modes(GradReduce reduce) {
  std::vector<DdpOptions> all;
  for (const BucketLaunch launch : {BucketLaunch::kEarly, BucketLaunch::kLate}) {
    for (const bool views : {true, false}) {
      for (const bool skips : {true, false}) {
        all.push_back({.bucket_cap_mb = 1e-5,
                       .find_unused_parameters = true,
                       .gradient_as_bucket_view = views,
                       .skip_all_reduce_unused_params = skips,
                       .reduce = reduce,
                       .launch = launch});
      }
    }
  }
  return all;
}

void expect_value(const at::Tensor& parameter, double value, const std::string& what) {
  ASSERT_TRUE(parameter.grad().defined()) << what;
  expect_close(parameter.grad(), at::full(parameter.sizes(), value, at::kDouble), what);
}

// Issue 23, 3: used, unused, used gave 2, 2, 6 at two ranks, and 3, 3, 12 at three.
TEST(KeptGradientsTest, SumOfAParameterThatIsNotUsedInBetween) {
  for (const int size : {2, 3}) {
    for (const DdpOptions& options : kept_modes(GradReduce::kSum)) {
      run_ranks(size, [&](Rank&, const ProcessGroup& world) {
        auto net = std::make_shared<TwoImpl>();
        DistributedDataParallel model(net, world, options);
        double of_a = 0;
        int step = 0;
        for (const int uses : {1, 0, 1, 0, 0, 1}) {
          model(uses, 1).backward();
          of_a += uses * size;
          ++step;
          expect_value(net->a, of_a, concat("a, step ", step));
          expect_value(net->b, step * size, concat("b, step ", step));
        }
        model.sync_gradients();
        expect_value(net->a, of_a, "a, synchronised again");
      });
    }
  }
}

// The same in the other kinds; and one rank alone may use a parameter.
TEST(KeptGradientsTest, EveryKind) {
  for (const GradReduce reduce : {GradReduce::kMean, GradReduce::kSum, GradReduce::weighted(1)}) {
    for (const DdpOptions& options : kept_modes(reduce)) {
      run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
        auto net = std::make_shared<TwoImpl>();
        DistributedDataParallel model(net, world, options);
        const double all = reduce.kind() == GradReduce::Kind::kSum ? 3 : 1;
        double of_a = 0;
        for (const int user : {0, -1, 2, -1, 1, -1, -1, 0}) {  // none: -1
          model(r.id() == user ? 6 : 0, 1).backward();
          if (user >= 0) of_a += 2 * all;
          expect_value(net->a, of_a, concat("a, used by ", user));
          expect_equal_on_all(world, gradients_of(*net));
        }
      });
    }
  }
}

// A gradient that the user puts in the place of a reduced one is this rank's own.
TEST(KeptGradientsTest, GradientsOfTheUserAreSummed) {
  for (const bool views : {true, false}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = std::make_shared<TwoImpl>();
      DistributedDataParallel model(net, world,
                                    {.gradient_as_bucket_view = views, .reduce = GradReduce::kSum});
      for (int round = 0; round < 3; ++round) {
        for (const at::Tensor& p : net->parameters()) {
          p.mutable_grad() = at::full_like(p, r.id() + 1).detach();
        }
        model.sync_gradients();
        for (const at::Tensor& p : net->parameters()) expect_value(p, 3, concat("round ", round));
        model(1, 1).backward();
        for (const at::Tensor& p : net->parameters()) expect_value(p, 5, concat("round ", round));
        net->zero_grad();  // the next tensor may come to lie where this one was
      }
    });
  }
}

// A loss that uses a parameter directly, and before it comes to the outputs: what is added to a sum
// cannot be told apart from it any more.
TEST(KeptGradientsTest, DirectUseOfASum) {
  for (const BucketLaunch launch : {BucketLaunch::kEarly, BucketLaunch::kLate}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = std::make_shared<TwoImpl>();
      DistributedDataParallel model(net, world, {.reduce = GradReduce::kSum, .launch = launch});
      const auto loss = [&] {
        const auto output = model(r.id() + 1, 0);
        return output + (net->b * 10).sum();  // the last operation is the first in backward
      };
      for (int round = 0; round < 2; ++round) {
        net->zero_grad();
        loss().backward();
        expect_value(net->a, 3, "a");
        expect_value(net->b, 20, "b");
        EXPECT_THAT(text_of([&] { loss().backward(); }),
                    testing::HasSubstr("the gradient of b was a sum over ranks already"));
      }
    });
  }
}

// Sums that were set aside go with the gradients that are zeroed, whatever zeroes them.
TEST(KeptGradientsTest, ZeroedInPlaceAfterNoSync) {
  for (const bool views : {true, false}) {
    for (const bool to_none : {true, false}) {
      run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
        auto net = std::make_shared<TwoImpl>();
        DistributedDataParallel model(
            net, world, {.gradient_as_bucket_view = views, .reduce = GradReduce::kSum});
        const auto add_alone = [&] {
          const auto scope = model.no_sync();
          model(r.id() + 1, 1).backward();
        };
        for (int round = 0; round < 2; ++round) {
          net->zero_grad(to_none);
          model(r.id() + 1, 1).backward();
          add_alone();
          net->zero_grad(to_none);
          model(r.id() + 1, 1).backward();
          expect_value(net->a, 3, "zeroed before a backward");
          add_alone();
          net->zero_grad(to_none);
          add_alone();
          model.sync_gradients();
          expect_value(net->a, 3, "zeroed before a no_sync");
          add_alone();
          model.sync_gradients();
          expect_value(net->a, 6, "not zeroed");
        }
      });
    }
  }
}

// Ranks without inputs add nothing, so that what the others have reduced must not be reduced again.
TEST(KeptGradientsTest, InAJoin) {
  for (const GradReduce reduce : {GradReduce::kMean, GradReduce::kSum, GradReduce::weighted(1)}) {
    for (const bool by_all : {true, false}) {
      for (const DdpOptions& options : kept_modes(reduce)) {
        run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
          auto net = std::make_shared<TwoImpl>();
          DistributedDataParallel model(net, world, options);
          double expected = 0;
          join({&model},
               [&] {
                 for (int step = 0; step <= 2 * r.id(); ++step) {
                   const int live = step == 0 ? 3 : step <= 2 ? 2 : 1;
                   const bool uses = step != 1 && step != 3;
                   {
                     const auto scope = model.no_sync();
                     model(uses ? 1 : 0, 1).backward();
                   }
                   model(uses ? 1 : 0, 1).backward();
                   const double count = 2.0 * live;
                   if (uses) {
                     expected += reduce.kind() == GradReduce::Kind::kSum              ? count
                                 : by_all && reduce.kind() == GradReduce::Kind::kMean ? count / 3
                                                                                      : 2;
                   }
                   expect_value(net->a, expected, concat("step ", step));
                 }
               },
               {.divide_by_initial_world_size = by_all});
        });
      }
    }
  }
}

// What a rank has not reduced when its inputs end has its weight in the next round.
TEST(KeptGradientsTest, WeightOfWhatIsLeftInAJoin) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = std::make_shared<TwoImpl>();
    DistributedDataParallel model(net, world, {.reduce = GradReduce::weighted(1)});
    join({&model}, [&] {
      model.set_reduce(GradReduce::weighted(r.id() == 0 ? 3 : 1));
      if (r.id() == 0) {
        const auto scope = model.no_sync();
        model(8, 8).backward();
        return;
      }
      model(4, 4).backward();
      expect_value(net->a, (3 * 8 + 4) / 4.0, "with what rank 0 left");
      net->zero_grad();
      model(4, 4).backward();
      expect_value(net->a, 4, "alone");
    });
  });
}

// A static graph is what a rank's first backward has used. Gradients that come in another way, from
// no_sync() or from the user, are reduced also where that did not use their parameter.
TEST(KeptGradientsTest, StaticGraphs) {
  for (const bool skips : {true, false}) {
    for (const BucketLaunch launch : {BucketLaunch::kEarly, BucketLaunch::kLate}) {
      run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
        auto net = std::make_shared<TwoImpl>();
        DistributedDataParallel model(net, world,
                                      {.bucket_cap_mb = 1e-5,
                                       .static_graph = true,
                                       .skip_all_reduce_unused_params = skips,
                                       .reduce = GradReduce::kSum,
                                       .launch = launch});
        const auto add_alone = [&](double of_a, double of_b) {
          const auto scope = model.no_sync();
          model(of_a, of_b).backward();
        };
        // Rank 0 has nothing in the first round, and learns nothing from it.
        if (r.id() == 1) add_alone(0, 2);
        model.sync_gradients();
        expect_value(net->b, 2, "of rank 1 alone");
        EXPECT_FALSE(net->a.grad().defined());
        // Nor from gradients that are the user's.
        net->zero_grad(/*set_to_none=*/false);
        net->a.mutable_grad() = at::full({5}, 4, at::kDouble);
        if (r.id() == 1) add_alone(0, 2);
        model.sync_gradients();
        expect_value(net->a, 8, "of the user");
        for (int step = 0; step < 2; ++step) {
          net->zero_grad();
          model(0, r.id() + 1).backward();
          expect_value(net->b, 3, "of both");
        }
        net->zero_grad();
        add_alone(r.id() + 1, r.id() + 1);
        model.sync_gradients();
        expect_value(net->a, 3, "a, from no_sync");
        expect_value(net->b, 3, "b, from no_sync");
        net->zero_grad();
        net->a.mutable_grad() = at::full({5}, r.id() + 1, at::kDouble);
        model.sync_gradients();
        expect_value(net->a, 3, "a, from the user");
        net->zero_grad();
        add_alone(r.id() + 1, 0);
        model(0, r.id() + 1).backward();
        expect_value(net->a, 3, "a, before a backward");
        expect_value(net->b, 3, "b, of that backward");
      });
    }
  }
}

// A rank that counts for nothing adds nothing: not even the NaN that the mean of no samples is.
TEST(KeptGradientsTest, WeightOfNothing) {
  for (const bool views : {true, false}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = std::make_shared<TwoImpl>();
      DistributedDataParallel model(net, world, {.gradient_as_bucket_view = views});
      const auto run = [&](double samples, double factor) {
        model.set_reduce(GradReduce::weighted(samples));
        model(factor, 1).backward();
      };
      const double nan = std::numeric_limits<double>::quiet_NaN();
      run(r.id(), r.id() == 0 ? nan : 2);
      expect_value(net->a, 2, "rank 1's");
      run(1 - r.id(), r.id() == 1 ? nan : 3);
      expect_value(net->a, 5, "and rank 0's");
      EXPECT_THAT(text_of([&] { run(0, nan); }), testing::HasSubstr("no rank has any"));
      net->zero_grad();
      run(r.id(), r.id() == 0 ? nan : 2);
      expect_value(net->a, 2, "afterwards");
    });
  }
}

}  // namespace
}  // namespace convoy::test
