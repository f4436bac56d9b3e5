// Passes: the scenarios of PyTorch's dist_autograd_test.py, whose names stand behind them, and what
// PyTorch does not have.
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "support.h"

namespace convoy::autograd::passes_test {

using namespace test;
using namespace std::chrono_literals;

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
CONVOY_RPC(add);
at::Tensor cosine(const at::Tensor& a) { return a.cos(); }
CONVOY_RPC(cosine);
at::Tensor divide(const at::Tensor& a, const at::Tensor& b) { return a / b; }
CONVOY_RPC(divide);
at::Tensor stack(const Tensors& tensors) { return torch::stack(tensors); }
CONVOY_RPC(stack);
at::Tensor bmm(const at::Tensor& a, const at::Tensor& b) { return a.bmm(b); }
CONVOY_RPC(bmm);
at::Tensor matmul(const at::Tensor& a, const at::Tensor& b) { return a.matmul(b); }
CONVOY_RPC(matmul);
at::Tensor nested_add(const Way& way, const at::Tensor& a, const at::Tensor& b) {
  if (way.empty()) return a + b;
  return rpc::current().session().rpc_sync<nested_add>(way[0], Way(way.begin() + 1, way.end()), a,
                                                       b);
}
CONVOY_RPC(nested_add);
struct Failing : torch::autograd::Function<Failing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("Simulate error on backward pass");
  }
};
at::Tensor failing_behind(const Way& way, const at::Tensor& x) {
  if (way.empty()) return Failing::apply(x * 1);
  return rpc::current().session().rpc_sync<failing_behind>(way[0], Way(way.begin() + 1, way.end()),
                                                           x * 1);
}
CONVOY_RPC(failing_behind);
// In place, on a view of a view.
at::Tensor in_place(const at::Tensor& x) {
  at::Tensor y = x * 3;
  y[0].mul_(2);
  y.t()[1].add_(y[2]);
  return y.view({9})[4] + y.sum();
}
CONVOY_RPC(in_place);
at::Tensor embed(const at::Tensor& rows) { return rows * 2; }
CONVOY_RPC(embed);
at::Tensor sum_of(const at::Tensor& t) { return t.sum(); }
CONVOY_RPC(sum_of);
// Each worker (they are threads here) has a parameter.
at::Tensor parameter_of(int rank) {
  static std::mutex mutex;
  static std::map<int, at::Tensor> all;
  const std::lock_guard lock(mutex);
  auto& one = all[rank];
  if (!one.defined()) one = leaf(rank + 2.0);
  return one;
}
int rank_here() { return rpc::current().session().worker_info().rank; }
at::Tensor times_parameter(const at::Tensor& x) { return x * parameter_of(rank_here()); }
CONVOY_RPC(times_parameter);
at::Tensor gradient_of_parameter() {
  const auto gradients = current().gradients();
  EXPECT_EQ(gradients.size(), 1U);
  return gradients.at(parameter_of(rank_here())).clone();
}
CONVOY_RPC(gradient_of_parameter);

namespace {

// On a worker, or here.
template <auto Function, class... Arguments>
at::Tensor call(const Session* session, int to, const Arguments&... arguments) {
  return session ? session->rpc_sync<Function>(to, arguments...) : Function(arguments...);
}
// What one process computes: .grad of these leaves.
void expect_as_local(const ContextRef& context, const at::Tensor& local_loss,
                     const Tensors& leaves) {
  local_loss.backward();
  const auto gradients = context.gradients();
  for (const auto& leaf : leaves) {
    if (leaf.grad().defined()) {
      expect_close(gradients.at(leaf), leaf.grad());
    } else {
      EXPECT_FALSE(gradients.contains(leaf));
    }
    leaf.mutable_grad() = at::Tensor();
  }
}

enum class How { kSync, kAsync, kRemote };

// test_backward_simple, ..._self; ..._script_call is not applicable: there is no TorchScript
TEST(AutogradPassTest, Simple) {
  run_root(2, [](Session& session) {
    const auto t1 = random_leaf();
    const auto t2 = random_leaf();
    for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
      for (const int to : {0, 1}) {
        for (const How how : {How::kSync, How::kAsync, How::kRemote}) {
          const Context context(session);
          const auto sum = how == How::kSync    ? session.rpc_sync<add>(to, t1, t2)
                           : how == How::kAsync ? session.rpc_async<add>(to, t1, t2).wait()
                                                : session.remote<add>(to, t1, t2).to_here();
          context.backward({sum.sum()}, {.mode = mode});
          expect_as_local(context, (t1 + t2).sum(), {t1, t2});
        }
      }
    }
  });
}

TEST(AutogradPassTest, MultipleRoundTrips) {  // test_backward_multiple_round_trips
  run_root(4, [](Session& session) {
    const auto t1 = random_leaf();
    const auto t2 = torch::rand({3, 3});
    const auto t3 = random_leaf();
    const auto t4 = random_leaf({3, 3});
    const auto t5 = torch::rand({3, 3});
    const auto run = [&](const Session* where) {
      const auto a = call<passes_test::add>(where, 1, t1, t2);
      const auto b = call<passes_test::mul>(where, 2, t3, t4);
      const auto c = call<passes_test::stack>(where, 3, Tensors{a, b});
      const auto d = call<passes_test::stack>(where, 1, Tensors{b, t5});
      const auto e = call<passes_test::bmm>(where, 2, c, d);
      return call<passes_test::matmul>(where, 3, e, c).sum();
    };
    for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
      const Context context(session);
      context.backward({run(&session)}, {.mode = mode});
      EXPECT_EQ(context.gradients().size(), 3U);
      expect_as_local(context, run(nullptr), {t1, t3, t4});
    }
  });
}

TEST(AutogradPassTest, EngineError) {  // test_backward_autograd_engine_error
  run_root(4, [](Session& session) {
    const auto x = random_leaf();
    for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
      const Context context(session);
      const auto loss =
          session.rpc_sync<failing_behind>("worker1", Way{"worker2", "worker3"}, x).sum();
      try {
        context.backward({loss}, {.mode = mode, .timeout = 20s});
        ADD_FAILURE() << "it did not fail";
      } catch (const rpc::RemoteError& error) {
        EXPECT_EQ(error.worker(), "worker3");
        EXPECT_NE(std::string(error.what()).find("Error on Node 3: Simulate error"),
                  std::string::npos)
            << error.what();
      }
      EXPECT_TRUE(context.gradients().empty());
      EXPECT_EQ(stats(session).passes, 0U);
    }
  });
}

TEST(AutogradPassTest, InvalidArguments) {  // test_backward_invalid_args, ..._without_context
  run_root(1, [](Session& session) {
    const auto t = random_leaf();
    const Context context(session);
    const auto kind = ErrorKind::kInvalidArgument;
    expect_error(kind, "No tensors provided for gradient computation.",
                 [&] { context.backward({}); });
    expect_error(kind, "requires_grad not set on", [&] { context.backward({torch::rand({1})}); });
    expect_error(kind, "not a scalar, all roots need to be scalar",
                 [&] { context.backward({t * 2}); });
    expect_error(kind, "does not have a valid gradient function",
                 [&] { context.backward({torch::rand({1}).requires_grad_(true)}); });
    expect_error(kind, "2 gradients", [&] {
      context.backward({t.sum()}, {.gradients = {torch::ones({}), torch::ones({})}});
    });
    expect_error(ErrorKind::kUnsupported, "create_graph",
                 [&] { context.backward({t.sum()}, {.create_graph = true}); });
    expect_error(kind, "Could not find autograd context with id: 100", [&] { find(session, 100); });
    expect_error(kind, "there is no gradient", [&] { context.gradients().at(t); });
  });
}

TEST(AutogradPassTest, MultipleRoots) {  // test_backward_multiple_roots
  run_root(2, [](Session& session) {
    const auto t1 = random_leaf();
    const auto t2 = random_leaf();
    const Context context(session);
    const auto r1 = session.rpc_sync<add>("worker1", t1, t2).sum();
    const auto r2 = session.rpc_sync<mul>("worker1", t1, t2).sum();
    const auto r3 = session.rpc_sync<cosine>("worker1", t1).sum();
    const auto r4 = session.rpc_sync<divide>("worker1", t1, t2).sum();
    context.backward({r1, r2, r3, r4}, {.retain_graph = true});
    expect_as_local(context, (t1 + t2 + t1 * t2 + t1.cos() + t1 / t2).sum(), {t1, t2});
  });
}

TEST(AutogradPassTest, GivenGradients) {
  run_root(2, [](Session& session) {
    const auto t1 = random_leaf();
    const auto t2 = random_leaf();
    const auto g = torch::rand({3, 3});
    const Context context(session);
    const auto root = session.rpc_sync<mul>("worker1", t1, t2);
    const auto other = session.rpc_sync<square>("worker1", t1).sum();
    context.backward({root, other}, {.gradients = {g, at::Tensor()}});
    expect_as_local(context, (t1 * t2 * g).sum() + (t1 * t1).sum(), {t1, t2});
  });
}

TEST(AutogradPassTest, PassesAddUp) {  // test_backward_accumulate_grads, test_multiple_backward
  run_root(2, [](Session& session) {
    const auto t1 = random_leaf();
    const auto t2 = random_leaf();
    const Context context(session);
    const auto loss = session.rpc_sync<add>("worker1", t1, t2).sum();
    constexpr int kPasses = 1000;
    for (int i = 0; i < kPasses; ++i) context.backward({loss}, {.retain_graph = true});
    context.backward({loss});
    expect_close(context.gradients().at(t1), torch::full({3, 3}, kPasses + 1.0));
    // The graph is used up.
    const auto product = session.rpc_sync<mul>("worker1", t1, t2).sum();
    context.backward({product});
    expect_error(ErrorKind::kRemote, "second time", [&] { context.backward({product}); });
  });
}

TEST(AutogradPassTest, Hooks) {  // test_backward_verify_hooks, test_post_hooks
  run_root(2, [](Session& session) {
    const auto t1 = random_leaf();
    const auto t2 = random_leaf();
    const Context context(session);
    int calls = 0;
    t1.register_hook([&calls](const at::Tensor& g) {
      ++calls;
      return g * 2;
    });
    struct Count final : torch::autograd::FunctionPostHook {
      explicit Count(int& counter) : count(counter) {}
      torch::autograd::variable_list operator()(
          const torch::autograd::variable_list& outputs,
          const torch::autograd::variable_list& inputs) override {
        EXPECT_EQ(inputs.size(), 1U);
        ++count;
        return outputs;
      }
      int& count;
    };
    int posts = 0;
    const auto accumulator = torch::autograd::impl::grad_accumulator(t2);
    accumulator->add_post_hook(std::make_unique<Count>(posts));
    const auto received = session.rpc_sync<mul>("worker1", t1, t2);
    int seen = 0;
    received.register_hook([&seen](const at::Tensor& g) {
      ++seen;
      return g * 3;
    });
    const auto other = session.rpc_sync<mul>("worker1", t1, t2);
    context.backward({(received + other).sum()});
    expect_close(context.gradients().at(t1), 2 * (3 + 1) * t2);
    expect_close(context.gradients().at(t2), (3 + 1) * t1);
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(posts, 1);
    EXPECT_EQ(seen, 1);
  });
}

// The order matters to these: as the engine has it in one process.
TEST(AutogradPassTest, HooksInOrder) {
  run_root(2, [](Session& session) {
    const auto t1 = random_leaf();
    const auto t2 = random_leaf();
    const auto add_hooks = [](const at::Tensor& t) {
      t.register_hook([](const at::Tensor& g) { return g * 2; });
      t.register_hook([](const at::Tensor& g) { return g + 3; });
    };
    add_hooks(t1);
    const auto run = [&](const Session* where) {
      const auto received = call<passes_test::mul>(where, 1, t1, t2);
      add_hooks(received);
      return (received * t2).sum();
    };
    for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
      const Context context(session);
      context.backward({run(&session)}, {.mode = mode});
      // Of what came: 2 t2 + 3.
      expect_close(context.gradients().at(t1), 2 * ((2 * t2 + 3) * t2) + 3);
      expect_as_local(context, run(nullptr), {t1, t2});
    }
  });
}

// A gradient that is nobody else's is taken as it is.
TEST(AutogradPassTest, GradientsAreNotCopied) {  // test_no_grad_copy
  run_root(1, [](Session& session) {
    static const void* made = nullptr;
    struct Own : torch::autograd::Function<Own> {
      static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
        return x * 1;
      }
      static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                     const torch::autograd::variable_list& g) {
        at::Tensor result = g[0].clone();
        made = result.data_ptr();
        return {std::move(result)};
      }
    };
    struct Shared : torch::autograd::Function<Shared> {
      static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& a,
                                const at::Tensor& b) {
        return a + b;
      }
      static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                     const torch::autograd::variable_list& g) {
        at::Tensor result = g[0].clone();
        made = result.data_ptr();
        return {result, result.view({3, 3})};
      }
    };
    const auto a = random_leaf();
    const auto b = random_leaf();
    {
      const Context context(session);
      context.backward({Own::apply(a).sum()});
      EXPECT_EQ(context.gradients().at(a).data_ptr(), made);
    }
    const Context context(session);
    context.backward({Shared::apply(a, b).sum()});
    EXPECT_NE(context.gradients().at(a).data_ptr(), context.gradients().at(b).data_ptr());
    context.gradients().at(a).zero_();
    expect_close(context.gradients().at(b), torch::ones({3, 3}));
  });
}

// Nor that of a table's rows; but two tables whose rows got one gradient do not share it, and the
// rows' numbers are those of whoever looked them up. test_no_grad_copy_sparse
TEST(AutogradPassTest, SparseGradientsAreNotShared) {
  run_root(1, [](Session& session) {
    const auto a = random_leaf({10, 4});
    const auto b = random_leaf({10, 4});
    const auto weights = torch::rand({2, 4});
    const auto numbers = torch::tensor({1, 3});
    const auto rows = [&](const at::Tensor& table) {
      return at::embedding(table, numbers, -1, false, /*sparse=*/true);
    };
    const auto of_rows = [&] { return torch::zeros({10, 4}).index_put({numbers}, weights); };
    {
      const Context context(session);
      const void* made = nullptr;
      const auto looked_up = rows(a);
      looked_up.register_hook([&made](const at::Tensor& g) { made = g.data_ptr(); });
      context.backward({(looked_up * weights).sum()});
      EXPECT_EQ(context.gradients().at(a)._values().data_ptr(), made);
    }
    const Context context(session);
    context.backward({((rows(a) + rows(b)) * weights).sum()});
    const auto of_a = context.gradients().at(a);
    const auto of_b = context.gradients().at(b);
    ASSERT_TRUE(of_a.is_sparse() && of_b.is_sparse());
    const auto wanted = of_rows();
    of_a._values().zero_();
    expect_close(of_b.to_dense(), wanted);
    expect_close(of_a.to_dense(), torch::zeros({10, 4}));
    numbers.zero_();
    expect_close(of_b.to_dense(), wanted);
  });
}

// Each worker trains against the three others at once, each of which has a parameter.
// test_trainer_ps_torchscript_functions is not applicable: there is no TorchScript.
TEST(AutogradPassTest, TrainersAndServers) {  // test_trainer_ps, test_debug_info
  run_all(4, [](Session& session, int rank) {
    std::vector<std::thread> threads;
    for (int server = 0; server < 4; ++server) {
      if (server == rank) continue;
      threads.emplace_back([&session, server] {
        for (int i = 0; i < 5; ++i) {
          const auto w = random_leaf();
          const Context context(session);
          const auto loss = session.rpc_sync<times_parameter>(server, w).sum();
          context.backward({loss});
          EXPECT_EQ(context.gradients().size(), 1U);
          expect_close(context.gradients().at(w), parameter_of(server));
          // Of this context alone.
          expect_close(session.rpc_sync<gradient_of_parameter>(server), w);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST(AutogradPassTest, VeryLongTimeouts) {
  run_root(2, [](Session& session) {
    const BackwardOptions options{.retain_graph = true,
                                  .timeout = std::chrono::milliseconds::max()};
    const auto x = random_leaf();
    const Context context(session);
    context.backward({session.rpc_sync<square>("worker1", x).sum()}, options);
    expect_close(context.gradients().at(x), 2 * x);
    session.remote<sum_of>("worker1", x).backward(context, options);
    expect_close(context.gradients().at(x), 2 * x + 1);
  });
}

TEST(AutogradPassTest, ManyPassesOnOneThread) {
  run_root(
      3,
      [](Session& session) {
        const auto x = random_leaf();
        const Context context(session);
        std::vector<at::Tensor> losses;
        for (int i = 0; i < 20; ++i) {
          losses.push_back(
              session.rpc_sync<nested_add>("worker1", Way{"worker2", "worker1", "worker0"}, x, x)
                  .sum());
        }
        std::vector<std::thread> threads;
        for (const auto& loss : losses) {
          threads.emplace_back([&context, loss] { context.backward({loss}); });
        }
        for (auto& thread : threads) thread.join();
        expect_close(context.gradients().at(x), torch::full({3, 3}, 40.0));
      },
      {.threads = 1});
}

TEST(AutogradPassTest, InPlaceViewsAndSparse) {
  run_root(2, [](Session& session) {
    const auto x = random_leaf();
    {
      const Context context(session);
      const auto loss = session.rpc_sync<in_place>("worker1", x * 2);
      context.backward({loss});
      expect_as_local(context, in_place(x * 2), {x});
    }
    const auto table = random_leaf({10, 4});
    const Context context(session);
    const auto rows = at::embedding(table, torch::tensor({1, 1, 3}), -1, false, /*sparse=*/true);
    context.backward({session.rpc_sync<embed>("worker1", rows).sum()});
    const auto& gradient = context.gradients().at(table);
    EXPECT_TRUE(gradient.is_sparse());
    expect_close(gradient.to_dense().sum(), torch::tensor(24.0));
  });
}

TEST(AutogradPassTest, AnomalyMode) {
  run_root(2, [](Session& session) {
    torch::autograd::AnomalyMode::set_enabled(true, true);
    const auto x = torch::zeros({3}).requires_grad_(true);
    {
      const Context context(session);
      const auto y = session.rpc_sync<mul>("worker1", x.sqrt(), torch::zeros({3}));
      expect_error(ErrorKind::kRemote, "nan", [&] { context.backward({y.sum()}); });
    }
    torch::autograd::AnomalyMode::set_enabled(false, true);
  });
}

// A recv node is not for libtorch's own backward().
TEST(AutogradPassTest, LocalBackwardIsRefused) {
  run_root(2, [](Session& session) {
    const auto x = random_leaf();
    const Context context(session);
    const auto y = session.rpc_sync<square>("worker1", x).sum();
    EXPECT_THROW(y.backward(), Error);
    context.backward({y});
    expect_close(context.gradients().at(x), 2 * x);
  });
}

}  // namespace
}  // namespace convoy::autograd::passes_test
