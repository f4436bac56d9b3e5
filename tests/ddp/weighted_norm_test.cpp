// SyncBatchNorm with gradients that are weighted by samples: the gradients of one process with the
// whole batch.
#include "base/error.h"
#include "convoy/join.h"
#include "convoy/sync_batch_norm.h"
#include "ddp/support.h"

namespace convoy::test {
namespace {

using nn::SyncBatchNorm1d;
using testing::AllOf;
using testing::HasSubstr;
using torch::nn::BatchNorm1d;
using torch::nn::Linear;
using Batches = std::vector<std::int64_t>;  // sizes, by rank

template <class Norm>
struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : fc1(register_module("fc1", Linear(3, 4))),
        norm1(register_module("norm1", Norm(4))),
        fc2(register_module("fc2", Linear(4, 5))),
        norm2(register_module("norm2", Norm(5))),
        fc3(register_module("fc3", Linear(5, 2))) {
    this->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    return fc3(torch::tanh(norm2(fc2(torch::tanh(norm1(fc1(x)))))));
  }
  Linear fc1;
  Norm norm1;
  Linear fc2;
  Norm norm2;
  Linear fc3;
};
using SyncNet = NormedImpl<SyncBatchNorm1d>;
using LocalNet = NormedImpl<BatchNorm1d>;

std::shared_ptr<SyncNet> sync_net(const ProcessGroup& group) {
  auto net = seeded(3, [] { return std::make_shared<SyncNet>(); });
  nn::convert_sync_batchnorm(*net, group);
  return net;
}
std::shared_ptr<LocalNet> local_net() {
  return seeded(3, [] { return std::make_shared<LocalNet>(); });
}

struct WholeBatch {
  WholeBatch(std::uint64_t seed, Batches by_rank) : sizes(std::move(by_rank)) {
    for (const std::int64_t size : sizes) total += size;
    x = random(seed, {total, 3}, at::kDouble) * 2 + 1;
    y = random(seed + 1000, {total, 2}, at::kDouble);
  }
  std::int64_t size_of(int rank) const { return sizes[static_cast<std::size_t>(rank)]; }
  at::Tensor part(const at::Tensor& of, int rank) const {
    std::int64_t begin = 0;
    for (int r = 0; r < rank; ++r) begin += size_of(r);
    return of.narrow(0, begin, size_of(rank));
  }
  Batches sizes;
  std::int64_t total = 0;
  at::Tensor x, y;
};

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& y) {
  return (output - y).pow(2).sum(1).mean();
}

template <class Model>
at::Tensor part_loss(Model& model, const WholeBatch& batch, int rank) {
  return loss_of(model.forward(batch.part(batch.x, rank)), batch.part(batch.y, rank));
}

void expect_same_gradients(const torch::nn::Module& actual, const torch::nn::Module& expected,
                           const std::string& what) {
  for (const auto& item : expected.named_parameters()) {
    const at::Tensor gradient = actual.named_parameters()[item.key()].grad();
    ASSERT_TRUE(gradient.defined()) << what << ", " << item.key();
    const double off = (gradient - item.value().grad()).abs().max().item<double>();
    EXPECT_LT(off, 1e-12) << what << ", " << item.key();
  }
}

// Issue 23, 4: gradients were off by 0.3.
TEST(WeightedNormTest, IsThatOfTheWholeBatch) {
  for (const Mode& mode : modes()) {
    SCOPED_TRACE(mode.name);
    run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
      auto net = sync_net(world);
      auto local = local_net();
      DistributedDataParallel model(net, world, mode.options);
      std::uint64_t seed = 1;
      for (const Batches& sizes :
           {Batches{2, 2, 2}, Batches{1, 4, 2}, Batches{6, 0, 1}, Batches{0, 0, 5}}) {
        const WholeBatch batch(seed++, sizes);
        net->zero_grad();
        local->zero_grad();
        model.set_reduce(GradReduce::weighted(static_cast<double>(batch.size_of(r.id()))));
        part_loss(model, batch, r.id()).backward();
        loss_of(local->forward(batch.x), batch.y).backward();
        expect_same_gradients(*net, *local, ::testing::PrintToString(sizes));
        expect_equal_on_all(world, gradients_of(*net));
      }
    });
  }
}

// Micro-batches inside of no_sync(), a backward of the module itself, and sync_gradients().
TEST(WeightedNormTest, Accumulates) {
  for (const bool directly : {false, true}) {
    run_ranks(2, [&](Rank& r, const ProcessGroup& world) {
      auto net = sync_net(world);
      auto local = local_net();
      DistributedDataParallel model(net, world);
      const WholeBatch a(1, {1, 5}), b(2, {3, 2});
      const double mine = static_cast<double>(a.size_of(r.id()) + b.size_of(r.id()));
      const double total = static_cast<double>(a.total + b.total);
      for (int round = 0; round < 3; ++round) {
        net->zero_grad();
        local->zero_grad();
        model.set_reduce(GradReduce::weighted(mine));
        const auto add = [&](auto& from, const WholeBatch& batch) {
          const double share = static_cast<double>(batch.size_of(r.id())) / mine;
          (part_loss(from, batch, r.id()) * share).backward();
        };
        {
          const auto scope = model.no_sync();
          if (directly) {
            add(*net, a);
          } else {
            add(model, a);
          }
          if (round == 2) add(model, b);
        }
        if (round == 2) {
          model.sync_gradients();
        } else {
          add(model, b);
        }
        for (const WholeBatch* batch : {&a, &b}) {
          const double share = static_cast<double>(batch->total) / total;
          (loss_of(local->forward(batch->x), batch->y) * share).backward();
        }
        expect_same_gradients(*net, *local, concat("round ", round));
      }
    });
  }
}

// A Reducer that is not told of forwards.
TEST(WeightedNormTest, BareReducer) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = sync_net(world);
    auto local = local_net();
    const WholeBatch batch(1, {2, 5});
    Reducer reducer(net->parameters(), world,
                    {.reduce = GradReduce::weighted(static_cast<double>(batch.size_of(r.id())))});
    const auto out = reducer.prepare_for_backward({net->forward(batch.part(batch.x, r.id()))})[0];
    loss_of(out, batch.part(batch.y, r.id())).backward();
    loss_of(local->forward(batch.x), batch.y).backward();
    expect_same_gradients(*net, *local, "reducer");
  });
}

// Its norms use another group: they weighed by 1.
TEST(WeightedNormTest, BareReducerOfAnotherGroup) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto other = world.split({0, 1}, {.name = "other"}).value();
    auto net = sync_net(other);
    auto local = local_net();
    const WholeBatch batch(1, {2, 5});
    Reducer reducer(net->parameters(), world,
                    {.reduce = GradReduce::weighted(static_cast<double>(batch.size_of(r.id())))});
    const auto out = reducer.prepare_for_backward({net->forward(batch.part(batch.x, r.id()))})[0];
    loss_of(out, batch.part(batch.y, r.id())).backward();
    loss_of(local->forward(batch.x), batch.y).backward();
    expect_same_gradients(*net, *local, "reducer");
  });
}

// And where they have no parameter by which they could be found.
TEST(WeightedNormTest, BareReducerOfAnotherGroupWithoutWeights) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    const auto other = world.split({0, 1}, {.name = "other"}).value();
    Linear fc(3, 4);
    nn::SyncBatchNorm1d norm(torch::nn::BatchNormOptions(4).affine(false), other);
    Reducer reducer(fc->parameters(), world, {.reduce = GradReduce::weighted(1 + r.id())});
    const auto loss = [&] {
      return reducer.prepare_for_backward({norm->forward(fc(random(r.id(), {5, 3})))})[0].sum();
    };
    EXPECT_THAT(text_of([&] { loss().backward(); }),
                AllOf(HasSubstr("group \"other\""), HasSubstr("weighted by samples in another")));
    reducer.set_reduce(GradReduce::kMean);
    loss().backward();
  });
}

// Statistics over some of the model's ranks only: weights are the model's.
TEST(WeightedNormTest, NormsOfASmallerGroup) {
  run_ranks(3, [](Rank& r, const ProcessGroup& world) {
    const auto pair =
        r.id() < 2 ? world.split({0, 1}, {.name = "pair"}) : world.split({2}, {.name = "one"});
    auto net = sync_net(pair.value());
    auto local = local_net();
    DistributedDataParallel model(net, world);
    const WholeBatch batch(1, {2, 5, 4});
    model.set_reduce(GradReduce::weighted(static_cast<double>(batch.size_of(r.id()))));
    part_loss(model, batch, r.id()).backward();
    // One process that normalises the two parts each for itself.
    const at::Tensor out =
        at::cat({local->forward(batch.x.narrow(0, 0, 7)), local->forward(batch.x.narrow(0, 7, 4))});
    loss_of(out, batch.y).backward();
    expect_same_gradients(*net, *local, "pair");
  });
}

// Two models in one backward, of which one is weighted: each has its own.
TEST(WeightedNormTest, TwoModels) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = sync_net(world), other = sync_net(world);
    auto local = local_net(), local_other = local_net();
    DistributedDataParallel weighted(net, world), mean(other, world);
    const WholeBatch batch(1, {2, 5});
    weighted.set_reduce(GradReduce::weighted(static_cast<double>(batch.size_of(r.id()))));
    (part_loss(weighted, batch, r.id()) + part_loss(mean, batch, r.id())).backward();
    loss_of(local->forward(batch.x), batch.y).backward();
    expect_same_gradients(*net, *local, "weighted");
    const at::Tensor out = local_other->forward(batch.x);
    ((loss_of(batch.part(out, 0), batch.part(batch.y, 0)) +
      loss_of(batch.part(out, 1), batch.part(batch.y, 1))) /
     2)
        .backward();
    expect_same_gradients(*other, *local_other, "mean");
  });
}

TEST(WeightedNormTest, InAJoin) {
  for (const BucketLaunch launch : {BucketLaunch::kEarly, BucketLaunch::kLate}) {
    run_ranks(3, [&](Rank& r, const ProcessGroup& world) {
      auto net = sync_net(world);
      auto local = local_net();
      DistributedDataParallel model(net, world, {.bucket_cap_mb = 1e-5, .launch = launch});
      join({&model}, [&] {
        for (int step = 0; step <= r.id(); ++step) {
          const Batches sizes = step == 0   ? Batches{1, 4, 2}
                                : step == 1 ? Batches{0, 3, 5}
                                            : Batches{0, 0, 4};
          const WholeBatch batch(static_cast<std::uint64_t>(step), sizes);
          net->zero_grad();
          local->zero_grad();
          model.set_reduce(GradReduce::weighted(static_cast<double>(batch.size_of(r.id()))));
          part_loss(model, batch, r.id()).backward();
          loss_of(local->forward(batch.x), batch.y).backward();
          expect_same_gradients(*net, *local, concat("step ", step));
        }
      });
    });
  }
}

// The layers need the weights when their backward runs: those that come later are an error.
TEST(WeightedNormTest, WeightsThatChangeWhileGradientsAddUp) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = sync_net(world);
    DistributedDataParallel model(net, world);
    const WholeBatch batch(1, {2, 5});
    const auto add_alone = [&] {
      const auto scope = model.no_sync();
      part_loss(model, batch, r.id()).backward();
    };
    const GradReduce mine = GradReduce::weighted(static_cast<double>(batch.size_of(r.id())));
    const auto expect_error = [&] {
      EXPECT_THAT(text_of([&] { model.sync_gradients(); }),
                  AllOf(HasSubstr("SyncBatchNorm"), HasSubstr("set_reduce")));
      net->zero_grad();
    };
    model.set_reduce(GradReduce::kMean);
    add_alone();
    model.set_reduce(mine);
    expect_error();
    add_alone();
    model.set_reduce(GradReduce::kMean);
    expect_error();
    model.set_reduce(GradReduce::weighted(r.id() + 1));
    add_alone();
    model.set_reduce(mine);
    add_alone();
    expect_error();
    // Ten times as many on each rank is the same weight; and so is what it was in another step.
    model.set_reduce(mine);
    add_alone();
    model.set_reduce(GradReduce::weighted(10.0 * static_cast<double>(batch.size_of(r.id()))));
    model.sync_gradients();
    auto local = local_net();
    loss_of(local->forward(batch.x), batch.y).backward();
    expect_same_gradients(*net, *local, "ten times");
  });
}

// Its inputs are in the others' statistics, but its gradients will be left out.
TEST(WeightedNormTest, InputsThatCountForNothing) {
  run_ranks(2, [](Rank& r, const ProcessGroup& world) {
    auto net = sync_net(world);
    auto local = local_net();
    DistributedDataParallel model(net, world);
    const WholeBatch batch(1, {2, 5});
    const auto step = [&](double samples) {
      net->zero_grad();
      model.set_reduce(GradReduce::weighted(samples));
      part_loss(model, batch, r.id()).backward();
    };
    const std::string text = text_of([&] { step(r.id()); });
    EXPECT_THAT(text, r.id() == 0 ? AllOf(HasSubstr("weighted(0)"), HasSubstr("no samples"))
                                  : AllOf(HasSubstr("rank"), HasSubstr("0")));
    step(static_cast<double>(batch.size_of(r.id())));
    loss_of(local->forward(batch.x), batch.y).backward();
    expect_same_gradients(*net, *local, "afterwards");
  });
}

}  // namespace
}  // namespace convoy::test
