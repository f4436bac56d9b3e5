// DistributedDataParallel inside of distributed autograd: the scenarios of PyTorch's
// ddp_under_dist_autograd_test.py, whose names stand behind them, and what PyTorch does not test.
#include <torch/torch.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "convoy/autograd.h"
#include "convoy/ddp.h"
#include "convoy/distributed_optimizer.h"
#include "convoy/init.h"
#include "convoy/join.h"
#include "convoy/optimizer_in_backward.h"
#include "convoy/remote_module.h"
#include "convoy/sharded_optimizer.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::autograd::ddp_in_context_test {

using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using rpc::Session;
using Tensors = std::vector<at::Tensor>;
using namespace std::chrono_literals;

constexpr int kTrainers = 4;

at::Tensor ramp(std::uint64_t seed, at::IntArrayRef sizes) {
  return at::rand(sizes, at::detail::createCPUGenerator(seed));
}

// Of the trainers, by the worker's rank: workers are threads.
std::array<ProcessGroup, kTrainers>& groups() {
  static std::array<ProcessGroup, kTrainers> all;
  return all;
}
ProcessGroup& group_here() {
  return groups().at(static_cast<std::size_t>(rpc::current().session().worker_info().rank));
}

// A linear layer with given weights, as PyTorch's test has it.
torch::nn::Linear get_linear(int in, int out) {
  torch::nn::Linear linear(torch::nn::LinearOptions(in, out).bias(false));
  auto weight = torch::ones({out, in});
  weight[0][0] = -1;
  linear->weight.set_data(weight);
  return linear;
}

struct RemoteEmImpl : torch::nn::Module {
  RemoteEmImpl(int rows, int width)
      : em(register_module(
            "em", torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(rows, width)
                                              ._weight(torch::full({rows, width}, 0.5))))) {}
  at::Tensor forward(const at::Tensor& input) { return em(input, torch::arange(input.size(0))); }
  torch::nn::EmbeddingBag em;
};
TORCH_MODULE(RemoteEm);
CONVOY_REMOTE_MODULE(RemoteEm, int, int);

struct RemoteNetImpl : torch::nn::Module {
  RemoteNetImpl(int in, int out) : fc(register_module("fc", get_linear(in, out))) {}
  at::Tensor forward(const at::Tensor& input) { return torch::relu(fc(input)); }
  torch::nn::Linear fc;
};
TORCH_MODULE(RemoteNet);
CONVOY_REMOTE_MODULE(RemoteNet, int, int);

enum class DdpMode { kNone, kOutside, kInside };
constexpr int kRows = 2, kSparse = 3, kDense = 2, kHidden = 3;

struct HybridImpl : torch::nn::Module {
  HybridImpl(RRef<RemoteEm> remote_em, RRef<RemoteNet> remote_net, const ProcessGroup* group)
      : em(std::move(remote_em)),
        net(std::move(remote_net)),
        fc1(register_module("fc1", get_linear(kDense, kDense))),
        fc2(register_module("fc2", get_linear(kHidden, 1))) {
    if (group) ddp.emplace(fc2.ptr(), *group);
  }
  at::Tensor forward(const at::Tensor& dense, const at::Tensor& sparse) {
    const auto rows = em.rpc_sync<&RemoteEmImpl::forward>(sparse);
    const auto x = net.rpc_sync<&RemoteNetImpl::forward>(torch::cat({fc1(dense), rows}, 1));
    return ddp ? (*ddp)(x) : fc2(x);
  }
  RRef<RemoteEm> em;
  RRef<RemoteNet> net;
  torch::nn::Linear fc1, fc2;
  std::optional<DistributedDataParallel<torch::nn::LinearImpl>> ddp;
};
TORCH_MODULE(Hybrid);

struct Features {
  at::Tensor dense, sparse, values;
  CONVOY_FIELDS(dense, sparse, values)

  Features slice(std::int64_t begin, std::int64_t end) const {
    return {dense.slice(0, begin, end), sparse.slice(0, begin, end), values.slice(0, begin, end)};
  }
};
struct TrainedGradients {
  Tensors ddp, others;
  CONVOY_FIELDS(ddp, others)
};

class Trainer {
 public:
  Trainer(const RRef<RemoteEm>& em, const RRef<RemoteNet>& net, DdpMode mode)
      : mode_(mode), model_(em, net, mode == DdpMode::kInside ? &group_here() : nullptr) {
    if (mode == DdpMode::kOutside) outside_.emplace(model_.ptr(), group_here());
  }

  TrainedGradients train(const Features& batch, bool has_less, bool uneven) {
    std::vector<Features> batches{batch};
    if (uneven) {
      batches = {batch.slice(0, 2), batch.slice(2, 4)};
      if (has_less) batches.resize(1);
    }
    TrainedGradients result;
    const auto loop = [&] {
      for (const Features& each : batches) {
        const Context context(rpc::current().session());
        const auto output = outside_ ? (*outside_)(each.dense, each.sparse)
                                     : model_->forward(each.dense, each.sparse);
        context.backward({(output * batch.values).sum()});
        result = {};
        const auto gradients = context.gradients();
        for (const auto& p : {model_->fc1->weight, model_->fc2->weight}) {
          const bool by_ddp = mode_ == DdpMode::kOutside ||
                              (mode_ == DdpMode::kInside && p.is_same(model_->fc2->weight));
          (by_ddp ? result.ddp : result.others).push_back(gradients.at(p).clone());
          EXPECT_FALSE(p.grad().defined());
        }
      }
    };
    if (uneven) {
      join({&*outside_}, loop);
    } else {
      loop();
    }
    return result;
  }

 private:
  const DdpMode mode_;
  Hybrid model_;
  std::optional<DistributedDataParallel<HybridImpl>> outside_;
};
using TrainerPtr = std::shared_ptr<Trainer>;
TrainerPtr make_trainer(const RRef<RemoteEm>& em, const RRef<RemoteNet>& net, DdpMode mode) {
  return std::make_shared<Trainer>(em, net, mode);
}
CONVOY_RPC(make_trainer);
CONVOY_RPC(&Trainer::train);

struct LayerImpl : torch::nn::Module {
  LayerImpl(int in, int out)
      : fc(register_module("fc",
                           torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)))) {
    const torch::NoGradGuard no_grad;
    fc->weight.copy_(ramp(static_cast<std::uint64_t>(in), fc->weight.sizes()));
  }
  at::Tensor forward(const at::Tensor& x) { return fc(x); }
  torch::nn::Linear fc;
};
TORCH_MODULE(Layer);
CONVOY_REMOTE_MODULE(Layer, int, int);
at::Tensor gradient_of(const RRef<Layer>& layer, ContextId context) {
  return find(rpc::current().session(), context)
      .gradients()
      .at(layer.local_value()->fc->weight)
      .clone();
}
CONVOY_RPC(gradient_of);

std::vector<RRef<Layer>>& shared_layers() {
  static std::vector<RRef<Layer>> all;
  return all;
}
std::vector<RRef<Layer>> get_shared_layers() { return shared_layers(); }
CONVOY_RPC(get_shared_layers);

// Passes gradients on, or fails.
struct MayFail : torch::autograd::Function<MayFail> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            bool fails) {
    ctx->saved_data["fails"] = fails;
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& g) {
    if (ctx->saved_data["fails"].toBool()) throw std::runtime_error("Simulated error");
    return {g[0], {}};
  }
};
at::Tensor may_fail(const at::Tensor& x, bool fails) { return MayFail::apply(x, fails); }
CONVOY_RPC(may_fail);

// A model in a handler.
using Wrapped = DistributedDataParallel<LayerImpl>;
using WrappedPtr = std::shared_ptr<Wrapped>;
WrappedPtr make_wrapped(int in, int out) {
  return std::make_shared<Wrapped>(Layer(in, out).ptr(), group_here());
}
CONVOY_RPC(make_wrapped);
at::Tensor run_wrapped_of(const RRef<WrappedPtr>& model, const at::Tensor& x) {
  return (*model.local_value())(x);
}
CONVOY_RPC(run_wrapped_of);
at::Tensor gradient_of_wrapped(const RRef<WrappedPtr>& model, ContextId context) {
  return find(rpc::current().session(), context)
      .gradients()
      .at((*model.local_value())->fc->weight)
      .clone();
}
CONVOY_RPC(gradient_of_wrapped);

namespace {

// The first `trainers` workers have a group.
void run_trainers(int workers, int trainers,
                  const std::function<void(Session&, Rank&, const ProcessGroup&)>& function) {
  RankGroup(workers, RankMode::kThreads).run([&](Rank& r) {
    ProcessGroup group;
    if (r.id() < trainers) {
      group = new_group("convoy", {.timeout = 30s,
                                   .store = r.store(),
                                   .rank = r.id(),
                                   .size = trainers,
                                   .name = "trainers"});
      groups().at(static_cast<std::size_t>(r.id())) = group;
    }
    rpc::SessionOptions options;
    options.rank = r.id();
    options.size = r.size();
    options.store = r.store();
    Session session(options);
    function(session, r, group);
    session.shutdown();
    EXPECT_EQ(stats(session).passes, 0U);
    EXPECT_EQ(stats(session).contexts, 0U);
    if (r.id() < trainers) groups().at(static_cast<std::size_t>(r.id())) = {};
  });
}

void expect_close(const at::Tensor& got, const at::Tensor& wanted) {
  EXPECT_TRUE(got.defined() && at::allclose(got, wanted)) << got << "\n instead of\n" << wanted;
}

Features all_examples() {
  std::vector<float> dense, values;
  std::vector<std::int64_t> sparse;
  // Every example has another one with the same features and the opposite value.
  for (const float value : {-1.0F, 1.0F}) {
    for (const float x : {-value, value}) {
      for (const float y : {value, -value}) {
        for (const std::int64_t z : {0, 1}) {
          dense.insert(dense.end(), {x, y});
          sparse.push_back(z);
          values.push_back(value);
        }
      }
    }
  }
  return {torch::tensor(dense).view({-1, kDense}), torch::tensor(sparse), torch::tensor(values)};
}

// Four trainers, a worker with the remote parts, and one that conducts them.
void run_hybrid(DdpMode mode, bool uneven = false) {
  run_trainers(kTrainers + 2, kTrainers, [&](Session& session, Rank& r, const ProcessGroup&) {
    if (r.id() != kTrainers + 1) return;
    const RemoteModule<RemoteEm> em(session, kTrainers, kRows, kSparse);
    const RemoteModule<RemoteNet> net(session, kTrainers, kDense + kSparse, kHidden);
    std::vector<RRef<TrainerPtr>> trainers;
    for (int i = 0; i < kTrainers; ++i) {
      trainers.push_back(session.remote<make_trainer>(i, em.reference(), net.reference(), mode));
    }
    const Features all = all_examples();
    for (int round = 0; round < 3; ++round) {
      std::vector<rpc::Future<TrainedGradients>> running;
      for (int i = 0; i < kTrainers; ++i) {
        running.push_back(trainers[static_cast<std::size_t>(i)].rpc_async<&Trainer::train>(
            all.slice(4 * i, 4 * i + 4), uneven && i < kTrainers / 2, uneven));
      }
      for (auto& each : running) {
        const auto& gradients = each.wait();
        EXPECT_EQ(gradients.ddp.size(), mode == DdpMode::kNone     ? 0U
                                        : mode == DdpMode::kInside ? 1U
                                                                   : 2U);
        for (const auto& gradient : gradients.ddp) {
          if (!uneven) expect_close(gradient, torch::zeros_like(gradient));  // they cancel
        }
        for (const auto& gradient : gradients.others) EXPECT_TRUE(gradient.any().item<bool>());
      }
    }
  });
}

TEST(DdpUnderDistAutogradTest, BackwardNoDdp) {
  run_hybrid(DdpMode::kNone);
}  // test_backward_no_ddp
TEST(DdpUnderDistAutogradTest, BackwardDdpOutside) {  // test_backward_ddp_outside
  run_hybrid(DdpMode::kOutside);
}
// test_backward_ddp_outside_uneven_inputs
TEST(DdpUnderDistAutogradTest, BackwardDdpOutsideUnevenInputs) {
  run_hybrid(DdpMode::kOutside, /*uneven=*/true);
}
TEST(DdpUnderDistAutogradTest, BackwardDdpInside) {  // test_backward_ddp_inside
  run_hybrid(DdpMode::kInside);
}

// A model's gradients in a context, and in .grad by a local backward.
void run_comparison(bool uneven) {
  run_trainers(kTrainers, kTrainers, [&](Session& session, Rank& r, const ProcessGroup& group) {
    DistributedDataParallel ddp(Layer(2, 3), group);
    const int inputs = uneven && r.id() % 2 == 0 ? 3 : 1;
    const auto loop = [&] {
      for (int i = 0; i < inputs; ++i) {
        const auto x = ramp(static_cast<std::uint64_t>(10 * i + r.id()), {3, 2});
        const auto& weight = ddp->fc->weight;
        at::Tensor in_context;
        {
          const Context context(session);
          context.backward({ddp(x).norm()});
          in_context = context.gradients().at(weight);
        }
        weight.mutable_grad().reset();
        ddp(x).norm().backward();
        expect_close(in_context, weight.grad());
      }
    };
    if (uneven) {
      join({&ddp}, loop);
    } else {
      loop();
    }
  });
}
TEST(DdpUnderDistAutogradTest, Comparison) { run_comparison(false); }  // test_ddp_comparison
TEST(DdpUnderDistAutogradTest, ComparisonUnevenInputs) {  // test_ddp_comparison_uneven_inputs
  run_comparison(true);
}

TEST(DdpUnderDistAutogradTest, SparseGrads) {  // test_ddp_dist_autograd_sparse_grads
  run_trainers(2, 2, [&](Session& session, Rank& r, const ProcessGroup& group) {
    torch::nn::EmbeddingBag bag(torch::nn::EmbeddingBagOptions(10, 3).sparse(true));
    DistributedDataParallel ddp(bag, group);
    const auto rows = torch::arange(10) * (r.id() + 3) % 10;
    const auto offsets = torch::tensor({0, 4});
    ddp(rows, offsets).sum().backward();
    const Context context(session);
    context.backward({ddp(rows, offsets).sum()});
    const auto gradients = context.gradients();
    EXPECT_EQ(gradients.size(), 1U);
    EXPECT_TRUE(gradients.at(bag->weight).is_sparse());
    expect_close(gradients.at(bag->weight).to_dense(), bag->weight.grad().to_dense());
  });
}

TEST(DdpUnderDistAutogradTest, LocalVsRemote) {  // test_ddp_dist_autograd_local_vs_remote
  run_trainers(3, 3, [&](Session& session, Rank& r, const ProcessGroup& group) {
    const RemoteModule<Layer> remote(session, "worker0", 10, 5);
    Layer local(10, 5);  // the same weights
    DistributedDataParallel ddp(Layer(5, 1), group);
    const auto x = ramp(static_cast<std::uint64_t>(r.id()), {10, 10});
    ddp(local(x)).sum().backward();
    const Context context(session);
    context.backward({ddp(remote(x)).sum()});
    expect_close(context.gradients().at(ddp->fc->weight), ddp->fc->weight.grad());
    expect_close(session.rpc_sync<gradient_of>("worker0", remote.reference(), context.id()),
                 local->fc->weight.grad());
  });
}

// --- what PyTorch does not test ---

// Two trainers, and two servers with a layer each: five steps, beside one process.
TEST(DdpInContextTest, TrainsAsOneProcess) {
  constexpr int kSteps = 5, kDataParallel = 2;
  const auto input = [](int trainer, int step) {
    return ramp(static_cast<std::uint64_t>(100 * step + trainer), {4, 6});
  };
  run_trainers(4, kDataParallel, [&](Session& session, Rank& r, const ProcessGroup& group) {
    if (r.id() == 0) {
      shared_layers() = {
          session.remote<rpc::detail::make_module<Layer, int, int>>("worker2", 6, 5),
          session.remote<rpc::detail::make_module<Layer, int, int>>("worker3", 4, 3)};
      for (const auto& layer : shared_layers()) layer.created().wait();
    }
    r.barrier();
    if (r.id() < kDataParallel) {
      const auto layers = session.rpc_sync<get_shared_layers>("worker0");
      const RemoteModule<Layer> first(layers[0]), third(layers[1]);
      DistributedDataParallel second(Layer(5, 4), group);
      std::vector<RRef<at::Tensor>> parameters;
      for (const auto& layer : {first, third}) {
        for (const auto& parameter : layer.parameters()) parameters.push_back(parameter);
      }
      parameters.push_back(session.rref(second->fc->weight));
      const DistributedOptimizer optimizer(session, parameters, Sgd{.lr = 0.1});
      for (int step = 0; step < kSteps; ++step) {
        const Context context(session);
        context.backward({third(torch::tanh(second(first(input(r.id(), step))))).square().mean()});
        optimizer.step(context);
        group.barrier();  // both have stepped the servers' layers
      }
      // One process: the servers' layers get the sum of the trainers' gradients, in two steps.
      Layer a(6, 5), b(5, 4), c(4, 3);
      for (int step = 0; step < kSteps; ++step) {
        at::Tensor loss = torch::zeros({});
        for (int trainer = 0; trainer < kDataParallel; ++trainer) {
          loss = loss + c(torch::tanh(b(a(input(trainer, step))))).square().mean();
        }
        loss.backward();
        const torch::NoGradGuard no_grad;
        for (const auto& [layer, lr] : {std::pair(a, 0.1), std::pair(b, 0.05), std::pair(c, 0.1)}) {
          at::Tensor(layer->fc->weight).sub_(lr * layer->fc->weight.grad());
          layer->fc->weight.mutable_grad().reset();
        }
      }
      expect_close(first.state().at("fc.weight"), a->fc->weight);
      expect_close(second->fc->weight, b->fc->weight);
      expect_close(third.state().at("fc.weight"), c->fc->weight);
      EXPECT_FALSE(second->fc->weight.grad().defined());
    }
    r.barrier();
    if (r.id() == 0) shared_layers().clear();
  });
}

// The same with steps in backward: the model's own parameters, and a server's.
TEST(DdpInContextTest, StepsInBackward) {
  constexpr int kSteps = 4;
  run_trainers(3, 2, [&](Session& session, Rank& r, const ProcessGroup& group) {
    if (r.id() == 2) return;  // serves a layer to each
    const RemoteModule<Layer> first(session, "worker2", 6, 5);
    DistributedDataParallel second(Layer(5, 4), group);
    auto parameters = first.parameters();
    parameters.push_back(session.rref(second->fc->weight));
    const DistributedOptimizer optimizer(session, parameters, Sgd{.lr = 0.1, .momentum = 0.5});
    const auto input = [](int trainer, int step) {
      return ramp(static_cast<std::uint64_t>(100 * step + trainer), {4, 6});
    };
    for (int step = 0; step < kSteps; ++step) {
      const Context context(session);
      context.backward({second(first(input(r.id(), step))).square().mean()},
                       {.optimizers = {optimizer.in_backward()}});
    }
    // One process: a layer of each trainer's own, and one that both have.
    Layer own[] = {Layer(6, 5), Layer(6, 5)};
    Layer common(5, 4);
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.5);
    torch::optim::SGD sgd({own[0]->fc->weight, own[1]->fc->weight, common->fc->weight}, options);
    for (int step = 0; step < kSteps; ++step) {
      sgd.zero_grad();
      for (int trainer = 0; trainer < 2; ++trainer) {
        common(own[trainer](input(trainer, step))).square().mean().backward();
      }
      common->fc->weight.mutable_grad() = common->fc->weight.grad() / 2;
      sgd.step();
    }
    expect_close(first.state().at("fc.weight"), own[r.id()]->fc->weight);
    expect_close(second->fc->weight, common->fc->weight);
  });
}

// The mean over ranks of what these inputs give.
at::Tensor mean_gradient(int ranks, const std::function<at::Tensor(Layer&, int rank)>& loss) {
  Layer layer(3, 2);
  for (int rank = 0; rank < ranks; ++rank) (loss(layer, rank) / ranks).backward();
  return layer->fc->weight.grad();
}
at::Tensor batch_of(int rank, int step = 0) {
  return ramp(static_cast<std::uint64_t>(7 + 10 * step + rank), {4, 3});
}

TEST(DdpInContextTest, NoSync) {
  run_trainers(2, 2, [&](Session& session, Rank& r, const ProcessGroup& group) {
    for (const bool views : {true, false}) {
      DistributedDataParallel ddp(Layer(3, 2), group, {.gradient_as_bucket_view = views});
      const auto& weight = ddp->fc->weight;
      for (int round = 0; round < 2; ++round) {  // buckets are made at the end of the first
        const Context context(session);
        {
          const auto guard = ddp.no_sync();
          context.backward({ddp(batch_of(r.id(), 0)).square().sum()});
        }
        // This rank's own.
        Layer alone(3, 2);
        alone(batch_of(r.id(), 0)).square().sum().backward();
        expect_close(context.gradients().at(weight), alone->fc->weight.grad());
        context.backward({ddp(batch_of(r.id(), 1)).square().sum()});
        expect_close(context.gradients().at(weight), mean_gradient(2, [](Layer& layer, int rank) {
                       return layer(batch_of(rank, 0)).square().sum() +
                              layer(batch_of(rank, 1)).square().sum();
                     }));
        // A third one adds to what is reduced already.
        context.backward({ddp(batch_of(r.id(), 2)).square().sum()});
        expect_close(context.gradients().at(weight), mean_gradient(2, [](Layer& layer, int rank) {
                       return layer(batch_of(rank, 0)).square().sum() +
                              layer(batch_of(rank, 1)).square().sum() +
                              layer(batch_of(rank, 2)).square().sum();
                     }));
        EXPECT_FALSE(weight.grad().defined());
      }
    }
  });
}

// Sums, too, must not be summed again.
TEST(DdpInContextTest, Sums) {
  run_trainers(2, 2, [&](Session& session, Rank& r, const ProcessGroup& group) {
    DistributedDataParallel ddp(Layer(3, 2), group, {.reduce = GradReduce::kSum});
    for (int round = 0; round < 2; ++round) {
      const Context context(session);
      for (int step = 0; step < 3; ++step) {
        context.backward({ddp(batch_of(r.id(), step)).square().sum()});
      }
      expect_close(context.gradients().at(ddp->fc->weight),
                   2 * mean_gradient(2, [](Layer& layer, int rank) {
                     return layer(batch_of(rank, 0)).square().sum() +
                            layer(batch_of(rank, 1)).square().sum() +
                            layer(batch_of(rank, 2)).square().sum();
                   }));
    }
  });
}

// What local backwards have left in .grad stays, also where it lies in a bucket, and goes on.
TEST(DdpInContextTest, GradIsUntouched) {
  run_trainers(2, 2, [&](Session& session, Rank& r, const ProcessGroup& group) {
    DistributedDataParallel ddp(Layer(3, 2), group);
    const auto& weight = ddp->fc->weight;
    const auto pass = [&](int step) {
      const Context context(session);
      context.backward({ddp(batch_of(r.id(), step)).square().sum()});
      expect_close(context.gradients().at(weight), mean_gradient(2, [&](Layer& layer, int rank) {
                     return layer(batch_of(rank, step)).square().sum();
                   }));
    };
    ddp(batch_of(r.id(), 0)).square().sum().backward();
    const auto mean = mean_gradient(
        2, [](Layer& layer, int rank) { return layer(batch_of(rank, 0)).square().sum(); });
    expect_close(weight.grad(), mean);
    pass(1);
    expect_close(weight.grad(), mean);
    weight.mutable_grad().reset();
    // Accumulated on this rank alone, with passes in between.
    {
      const auto guard = ddp.no_sync();
      ddp(batch_of(r.id(), 0)).square().sum().backward();
    }
    const auto own = weight.grad();
    const auto value = own.clone();
    pass(2);
    EXPECT_TRUE(weight.grad().is_same(own));
    expect_close(weight.grad(), value);
    ddp(batch_of(r.id(), 1)).square().sum().backward();
    expect_close(weight.grad(), mean_gradient(2, [](Layer& layer, int rank) {
                   return layer(batch_of(rank, 0)).square().sum() +
                          layer(batch_of(rank, 1)).square().sum();
                 }));
  });
}

struct BranchesImpl : torch::nn::Module {
  BranchesImpl()
      : a(register_module("a", Layer(3, 2))),
        b(register_module("b", Layer(3, 2))),
        c(register_module("c", Layer(3, 2))) {}
  at::Tensor forward(const at::Tensor& x, bool with_b) { return with_b ? a(x) + b(x) : a(x); }
  Layer a, b, c;
};
TORCH_MODULE(Branches);

TEST(DdpInContextTest, UnusedParameters) {
  run_trainers(2, 2, [&](Session& session, Rank& r, const ProcessGroup& group) {
    DistributedDataParallel ddp(Branches(), group, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      const Context context(session);
      context.backward({ddp(batch_of(r.id(), step), r.id() == 1).square().sum()});
      const auto gradients = context.gradients();
      EXPECT_EQ(gradients.size(), 2U);
      EXPECT_FALSE(gradients.contains(ddp->c->fc->weight));
      // b is used by rank 1 only; both have its mean.
      Branches alone;
      for (int rank = 0; rank < 2; ++rank) {
        (alone->forward(batch_of(rank, step), rank == 1).square().sum() / 2).backward();
      }
      expect_close(gradients.at(ddp->a->fc->weight), alone->a->fc->weight.grad());
      expect_close(gradients.at(ddp->b->fc->weight), alone->b->fc->weight.grad());
    }
  });
}

// A rank that uses none of the parameters takes part all the same.
TEST(DdpInContextTest, ARankWithoutParameters) {
  struct MaybeImpl : torch::nn::Module {
    MaybeImpl() : layer(register_module("layer", Layer(3, 2))) {}
    at::Tensor forward(const at::Tensor& x, bool uses) {
      return uses ? layer(x) : x.slice(1, 0, 2) * 1;
    }
    Layer layer;
  };
  run_trainers(2, 2, [&](Session& session, Rank& r, const ProcessGroup& group) {
    DistributedDataParallel<MaybeImpl> ddp(std::make_shared<MaybeImpl>(), group,
                                           {.find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      const auto x = batch_of(r.id(), step).requires_grad_(true);
      const Context context(session);
      context.backward({ddp(x, r.id() == 0).square().sum()});
      Layer alone(3, 2);
      (alone(batch_of(0, step)).square().sum() / 2).backward();
      expect_close(context.gradients().at(ddp->layer->fc->weight), alone->fc->weight.grad());
      EXPECT_TRUE(context.gradients().contains(x));
    }
  });
}

// An error of one rank is one of all, leaves nothing in contexts and .grad as it was; then all go
// on.
TEST(DdpInContextTest, Errors) {
  run_trainers(3, 2, [&](Session& session, Rank& r, const ProcessGroup& group) {
    if (r.id() == 2) return;  // serves
    DistributedDataParallel ddp(Branches(), group);
    const auto& weight = ddp->a->fc->weight;
    weight.mutable_grad() = torch::ones_like(weight);
    // x, a remote function whose backward may fail, the model, a node that may fail.
    const auto pass = [&](const Context& context, bool at_server, bool here, bool with_b) {
      const auto x = batch_of(r.id()).requires_grad_(true);
      const auto y = ddp(session.rpc_sync<may_fail>("worker2", x, at_server), with_b);
      context.backward({may_fail(y, here).square().sum() + ddp->c(x).sum()});
    };
    const auto fails = [&](const char* text, bool at_server, bool here, bool with_b) {
      SCOPED_TRACE(text);
      const auto kept = weight.grad();
      const Context context(session);
      const auto error = convoy::test::error_of([&] { pass(context, at_server, here, with_b); });
      ASSERT_TRUE(error.has_value());
      EXPECT_NE(std::string(error->what()).find(text), std::string::npos) << error->what();
      EXPECT_TRUE(context.gradients().empty());
      EXPECT_TRUE(weight.grad().is_same(kept));
      expect_close(kept, torch::ones_like(kept));
      EXPECT_FALSE(ddp->b->fc->weight.grad().defined());
    };
    const auto works = [&] {
      const Context context(session);
      pass(context, false, false, true);
      EXPECT_EQ(context.gradients().size(), 4U);
      expect_close(weight.grad(), torch::ones_like(weight));
    };
    works();
    // c is not the loss's own use: it is a parameter that forward does not reach.
    fails(r.id() == 1 ? "Simulated error" : "rank 1", r.id() == 1, false, true);
    works();
    // Before the gradient comes to the model: the others hear of it when this rank goes on.
    fails(r.id() == 1 ? "Simulated error" : "rank 1: an exception was thrown between forward",
          false, r.id() == 1, true);
    works();
    fails("no gradient came for b.fc.weight", false, false, false);
    works();
  });
}

// One vocabulary: all optimizers take libtorch's options, and do the same with them.
template <class Optimizer, class Options>
void expect_alike(Session& session, int rank, const ProcessGroup& group, const Options& options,
                  const Options& later) {
  DistributedDataParallel first(Layer(3, 2), group), second(Layer(3, 2), group),
      third(Layer(3, 2), group);
  const auto parameter = session.rref(third->fc->weight);
  OptimizerInBackward in_backward(first.reducer(), options);
  ShardedOptimizer sharded(second.reducer(),
                           std::vector<OptimizerGroup>{{second->parameters(), options}});
  const DistributedOptimizer distributed(session, {DistributedGroup{{parameter}, options}});
  Layer whole(3, 2);
  Optimizer reference(whole->parameters(), options);
  for (int step = 0; step < 4; ++step) {
    if (step == 2) {
      in_backward.set_rule(0, later);
      sharded.param_groups()[0].set_options(std::make_unique<RuleOptions>(later));
      distributed.set_rule(0, later);
      reference.param_groups()[0].set_options(std::make_unique<Options>(later));
    }
    const auto x = batch_of(rank, step);
    first(x).square().sum().backward();
    second(x).square().sum().backward();
    sharded.step();
    {
      const Context context(session);
      context.backward({third(x).square().sum()});
      distributed.step(context);
    }
    reference.zero_grad();
    for (int other = 0; other < 2; ++other) {
      (whole(batch_of(other, step)).square().sum() / 2).backward();
    }
    reference.step();
    EXPECT_TRUE(at::equal(first->fc->weight, second->fc->weight)) << step;
    EXPECT_TRUE(at::equal(first->fc->weight, third->fc->weight)) << step;
    expect_close(first->fc->weight, whole->fc->weight);
  }
}
TEST(DdpInContextTest, AllOptimizersTakeTorchsOptions) {
  namespace optim = torch::optim;
  run_trainers(2, 2, [](Session& session, Rank& r, const ProcessGroup& group) {
    const auto sgd = optim::SGDOptions(0.01).momentum(0.5);
    expect_alike<optim::SGD>(session, r.id(), group, sgd, optim::SGDOptions(sgd).lr(0.02));
    const auto adam = optim::AdamWOptions(0.1).weight_decay(0.2);
    expect_alike<optim::AdamW>(session, r.id(), group, adam, optim::AdamWOptions(adam).lr(0.02));
    // Not in a group.
    const auto leaf = torch::zeros({2}).requires_grad_(true);
    const DistributedOptimizer optimizer(session, {session.rref(leaf)}, sgd);
    EXPECT_EQ(std::get<Sgd>(optimizer.rule()).momentum, 0.5);
    expect_error(ErrorKind::kInvalidArgument, "there is no rule for these options", [&] {
      const DistributedOptimizer none(session, {session.rref(leaf)}, optim::LBFGSOptions(1));
    });
  });
}

TEST(DdpInContextTest, InHandlers) {
  run_trainers(3, 2, [&](Session& session, Rank& r, const ProcessGroup&) {
    if (r.id() != 2) return;
    std::vector<RRef<WrappedPtr>> models;
    for (int i = 0; i < 2; ++i) models.push_back(session.remote<make_wrapped>(i, 3, 2));
    for (int step = 0; step < 2; ++step) {
      const Context context(session);
      std::vector<rpc::Future<at::Tensor>> outputs;
      for (int i = 0; i < 2; ++i) {
        outputs.push_back(session.rpc_async<run_wrapped_of>(i, models[static_cast<std::size_t>(i)],
                                                            batch_of(i, step)));
      }
      at::Tensor loss = torch::zeros({});
      for (const auto& y : rpc::wait_all(outputs)) loss = loss + y.square().sum();
      context.backward({loss});
      const auto mean = mean_gradient(
          2, [&](Layer& layer, int rank) { return layer(batch_of(rank, step)).square().sum(); });
      for (int i = 0; i < 2; ++i) {
        expect_close(session.rpc_sync<gradient_of_wrapped>(i, models[static_cast<std::size_t>(i)],
                                                           context.id()),
                     mean);
      }
    }
  });
}

TEST(DdpInContextTest, ShardedOptimizersAreRefused) {
  run_trainers(2, 2, [&](Session& session, Rank& r, const ProcessGroup& group) {
    DistributedDataParallel ddp(Layer(3, 2), group);
    const ShardedOptimizer optimizer(ddp.reducer(), Sgd{.lr = 0.1});
    const Context context(session);
    const auto loss = ddp(batch_of(r.id())).square().sum();
    expect_error(ErrorKind::kUnsupported, "use a DistributedOptimizer",
                 [&] { context.backward({loss}); });
  });
}

}  // namespace
}  // namespace convoy::autograd::ddp_in_context_test
