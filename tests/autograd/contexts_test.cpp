// Contexts and passes: the scenarios of PyTorch's dist_autograd_test.py, whose names stand behind
// them, and what PyTorch does not have.
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "autograd/nodes.h"
#include "autograd/registry.h"
#include "base/concat.h"
#include "support.h"

namespace convoy::autograd::contexts_test {

using namespace test;
using namespace std::chrono_literals;

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
CONVOY_RPC(add);
int add_numbers(int a, int b) { return a + b; }
CONVOY_RPC(add_numbers);
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

// {sends, recvs} of the current context there.
std::vector<std::uint64_t> graph_sizes(ContextId id) {
  const auto info = find(rpc::current().session(), id).info();
  return {info.sends.size(), info.recvs.size()};
}
CONVOY_RPC(graph_sizes);
// What the one send there leads to: a node, and tensors of messages behind it; nodes of these are
// numbered as they are met.
std::string graph_there(ContextId id) {
  const auto context = detail::Registry::here().find(id);
  const auto node = context->all_sent().at(0)->edges.at(0).function;
  std::vector<const torch::autograd::Node*> recvs;
  std::string text = node->name() + ":";
  for (const auto& edge : node->next_edges()) {
    if (!detail::as_recv(*edge.function)) return text + " something else";
    if (std::find(recvs.begin(), recvs.end(), edge.function.get()) == recvs.end()) {
      recvs.push_back(edge.function.get());
    }
    text += concat(edge.input_nr == 0 ? " recv " : ", recv ", edge.input_nr, " of ", recvs.size());
  }
  return text;
}
CONVOY_RPC(graph_there);
Future<at::Tensor> by_coroutine(std::string to, const at::Tensor& a) {
  const auto session = rpc::current().session();
  at::Tensor t = co_await session.rpc_async<square>(to, a);
  t = co_await session.rpc_async<square>(to, t);
  co_return t;
}
CONVOY_RPC(by_coroutine);
Future<at::Tensor> by_callback(const std::string& to, const at::Tensor& a) {
  const auto session = rpc::current().session();
  return session.rpc_async<square>(to, a).then(
      [session, to](const at::Tensor& t) { return session.rpc_async<square>(to, t); });
}
CONVOY_RPC(by_callback);
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
// A node whose name has what means something in Graphviz.
struct Quoted : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  std::string name() const override { return R"(a "quoted" name \)"; }
};
at::Tensor quoted(const at::Tensor& x) {
  const auto node = c10::make_intrusive<Quoted>();
  node->add_next_edge(torch::autograd::impl::gradient_edge(x));
  at::Tensor y = x.detach().clone();
  torch::autograd::create_gradient_edge(y, node);
  return y;
}
CONVOY_RPC(quoted);
bool nested_context_throws() {
  try {
    const Context other(rpc::current().session());
    return false;
  } catch (const Error&) {
    return true;
  }
}
CONVOY_RPC(nested_context_throws);

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

TEST(AutogradTest, Contexts) {  // test_autograd_context, test_nested_context
  run_all(2, [](Session& session, int rank) {
    ContextId last = 0;
    for (int i = 0; i < 200; ++i) {
      const Context context(session);
      EXPECT_EQ(context.id() >> 48, static_cast<std::uint64_t>(rank));
      EXPECT_LE(context.id(), (static_cast<std::uint64_t>(rank) << 48) + 281474976710655);
      EXPECT_EQ(find(session, context.id()).id(), context.id());
      EXPECT_EQ(current().id(), context.id());
      EXPECT_NE(context.id(), last);
      last = context.id();
      expect_error(ErrorKind::kInvalidArgument, "Already have autograd context id for this thread",
                   [&] { const Context nested(session); });
    }
    EXPECT_FALSE(has_current());
    expect_error(ErrorKind::kInvalidArgument, "Could not find autograd context with id",
                 [&] { find(session, last); });
    expect_error(ErrorKind::kInvalidArgument, "doesn't have a valid autograd context",
                 [] { current(); });
  });
}

TEST(AutogradTest, Graphs) {  // test_graph_for_builtin_call, ..._nested_call, ..._itself
  run_root(4, [](Session& session) {
    const auto t1 = random_leaf();
    const auto t2 = random_leaf();
    using Sizes = std::vector<std::uint64_t>;
    {
      const Context context(session);
      session.rpc_sync<add>("worker1", t1, t2);
      const auto info = context.info();
      ASSERT_EQ(info.sends.size(), 1U);
      ASSERT_EQ(info.recvs.size(), 1U);
      EXPECT_EQ(info.sends[0].tensors, 2U);
      EXPECT_EQ(info.sends[0].peer, "worker1");
      EXPECT_TRUE(info.recvs[0].reply);
      EXPECT_EQ(info.known_workers, Way{"worker1"});
      const auto text = context.dump();
      EXPECT_NE(text.find("add: torch::autograd::AccumulateGrad torch::autograd::AccumulateGrad"),
                std::string::npos)
          << text;
      EXPECT_NE(text.find("add: AddBackward0"), std::string::npos) << text;
      EXPECT_NE(context.dump(DumpFormat::kGraphviz).find("recv_"), std::string::npos);
      EXPECT_EQ(session.rpc_sync<graph_sizes>("worker1", context.id()), (Sizes{1, 1}));
      EXPECT_EQ(session.rpc_sync<graph_there>("worker1", context.id()),
                "AddBackward0: recv 0 of 1, recv 1 of 1");
    }
    {
      const Context context(session);
      session.rpc_sync<nested_add>("worker1", Way{"worker2", "worker3"}, t1, t2);
      EXPECT_EQ(session.rpc_sync<graph_sizes>("worker1", context.id()), (Sizes{2, 2}));
      EXPECT_EQ(session.rpc_sync<graph_sizes>("worker2", context.id()), (Sizes{2, 2}));
      EXPECT_EQ(session.rpc_sync<graph_sizes>("worker3", context.id()), (Sizes{1, 1}));
    }
    const Context context(session);
    session.rpc_sync<nested_add>("worker1", Way{"worker0"}, t1, t2);
    EXPECT_EQ(context.info().sends.size(), 2U);
    EXPECT_EQ(context.info().recvs.size(), 2U);
  });
}

TEST(AutogradTest, ComplexArguments) {  // test_rpc_complex_args, test_no_graph_...
  run_root(2, [](Session& session) {
    Tensors tensors;
    for (int i = 0; i < 10; ++i) {
      tensors.push_back(torch::ones({3, 3}));
      tensors.back().set_requires_grad(i % 2 == 0);
    }
    {
      const Context context(session);
      const auto result = session.rpc_sync<stack>("worker1", tensors);
      EXPECT_TRUE(result.equal(torch::stack(tensors)));
      EXPECT_EQ(context.info().sends[0].tensors, 5U);
      EXPECT_EQ(context.info().known_workers, Way{"worker1"});
    }
    const Context context(session);
    session.rpc_sync<add>("worker1", tensors[1], tensors[3]);
    EXPECT_TRUE(context.info().sends.empty());
    EXPECT_TRUE(context.info().recvs.empty());
    EXPECT_TRUE(session.rpc_sync<has_context>("worker1", context.id()));
  });
}

// The function makes calls in a context, which is everywhere then, and nowhere soon after its end.
void expect_goes_everywhere(const std::function<void(const Session&)>& function) {
  run_root(4, [&](Session& session) {
    ContextId id = 0;
    {
      const Context context(session);
      id = context.id();
      function(session);
      for (const int worker : {1, 2, 3}) {
        EXPECT_TRUE(session.rpc_sync<has_context>(worker, id));
      }
    }
    expect_error(ErrorKind::kInvalidArgument, "Could not find autograd context with id",
                 [&] { find(session, id); });
    const auto deadline = Deadline::after(10s);
    for (const int worker : {1, 2, 3}) {
      while (session.rpc_sync<has_context>(worker, id) && !deadline.expired()) {
      }
      EXPECT_FALSE(session.rpc_sync<has_context>(worker, id));
      EXPECT_EQ(session.rpc_sync<count_contexts>(worker), 0U);
    }
  });
}

TEST(AutogradTest, ContextsGoWithNestedCalls) {  // test_context_cleanup_nested_rpc
  expect_goes_everywhere([](const Session& session) {
    session.rpc_sync<nested_add>("worker1", Way{"worker2", "worker3"}, random_leaf(),
                                 random_leaf());
  });
}

TEST(AutogradTest, ContextsGoWithTensors) {  // test_context_cleanup_tensor_with_grad, ..._no_grad
  for (const bool with_grad : {true, false}) {
    expect_goes_everywhere([with_grad](const Session& session) {
      const auto t = torch::ones({3, 3}).requires_grad_(with_grad);
      for (const int worker : {1, 2, 3}) {
        EXPECT_EQ(session.rpc_sync<add>(worker, t, t).requires_grad(), with_grad);
      }
    });
  }
}

TEST(AutogradTest, ContextsGoWithoutTensors) {  // test_context_cleanup_no_tensors
  expect_goes_everywhere([](const Session& session) {
    for (const int worker : {1, 2, 3}) EXPECT_EQ(session.rpc_sync<add_numbers>(worker, 1, 1), 2);
  });
}

enum class How { kSync, kAsync, kRemote };

// test_backward_simple, ..._self; ..._script_call is not applicable: there is no TorchScript
TEST(AutogradTest, Simple) {
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

TEST(AutogradTest, MultipleRoundTrips) {  // test_backward_multiple_round_trips
  run_root(4, [](Session& session) {
    const auto t1 = random_leaf();
    const auto t2 = torch::rand({3, 3});
    const auto t3 = random_leaf();
    const auto t4 = random_leaf({3, 3});
    const auto t5 = torch::rand({3, 3});
    const auto run = [&](const Session* where) {
      const auto a = call<contexts_test::add>(where, 1, t1, t2);
      const auto b = call<contexts_test::mul>(where, 2, t3, t4);
      const auto c = call<contexts_test::stack>(where, 3, Tensors{a, b});
      const auto d = call<contexts_test::stack>(where, 1, Tensors{b, t5});
      const auto e = call<contexts_test::bmm>(where, 2, c, d);
      return call<contexts_test::matmul>(where, 3, e, c).sum();
    };
    for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
      const Context context(session);
      context.backward({run(&session)}, {.mode = mode});
      EXPECT_EQ(context.gradients().size(), 3U);
      expect_as_local(context, run(nullptr), {t1, t3, t4});
    }
  });
}

TEST(AutogradTest, EngineError) {  // test_backward_autograd_engine_error
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

TEST(AutogradTest, InvalidArguments) {  // test_backward_invalid_args, ..._without_context
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

TEST(AutogradTest, MultipleRoots) {  // test_backward_multiple_roots
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

TEST(AutogradTest, GivenGradients) {
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

TEST(AutogradTest, PassesAddUp) {  // test_backward_accumulate_grads, test_multiple_backward
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

TEST(AutogradTest, Hooks) {  // test_backward_verify_hooks, test_post_hooks
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
TEST(AutogradTest, HooksInOrder) {
  run_root(2, [](Session& session) {
    const auto t1 = random_leaf();
    const auto t2 = random_leaf();
    const auto add_hooks = [](const at::Tensor& t) {
      t.register_hook([](const at::Tensor& g) { return g * 2; });
      t.register_hook([](const at::Tensor& g) { return g + 3; });
    };
    add_hooks(t1);
    const auto run = [&](const Session* where) {
      const auto received = call<contexts_test::mul>(where, 1, t1, t2);
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
TEST(AutogradTest, GradientsAreNotCopied) {  // test_no_grad_copy
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
TEST(AutogradTest, SparseGradientsAreNotShared) {
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
TEST(AutogradTest, TrainersAndServers) {  // test_trainer_ps, test_debug_info
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

TEST(AutogradTest, CoroutinesAndCallbacksCarryTheContext) {
  run_root(3, [](Session& session) {
    const auto x = random_leaf();
    {
      const Context context(session);
      const auto loss = session.rpc_sync<by_coroutine>("worker1", "worker2", x).sum();
      context.backward({loss});
      expect_close(context.gradients().at(x), 4 * x.detach().pow(3));
    }
    {
      const Context context(session);
      const auto loss = session.rpc_sync<by_callback>("worker1", "worker2", x).sum();
      context.backward({loss});
      expect_close(context.gradients().at(x), 4 * x.detach().pow(3));
    }
    // On this side.
    const Context context(session);
    const auto loss =
        session.rpc_async<square>("worker1", x)
            .then([&](const at::Tensor& t) { return session.rpc_async<square>("worker2", t); })
            .then([](const at::Tensor& t) {
              EXPECT_TRUE(has_current());
              return t.sum();
            })
            .wait();
    context.backward({loss});
    expect_close(context.gradients().at(x), 4 * x.detach().pow(3));
  });
}

TEST(AutogradTest, HandedToAnotherThread) {
  run_root(2, [](Session& session) {
    const auto x = random_leaf();
    const Context context(session);
    at::Tensor y;
    std::thread([&] {
      EXPECT_FALSE(has_current());
      const Scope scope(context);
      y = session.rpc_sync<square>("worker1", x);
    }).join();
    EXPECT_TRUE(session.rpc_sync<nested_context_throws>("worker1"));
    context.backward({y.sum()});
    expect_close(context.gradients().at(x), 2 * x);
  });
}

// A thread has one context, which it may be told of again.
TEST(AutogradTest, TheSameContextAgain) {
  run_root(2, [](Session& session) {
    const auto x = random_leaf();
    const Context context(session);
    const ContextRef same = find(session, context.id());
    at::Tensor y;
    {
      const Scope again(same);
      y = session.rpc_sync<square>("worker1", x);
    }
    EXPECT_EQ(current().id(), context.id());
    context.backward({y.sum()});
    expect_close(context.gradients().at(x), 2 * x);
    std::thread([&] {
      const Context other(session);
      expect_error(ErrorKind::kInvalidArgument, "Already have autograd context id",
                   [&] { const Scope both(same); });
    }).join();
  });
}

TEST(AutogradTest, VeryLongTimeouts) {
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

TEST(AutogradTest, NamesInPictures) {
  run_root(2, [](Session& session) {
    const Context context(session);
    session.rpc_sync<quoted>("worker1", random_leaf());
    const std::string picture = context.dump(DumpFormat::kGraphviz);
    EXPECT_NE(picture.find(R"("a \"quoted\" name \\")"), std::string::npos) << picture;
  });
}

TEST(AutogradTest, ManyPassesOnOneThread) {
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

TEST(AutogradTest, InPlaceViewsAndSparse) {
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

TEST(AutogradTest, AnomalyMode) {
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
TEST(AutogradTest, LocalBackwardIsRefused) {
  run_root(2, [](Session& session) {
    const auto x = random_leaf();
    const Context context(session);
    const auto y = session.rpc_sync<square>("worker1", x).sum();
    EXPECT_THROW(y.backward(), Error);
    context.backward({y});
    expect_close(context.gradients().at(x), 2 * x);
  });
}

TEST(AutogradTest, Events) {  // test_dist_autograd_profiling
  run_root(2, [](Session& session) {
    static std::mutex mutex;
    static std::map<std::string, int> counts;
    counts.clear();
    const auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& event)
                                       -> std::unique_ptr<at::ObserverContext> {
          const std::lock_guard lock(mutex);
          ++counts[event.name()];
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
    const auto x = random_leaf();
    {
      const Context context(session);
      context.backward({session.rpc_sync<square>("worker1", x).sum()});
    }
    at::removeCallback(handle);
    EXPECT_EQ(counts["convoy::autograd::send"], 1);
    EXPECT_EQ(counts["convoy::autograd::recv"], 1);
    EXPECT_EQ(counts["convoy::autograd::backward"], 1);
  });
}

}  // namespace
}  // namespace convoy::autograd::contexts_test
