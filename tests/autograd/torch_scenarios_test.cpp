// The rest of PyTorch's dist_autograd_test.py, whose names stand behind those of the tests, but for
// what is about Python, TorchScript or CUDA.
#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "support.h"

namespace convoy::autograd::torch_scenarios_test {

using namespace test;
using namespace std::chrono_literals;

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
CONVOY_RPC(add);
at::Tensor stack(const Tensors& tensors) { return torch::stack(tensors); }
CONVOY_RPC(stack);
at::Tensor matmul(const at::Tensor& a, const at::Tensor& b) { return a.matmul(b); }
CONVOY_RPC(matmul);
at::Tensor multi_dot(const Tensors& all) { return at::linalg_multi_dot(all); }
CONVOY_RPC(multi_dot);
Tensors split(const at::Tensor& t, std::int64_t size) { return at::split(t, size); }
CONVOY_RPC(split);
at::Tensor minus_or_times(const at::Tensor& a, const at::Tensor& b) {
  return b.requires_grad() ? a - b : a * b;
}
CONVOY_RPC(minus_or_times);
at::Tensor linear_layers(const at::Tensor& a, const at::Tensor& b) {
  const auto c = at::linear(a, b);
  const auto d = at::linear(b, c);
  return at::linalg_multi_dot({a, b, c, d, at::linear(c, d)});
}
CONVOY_RPC(linear_layers);
// With a call in the middle; in one process without `to`.
at::Tensor all_of(const at::Tensor& a, const at::Tensor& b, const std::string& to) {
  const auto c = a * b;
  const auto d = a + b;
  const auto sum = to.empty() ? c + d : rpc::current().session().rpc_sync<add>(to, c, d);
  return a * b * c * d * sum;
}
CONVOY_RPC(all_of);
at::Tensor add_behind(const std::string& to, const at::Tensor& a, const at::Tensor& b) {
  return rpc::current().session().rpc_sync<add>(to, a, b);
}
CONVOY_RPC(add_behind);

// A parameter of whoever answers; workers are threads here.
at::Tensor& parameter() {
  static at::Tensor one = leaf(3);
  return one;
}
at::Tensor get_parameter() { return parameter(); }
CONVOY_RPC(get_parameter);
std::vector<at::Tensor> gradients_here() {
  std::vector<at::Tensor> all;
  for (const auto& [leaf, gradient] : current().gradients()) {
    all.push_back(leaf.detach());
    all.push_back(gradient.clone());
  }
  return all;
}
CONVOY_RPC(gradients_here);
at::Tensor bag_of(const rpc::RRef<at::Tensor>& table, const at::Tensor& rows,
                  const at::Tensor& offsets, const at::Tensor& weights) {
  return std::get<0>(at::embedding_bag(table.local_value(), rows, offsets, false, /*mode=*/0,
                                       /*sparse=*/true, weights));
}
CONVOY_RPC(bag_of);
at::Tensor make_table() { return torch::ones({16, 16}).requires_grad_(true); }
CONVOY_RPC(make_table);

std::atomic<bool> fails{true};
struct MayFail : torch::autograd::Function<MayFail> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& g) {
    if (fails) throw std::runtime_error("Simulate error on backward pass");
    return g;
  }
};
at::Tensor may_fail(const at::Tensor& a, const at::Tensor& b) {
  const auto c = a + b;
  return at::linalg_multi_dot({a, b, c, MayFail::apply(c)});
}
CONVOY_RPC(may_fail);

namespace {

constexpr Mode kModes[] = {Mode::kSmart, Mode::kFast};

// In one process, by a call, and by a reference.
enum class How { kHere, kCall, kReference };
template <auto Function, class... Arguments>
auto run(const Session& session, How how, const Arguments&... arguments) {
  switch (how) {
    case How::kHere: break;
    case How::kCall: return session.rpc_sync<Function>(1, arguments...);
    case How::kReference: return session.remote<Function>(1, arguments...).to_here();
  }
  return Function(arguments...);
}

// program(how) gives a loss: its gradients across workers are those of one process.
template <class Program>
void expect_as_here(const Tensors& leaves, const Program& program) {
  run_root(2, [&](Session& session) {
    program(session, How::kHere).backward();
    for (const Mode mode : kModes) {
      for (const How how : {How::kCall, How::kReference}) {
        const Context context(session);
        context.backward({program(session, how)}, {.mode = mode});
        for (const at::Tensor& leaf : leaves) {
          if (!leaf.requires_grad()) continue;
          expect_close(context.gradients().at(leaf), leaf.grad());
        }
      }
    }
  });
}

TEST(AutogradTorchTest, TensorsOfManyShapes) {  // test_backward_different_tensor_dims
  const auto a = random_leaf({4, 6}), c = random_leaf({5, 7});
  const auto b = torch::rand({6, 5}), d = torch::rand({7, 9});
  expect_as_here({a, b, c, d}, [&](const Session& session, How how) {
    const auto product = run<torch_scenarios_test::matmul>(session, how, a, b);
    return run<torch_scenarios_test::multi_dot>(session, how, Tensors{product, c, d}).sum();
  });
}

TEST(AutogradTorchTest, SeveralResults) {  // test_backward_multiple_output_tensors
  const auto t = random_leaf({10, 2});
  expect_as_here({t}, [&](const Session& session, How how) {
    const auto parts = run<torch_scenarios_test::split>(session, how, t, std::int64_t{2});
    return run<torch_scenarios_test::multi_dot>(session, how, Tensors{parts[0], parts[2], parts[4]})
        .sum();
  });
}

TEST(AutogradTorchTest, UnusedParts) {  // test_backward_unused_tensors
  const auto a = random_leaf(), b = random_leaf(), c = random_leaf();
  expect_as_here({a, b, c}, [&](const Session& session, How how) {
    const auto all = run<torch_scenarios_test::stack>(session, how, Tensors{a, b, c});
    return run<torch_scenarios_test::matmul>(session, how, all.narrow(0, 0, 1), all.narrow(0, 2, 1))
        .sum();
  });
}

TEST(AutogradTorchTest, TypesOfNumbers) {  // test_backward_different_dtypes
  const auto a = random_leaf();
  const auto b = torch::rand({3, 3}, torch::kDouble).requires_grad_(true);
  expect_as_here({a, b}, [&](const Session& session, How how) {
    return run<torch_scenarios_test::add>(session, how, a, b).sum();
  });
}

TEST(AutogradTorchTest, LongFunctions) {  // test_backward_complex_python_udf
  const auto a = random_leaf(), b = random_leaf();
  expect_as_here({a, b}, [&](const Session& session, How how) {
    return run<torch_scenarios_test::linear_layers>(session, how, a, b).sum();
  });
}

TEST(AutogradTorchTest, NestedFunctions) {  // test_backwards_nested_python_udf
  const auto a = random_leaf(), b = random_leaf();
  expect_as_here({a, b}, [&](const Session& session, How how) {
    const std::string to = how == How::kHere ? "" : "worker0";
    return run<torch_scenarios_test::all_of>(session, how, a, b, to).sum();
  });
}

TEST(AutogradTorchTest, WithoutCalls) {  // test_backward_without_rpc
  run_root(1, [](Session& session) {
    for (const Mode mode : kModes) {
      const auto a = random_leaf(), b = random_leaf();
      const Context context(session);
      context.backward({(a + b).sum()}, {.mode = mode});
      EXPECT_EQ(context.gradients().size(), 2U);
      expect_close(context.gradients().at(a), torch::ones({3, 3}));
      expect_close(context.gradients().at(b), torch::ones({3, 3}));
    }
  });
}

TEST(AutogradTorchTest, SomeRequireGrad) {  // test_mixed_requires_grad
  run_root(2, [](Session& session) {
    for (const How how : {How::kCall, How::kReference}) {
      const auto a = random_leaf();
      const auto b = torch::rand({3, 3});
      const Context context(session);
      context.backward({run<minus_or_times>(session, how, a, b).sum()});
      EXPECT_EQ(context.gradients().size(), 1U);
      expect_close(context.gradients().at(a), b);
    }
  });
}

TEST(AutogradTorchTest, GradIsUntouched) {  // test_backward_no_grad_on_tensor
  run_root(2, [](Session& session) {
    const auto a = random_leaf(), b = random_leaf();
    const Context context(session);
    const auto loss = session.rpc_sync<torch_scenarios_test::add>(1, a, b).sum();
    context.backward({loss}, {.retain_graph = true});
    EXPECT_FALSE(a.grad().defined());
    EXPECT_FALSE(b.grad().defined());
    (a + b).sum().backward();
    const void* const kept = a.grad().unsafeGetTensorImpl();
    context.backward({loss});
    EXPECT_EQ(a.grad().unsafeGetTensorImpl(), kept);
    expect_close(a.grad(), torch::ones({3, 3}));
    expect_close(context.gradients().at(a), torch::full({3, 3}, 2.0));
  });
}

TEST(AutogradTorchTest, OnlyTheResultRequiresGrad) {  // test_grad_only_on_return_value, ..._remote
  parameter();
  run_root(2, [](Session& session) {
    for (const Mode mode : kModes) {
      for (const How how : {How::kCall, How::kReference}) {
        const Context context(session);
        context.backward({run<get_parameter>(session, how).sum()}, {.mode = mode});
        const auto there = session.rpc_sync<gradients_here>(1);
        ASSERT_EQ(there.size(), 2U);
        expect_close(there[0], parameter().detach());
        expect_close(there[1], torch::ones({3, 3}));
        EXPECT_TRUE(context.gradients().empty());
      }
    }
  });
}

TEST(AutogradTorchTest, FiftyErrors) {  // test_multiple_backward_with_errors
  run_root(2, [](Session& session) {
    const auto a = random_leaf(), b = random_leaf();
    const Context context(session);
    const auto loss = session.rpc_sync<may_fail>(1, a, b).sum();
    fails = true;
    for (int i = 0; i < 50; ++i) {
      expect_error(ErrorKind::kRemote, "Simulate error on backward pass",
                   [&] { context.backward({loss}, {.retain_graph = true}); });
    }
    EXPECT_TRUE(context.gradients().empty());
    fails = false;
    for (int i = 0; i < 50; ++i) context.backward({loss}, {.retain_graph = true});
    (50 * may_fail(a, b)).sum().backward();
    EXPECT_TRUE(at::allclose(context.gradients().at(a), a.grad(), 1e-4));
    EXPECT_TRUE(at::allclose(context.gradients().at(b), b.grad(), 1e-4));
  });
}

TEST(AutogradTorchTest, NestedPassesAddUp) {  // test_nested_backward_accumulate_grads
  run_root(3, [](Session& session) {
    const auto a = random_leaf(), b = random_leaf();
    const Context context(session);
    const auto loss = session.rpc_sync<add_behind>(1, "worker2", a, b).sum();
    context.backward({loss}, {.retain_graph = true});
    context.backward({loss});
    expect_close(context.gradients().at(a), torch::full({3, 3}, 2.0));
  });
}

TEST(AutogradTorchTest, SparseRowsAddUp) {  // test_embedding_bag_with_no_grad_tensors
  run_root(2, [](Session& session) {
    const auto rows = torch::tensor({1, 2, 4, 5, 4, 3, 2, 9});
    const auto offsets = torch::tensor({0, 4});
    const auto weights = torch::rand({8}).requires_grad_(true);
    const auto here = session.rref(make_table());
    for (int i = 0; i < 2; ++i) bag_of(here, rows, offsets, weights).sum().backward();
    const auto there = session.remote<make_table>(1);
    const Context context(session);
    const auto loss = session.rpc_sync<bag_of>(1, there, rows, offsets, weights).sum();
    context.backward({loss}, {.retain_graph = true});
    context.backward({loss});
    const auto got = session.rpc_sync<gradients_here>(1);
    ASSERT_EQ(got.size(), 2U);
    ASSERT_TRUE(got[1].is_sparse());
    expect_close(got[1].to_dense(), here.local_value().grad().to_dense());
    expect_close(context.gradients().at(weights), weights.grad());
  });
}

// Leaves, messages and gradients that are sparse. test_backward_simple_sparse, ..._self_sparse,
// test_multiple_backward_sparse, test_no_graph_with_tensors_not_require_grad_sparse
TEST(AutogradTorchTest, SparseTensors) {
  const auto sparse = [](bool with_grad) {
    return at::sparse_coo_tensor(torch::tensor({{0, 1, 1}, {2, 0, 2}}),
                                 torch::tensor({3.2, 4.1, 5.3}), {3, 3})
        .requires_grad_(with_grad);
  };
  run_root(2, [&](Session& session) {
    for (const Mode mode : kModes) {
      for (const int to : {0, 1}) {
        const auto a = sparse(true), b = sparse(true);
        const Context context(session);
        const auto loss = at::_sparse_sum(session.rpc_sync<torch_scenarios_test::add>(to, a, b));
        for (int i = 0; i < 3; ++i) context.backward({loss}, {.mode = mode, .retain_graph = true});
        const auto wanted = torch::tensor({{0, 0, 3}, {3, 0, 3}, {0, 0, 0}}, torch::kFloat);
        for (const at::Tensor& each : {a, b}) {
          ASSERT_TRUE(context.gradients().at(each).is_sparse());
          expect_close(context.gradients().at(each).to_dense(), wanted);
        }
      }
    }
    const Context context(session);
    session.rpc_sync<torch_scenarios_test::add>(1, sparse(false), sparse(false));
    EXPECT_TRUE(context.info().sends.empty());
  });
}

// test_graph_for_builtin_remote_call, test_graph_for_py_nested_remote_call, ..._itself,
// test_no_graph_with_tensors_not_require_grad_remote, test_remote_complex_args
TEST(AutogradTorchTest, GraphsOfReferences) {
  run_root(3, [](Session& session) {
    const auto a = random_leaf(), b = random_leaf();
    const auto count = [](const ContextRef& context) {
      const auto info = context.info();
      return std::vector{info.sends.size(), info.recvs.size()};
    };
    using Counts = std::vector<std::size_t>;
    {
      const Context context(session);
      session.remote<torch_scenarios_test::add>(1, a, b).to_here();
      EXPECT_EQ(count(context), (Counts{1, 1}));
      EXPECT_EQ(context.info().known_workers, Way{"worker1"});
    }
    {
      const Context context(session);
      session.remote<add_behind>(1, "worker2", a, b).to_here();
      EXPECT_EQ(count(context), (Counts{1, 1}));
    }
    {
      const Context context(session);
      session.remote<add_behind>(1, "worker0", a, b).to_here();
      EXPECT_EQ(count(context), (Counts{2, 2}));
    }
    {
      const Context context(session);
      session.remote<torch_scenarios_test::add>(1, a.detach(), b.detach()).to_here();
      EXPECT_EQ(count(context), (Counts{0, 0}));
      EXPECT_TRUE(session.rpc_sync<has_context>(1, context.id()));
    }
    Tensors tensors;
    for (int i = 0; i < 10; ++i) {
      tensors.push_back(torch::ones({3, 3}).requires_grad_(i % 2 == 0));
    }
    const Context context(session);
    const auto got = session.remote<torch_scenarios_test::stack>(1, tensors).to_here();
    EXPECT_TRUE(at::equal(got, torch::stack(tensors)));
    EXPECT_EQ(context.info().sends.at(0).tensors, 5U);
  });
}

TEST(AutogradTorchTest, WorkersAreKnown) {  // test_worker_ids_recorded
  run_root(4, [](Session& session) {
    const Way others{"worker1", "worker2", "worker3"};
    for (const bool with_grad : {false, true}) {
      const Context context(session);
      const auto t = torch::ones({3, 3}).requires_grad_(with_grad);
      for (const std::string& each : others) {
        session.rpc_sync<torch_scenarios_test::add>(each, t, t);
      }
      EXPECT_EQ(context.info().known_workers, others);
    }
  });
}

TEST(AutogradTorchTest, ErrorsOfCalls) {  // test_error_in_context
  run_root(2, [](Session& session) {
    const Context context(session);
    expect_error(ErrorKind::kRemote, "", [&] {
      session.rpc_sync<torch_scenarios_test::matmul>(1, random_leaf(), random_leaf({6, 6}));
    });
    EXPECT_EQ(current().id(), context.id());
  });
}

// 20 threads of each of the others train with worker0. test_async_dist_autograd
TEST(AutogradTorchTest, PassesOfAllWorkers) {
  run_all(4, [](Session& session, int rank) {
    if (rank == 0) return;
    std::vector<std::thread> threads;
    for (int i = 0; i < 20; ++i) {
      threads.emplace_back([&session] {
        const auto a = random_leaf(), b = random_leaf();
        const auto train = [&](How how) {
          const auto call = [&]<auto Function>(const at::Tensor& x, const at::Tensor& y) {
            return how == How::kHere ? Function(x, y) : session.rpc_sync<Function>(0, x, y);
          };
          const auto c = call.operator()<torch_scenarios_test::add>(a, b);
          const auto d = call.operator()<test::mul>(b, c);
          const auto e = call.operator()<torch_scenarios_test::matmul>(c, d);
          return call.operator()<torch_scenarios_test::add>(d, e).sum();
        };
        train(How::kHere).backward();
        const Context context(session);
        context.backward({train(How::kCall)});
        EXPECT_TRUE(at::allclose(context.gradients().at(a), a.grad(), 1e-4));
        EXPECT_TRUE(at::allclose(context.gradients().at(b), b.grad(), 1e-4));
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

// The context ends when the pass has just begun. test_clean_context_during_backward
TEST(AutogradTorchTest, AContextEndsInAPass) {
  run_all(4, [](Session& session, int rank) {
    const auto x = random_leaf();
    Signal begun, ended;
    std::optional<Context> context(std::in_place, session);
    at::Tensor y = x;
    for (int i = 0; i < 100; ++i) {
      y = session.rpc_sync<torch_scenarios_test::add>((rank + 1) % 4, y, y) * 0.5;
    }
    EXPECT_EQ(context->info().sends.size(), 100U);
    y.register_hook([&](const at::Tensor& g) {
      begun.set(true);
      EXPECT_TRUE(ended.wait());
      return g * 1;
    });
    std::thread root([&session, loss = y.sum(), id = context->id()] {
      expect_error(ErrorKind::kCancelled, "its context was released",
                   [&] { find(session, id).backward({loss}); });
    });
    EXPECT_TRUE(begun.wait());
    context.reset();
    ended.set(true);
    root.join();
  });
}

}  // namespace
}  // namespace convoy::autograd::torch_scenarios_test
