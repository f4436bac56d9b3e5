// Backward passes across workers: what FAST mode gets wrong, and the scenarios of PyTorch's
// dist_autograd_test.py, whose names stand behind them.
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "support.h"

namespace convoy::autograd::scenarios_test {

using namespace test;
using namespace std::chrono_literals;

// --- What workers call ------------------------------------------------------------------------

at::Tensor my_add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
CONVOY_RPC(my_add);
at::Tensor scale(const at::Tensor& a, double by) { return a * by; }
CONVOY_RPC(scale);
at::Tensor my_matmul(const at::Tensor& a, const at::Tensor& b) { return a.matmul(b); }
CONVOY_RPC(my_matmul);
double log_norm(const at::Tensor& t) { return t.norm().log().item<double>(); }
CONVOY_RPC(log_norm);
at::Tensor first(const at::Tensor& a, const at::Tensor&) { return a * 2; }
CONVOY_RPC(first);

int my_rank() { return rpc::current().session().worker_info().rank; }

// Each worker (they are threads here) has a parameter.
at::Tensor& weight(int rank) {
  static std::mutex mutex;
  static std::map<int, at::Tensor> all;
  const std::lock_guard lock(mutex);
  auto& one = all[rank];
  if (!one.defined()) one = torch::full({3, 3}, rank + 1.0).requires_grad_(true);
  return one;
}
at::Tensor expert(const at::Tensor& x) { return x * weight(my_rank()); }
CONVOY_RPC(expert);
at::Tensor fetch_weight() { return weight(my_rank()); }
CONVOY_RPC(fetch_weight);

// Of the context there: the gradient of the parameter, or nothing.
at::Tensor weight_gradient() {
  const auto gradients = current().gradients();
  const at::Tensor& w = weight(my_rank());
  return gradients.contains(w) ? gradients.at(w).detach().clone() : at::Tensor();
}
CONVOY_RPC(weight_gradient);
std::size_t count_gradients(ContextId id) {
  return find(rpc::current().session(), id).gradients().size();
}
CONVOY_RPC(count_gradients);
// How many messages of backward passes have come here.
std::uint64_t backward_messages() {
  std::uint64_t count = 0;
  for (const auto& each : rpc::current().session().stats().functions) {
    if (each.function.ends_with("::expand") || each.function.ends_with("::take_gradient")) {
      count += each.served;
    }
  }
  return count;
}
CONVOY_RPC(backward_messages);

Signal& gate() {
  static Signal one;
  return one;
}
at::Tensor slow_mul(const at::Tensor& a, const at::Tensor& b) {
  gate().wait();
  return a * b;
}
CONVOY_RPC(slow_mul);

// Calls the next worker and drops the result.
at::Tensor drops_nested(const at::Tensor& x) {
  rpc::current().session().rpc_sync<expert>("worker2", x);
  return x * 2;
}
CONVOY_RPC(drops_nested);
// B.h of the cycle: y only, or y + z.
at::Tensor cycle(const at::Tensor& x, bool both) {
  const at::Tensor y = x * 2;
  const at::Tensor z = rpc::current().session().rpc_sync<square>("worker0", y);
  return both ? y + z : y;
}
CONVOY_RPC(cycle);
std::vector<at::Tensor> two_results(const at::Tensor& x) {
  const auto session = rpc::current().session();
  return {x * 2, session.rpc_sync<expert>("worker2", x * 3)};
}
CONVOY_RPC(two_results);

// A function whose backward fails as long as it is told to.
std::atomic<bool> fails{false};
struct Failing : torch::autograd::Function<Failing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    if (fails) throw std::runtime_error("Simulate error on backward pass");
    return gradients;
  }
};
at::Tensor failing(const at::Tensor& x) { return Failing::apply(x * weight(my_rank())); }
CONVOY_RPC(failing);
namespace {

// Each worker has its parameter before any begins.
void run_weighted(int n, const std::function<void(Session&)>& function) {
  for (int rank = 0; rank < n; ++rank) weight(rank);
  test::run_root(n, function);
}

// The pass fails at its deadline because a send waits for ever.
void expect_unanswered(const ContextRef& context, const at::Tensor& loss,
                       const std::string& named) {
  expect_error(ErrorKind::kTimeout, named, [&] {
    context.backward({loss}, {.mode = Mode::kFast, .retain_graph = true, .timeout = 150ms});
  });
  EXPECT_TRUE(context.gradients().empty());
}

// --- Section 3.8: SMART succeeds; FAST fails by name, or finishes with zeros ---------------------

TEST(SmartTest, S01UnusedResult) {  // test_backward_unused_send_function
  run_weighted(2, [](Session& session) {
    const auto t1 = random_leaf();
    const auto t2 = random_leaf();
    const Context context(session);
    session.rpc_sync<my_add>("worker1", t1, t2);
    const auto loss = (t1 * t2).sum();
    expect_unanswered(context, loss, "my_add");
    context.backward({loss});
    EXPECT_EQ(context.gradients().size(), 2U);
    expect_close(context.gradients().at(t1), t2);
    expect_close(context.gradients().at(t2), t1);
    EXPECT_FALSE(t1.grad().defined());
    EXPECT_EQ(session.rpc_sync<backward_messages>("worker1"), 0U);
  });
}

TEST(SmartTest, S02LogCall) {
  run_weighted(2, [](Session& session) {
    const auto x = random_leaf();
    const auto w = random_leaf();
    const Context context(session);
    const auto h = x * w;
    session.rpc_sync<log_norm>("worker1", h);
    const auto loss = h.sum();
    expect_unanswered(context, loss, "log_norm");
    context.backward({loss});
    expect_close(context.gradients().at(x), w);
    expect_close(context.gradients().at(w), x);
    EXPECT_EQ(session.rpc_sync<backward_messages>("worker1"), 0U);
  });
}

TEST(SmartTest, S03DetachedReply) {
  run_weighted(2, [](Session& session) {
    const auto x = random_leaf();
    const auto w = random_leaf();
    const auto y = random_leaf();
    const Context context(session);
    const auto r = session.rpc_sync<mul>("worker1", x, w);
    const auto loss = (r.detach() * y).sum();
    expect_unanswered(context, loss, "mul");
    context.backward({loss});
    EXPECT_EQ(context.gradients().size(), 1U);
    expect_close(context.gradients().at(y), r.detach());
  });
}

TEST(SmartTest, S04FailedCallWithFallback) {
  run_weighted(2, [](Session& session) {
    const auto x = random_leaf();
    const auto w = random_leaf();
    const Context context(session);
    const auto wrong = torch::ones({6, 6}).requires_grad_(true);
    EXPECT_THROW(session.rpc_sync<my_matmul>("worker1", x, wrong), rpc::RemoteError);
    const auto loss = x.matmul(w).sum();
    expect_unanswered(context, loss, "my_matmul");
    context.backward({loss});
    expect_close(context.gradients().at(x), torch::ones({3, 3}).matmul(w.t()));
    expect_close(context.gradients().at(w), x.t().matmul(torch::ones({3, 3})));
  });
}

TEST(SmartTest, S05TimedOutCallRepeated) {
  run_weighted(2, [](Session& session) {
    const auto x = random_leaf();
    const auto w = random_leaf();
    gate().set(false);
    const Context context(session);
    expect_error(ErrorKind::kTimeout, "",
                 [&] { session.to("worker1", {.timeout = 20ms}).rpc_sync<slow_mul>(x, w); });
    gate().set(true);
    const auto loss = session.rpc_sync<slow_mul>("worker1", x, w).sum();
    expect_unanswered(context, loss, "slow_mul");
    context.backward({loss});
    expect_close(context.gradients().at(x), w);
    expect_close(context.gradients().at(w), x);
  });
}

TEST(SmartTest, S06TwoLossesOneContext) {
  run_weighted(3, [](Session& session) {
    const auto t1 = leaf();
    const auto t2 = leaf();
    const Context context(session);
    const auto l1 = session.rpc_sync<scale>("worker1", t1, 2).sum();
    const auto l2 = session.rpc_sync<scale>("worker2", t2, 3).sum();
    expect_unanswered(context, l1, "scale");
    context.backward({l1}, {.retain_graph = true});
    EXPECT_EQ(context.gradients().size(), 1U);
    expect_close(context.gradients().at(t1), torch::full({3, 3}, 2.0));
    context.backward({l2});
    EXPECT_EQ(context.gradients().size(), 2U);
    expect_close(context.gradients().at(t1), torch::full({3, 3}, 2.0));
    expect_close(context.gradients().at(t2), torch::full({3, 3}, 3.0));
  });
}

TEST(SmartTest, S07MixtureOfExperts) {
  run_weighted(3, [](Session& session) {
    const auto x = random_leaf();
    const Context context(session);
    const auto of_b = session.rpc_sync<expert>("worker1", x);
    const auto of_c = session.rpc_sync<expert>("worker2", x);
    expect_unanswered(context, of_b.sum(), "expert");
    EXPECT_EQ(session.rpc_sync<backward_messages>("worker2"), 0U);
    context.backward({of_b.sum()});
    expect_close(context.gradients().at(x), weight(1).detach());
    expect_close(session.rpc_sync<weight_gradient>("worker1"), x.detach());
    EXPECT_EQ(session.rpc_sync<count_gradients>("worker2", context.id()), 0U);
    EXPECT_EQ(session.rpc_sync<backward_messages>("worker2"), 0U);
    EXPECT_FALSE(weight(1).grad().defined());
  });
}

TEST(SmartTest, S08NestedCallDiscarded) {
  run_weighted(3, [](Session& session) {
    const auto x = leaf();
    const Context context(session);
    const auto loss = session.rpc_sync<drops_nested>("worker1", x).sum();
    expect_unanswered(context, loss, "worker1 waits for the gradient of its call of");
    const auto before = session.rpc_sync<backward_messages>("worker2");
    context.backward({loss});
    expect_close(context.gradients().at(x), torch::full({3, 3}, 2.0));
    EXPECT_EQ(session.rpc_sync<backward_messages>("worker2"), before);
  });
}

TEST(SmartTest, S09CycleWithDeadBranch) {
  run_weighted(2, [](Session& session) {
    const auto x = random_leaf();
    {
      const Context context(session);
      const auto loss = session.rpc_sync<cycle>("worker1", x, false).sum();
      expect_unanswered(context, loss, "square");
      context.backward({loss});
      expect_close(context.gradients().at(x), torch::full({3, 3}, 2.0));
    }
    for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
      const Context context(session);
      const auto loss = session.rpc_sync<cycle>("worker1", x, true).sum();
      context.backward({loss}, {.mode = mode});
      expect_close(context.gradients().at(x), 2 + 8 * x.detach());
    }
  });
}

TEST(SmartTest, S10FetchedTwice) {
  run_weighted(2, [](Session& session) {
    const Context context(session);
    const auto reference = session.remote<fetch_weight>("worker1");
    const auto seen = reference.to_here();
    const auto loss = reference.to_here().sum();
    expect_unanswered(context, loss, "worker1 waits for the gradient of its reply of");
    context.backward({loss});
    expect_close(session.rpc_sync<weight_gradient>("worker1"), torch::ones({3, 3}));
  });
}

TEST(SmartTest, S11FutureNeverAwaited) {
  run_weighted(2, [](Session& session) {
    const auto x = random_leaf();
    const auto w = random_leaf();
    gate().set(false);
    const Context context(session);
    const auto future = session.rpc_async<slow_mul>("worker1", x, w);
    const auto loss = (x * w).sum();
    expect_unanswered(context, loss, "slow_mul");
    context.backward({loss});
    expect_close(context.gradients().at(x), w);
    gate().set(true);
    future.wait();
  });
}

TEST(SmartTest, S12OneTensorOfSeveralUnused) {
  run_weighted(2, [](Session& session) {
    const auto a = leaf();
    const auto b = leaf();
    {
      const Context context(session);
      const auto loss = session.rpc_sync<first>("worker1", a, b).sum();
      context.backward({loss});
      EXPECT_EQ(context.gradients().size(), 1U);
      expect_close(context.gradients().at(a), torch::full({3, 3}, 2.0));
    }
    const Context context(session);
    const auto loss = session.rpc_sync<first>("worker1", a, b).sum();
    context.backward({loss}, {.mode = Mode::kFast});
    expect_close(context.gradients().at(a), torch::full({3, 3}, 2.0));
    expect_close(context.gradients().at(b), torch::zeros({3, 3}));
  });
}

TEST(SmartTest, S13PartOfSeveralResults) {
  run_weighted(3, [](Session& session) {
    const auto x = leaf();
    {
      const Context context(session);
      const auto results = session.rpc_sync<two_results>("worker1", x);
      context.backward({results[0].sum()});
      expect_close(context.gradients().at(x), torch::full({3, 3}, 2.0));
      EXPECT_EQ(session.rpc_sync<backward_messages>("worker2"), 0U);
      EXPECT_EQ(session.rpc_sync<count_gradients>("worker2", context.id()), 0U);
    }
    const Context context(session);
    const auto results = session.rpc_sync<two_results>("worker1", x);
    context.backward({results[0].sum()}, {.mode = Mode::kFast});
    expect_close(context.gradients().at(x), torch::full({3, 3}, 2.0));
    EXPECT_GT(session.rpc_sync<backward_messages>("worker2"), 0U);
    EXPECT_EQ(session.rpc_sync<count_gradients>("worker2", context.id()), 1U);
  });
}

TEST(SmartTest, S14AfterAnError) {
  run_weighted(3, [](Session& session) {
    const auto x = random_leaf();
    const Context context(session);
    const auto loss =
        session.rpc_sync<failing>("worker2", session.rpc_sync<expert>("worker1", x)).sum();
    fails = true;
    try {
      context.backward({loss}, {.retain_graph = true});
      ADD_FAILURE() << "it did not fail";
    } catch (const rpc::RemoteError& error) {
      EXPECT_EQ(error.worker(), "worker2");
      EXPECT_EQ(error.kind(), ErrorKind::kRemote);
      EXPECT_NE(std::string(error.what()).find("Error on Node 2: Simulate error on backward pass"),
                std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("Failing"), std::string::npos) << error.what();
    }
    fails = false;
    EXPECT_TRUE(context.gradients().empty());
    EXPECT_FALSE(session.rpc_sync<weight_gradient>("worker1").defined());
    context.backward({loss});
    expect_close(context.gradients().at(x), (weight(1) * weight(2)).detach());
    expect_close(session.rpc_sync<weight_gradient>("worker1"), (x * weight(2)).detach());
    expect_close(session.rpc_sync<weight_gradient>("worker2"), (x * weight(1)).detach());
  });
}

}  // namespace
}  // namespace convoy::autograd::scenarios_test
