// What users do with tensors, hooks and passes beside what PyTorch's scenarios do.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "support.h"

namespace convoy::autograd::uses_test {

using namespace test;
using namespace std::chrono_literals;

// Sums of all that came, each in its own way: what is not used has no gradient.
at::Tensor mix(const Tensors& tensors) {
  at::Tensor sum = torch::zeros({});
  for (std::size_t i = 0; i < tensors.size(); i += 3) {
    sum = sum + (tensors[i] * static_cast<double>(i + 1)).sum();
  }
  return sum;
}
CONVOY_RPC(mix);
Tensors same(const Tensors& tensors) { return tensors; }
CONVOY_RPC(same);
at::Tensor deeper(const Way& way, const at::Tensor& x) {
  if (way.empty()) return x * 2;
  return rpc::current().session().rpc_sync<deeper>(way[0], Way(way.begin() + 1, way.end()), x);
}
CONVOY_RPC(deeper);

Signal& opened() {
  static Signal one;
  return one;
}
Signal& continued() {
  static Signal one;
  return one;
}
at::Tensor square_when_opened(const at::Tensor& x) {
  EXPECT_TRUE(opened().wait());
  return x * x;
}
CONVOY_RPC(square_when_opened);
// Answers when the continuation of the other one has run.
void open_and_wait() {
  opened().set(true);
  EXPECT_TRUE(continued().wait());
}
CONVOY_RPC(open_and_wait);

rpc::Future<at::Tensor> backward_in_continuation(const std::string& to, const at::Tensor& x) {
  return rpc::current().session().rpc_async<square>(to, x).then([](const at::Tensor& t) {
    EXPECT_TRUE(at::GradMode::is_enabled());
    current().backward({t.sum()}, {.timeout = 20s});
    return t.detach();
  });
}
CONVOY_RPC(backward_in_continuation);

// A parameter of worker1's (workers are threads here), whose hook may throw.
std::atomic<bool> throws{false};
at::Tensor& hooked() {
  static at::Tensor one = [] {
    at::Tensor made = leaf(2);
    made.register_hook([](const at::Tensor& g) {
      if (throws) throw std::runtime_error("a hook that throws");
      return g * 3;
    });
    return made;
  }();
  return one;
}
at::Tensor times_hooked(const at::Tensor& x) { return x * hooked(); }
CONVOY_RPC(times_hooked);
std::size_t gradients_here(ContextId id) {
  return find(rpc::current().session(), id).gradients().size();
}
CONVOY_RPC(gradients_here);

namespace {

// The real part: a loss is a real number.
at::Tensor loss_of(const at::Tensor& t) { return t.is_complex() ? at::real(t).sum() : t.sum(); }

TEST(AutogradUseTest, KindsOfTensors) {
  run_root(2, [](Session& session) {
    for (const auto type : {torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kComplexFloat}) {
      const auto x = torch::full({4}, 1.5, type).requires_grad_(true);
      const Context context(session);
      context.backward({loss_of(session.rpc_sync<square>("worker1", x))});
      const auto gradient = context.gradients().at(x);
      EXPECT_EQ(gradient.scalar_type(), type);
      expect_close(gradient, torch::full({4}, 3.0, type));
    }
    const auto x = random_leaf({4, 6});
    const Tensors kinds = {
        x.t(), x.slice(1, 1, 6, 2), x[0][0], x.slice(0, 0, 0), x[1].expand({3, 6}), x.unsqueeze(0)};
    for (const at::Tensor& y : kinds) {
      const Context context(session);
      context.backward({session.rpc_sync<square>("worker1", y).sum()}, {.retain_graph = true});
      y.square().sum().backward({}, /*retain_graph=*/true);
      expect_close(context.gradients().at(x), x.grad());
      x.mutable_grad().reset();
    }
  });
}

// More than a lineage has room for, with and without gradients, some of them twice.
TEST(AutogradUseTest, ManyTensorsInAMessage) {
  run_root(2, [](Session& session) {
    Tensors tensors;
    for (int i = 0; i < 100; ++i) {
      tensors.push_back(i % 7 == 0 ? torch::ones({2}) : random_leaf({2}));
    }
    tensors[99] = tensors[3];
    for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
      const Context context(session);
      const auto back = session.rpc_sync<same>("worker1", tensors);
      context.backward({session.rpc_sync<mix>("worker1", back)}, {.mode = mode});
      mix(tensors).backward();
      const auto gradients = context.gradients();
      for (const at::Tensor& each : tensors) {
        if (!each.requires_grad()) continue;
        if (each.grad().defined()) {
          expect_close(gradients.at(each), each.grad());
        } else {
          EXPECT_EQ(gradients.contains(each), mode == Mode::kFast);
        }
      }
      for (const at::Tensor& each : tensors) each.mutable_grad().reset();
    }
  });
}

// A hook that throws ends the pass as a node does; nothing is added anywhere.
TEST(AutogradUseTest, HooksThatThrow) {
  run_root(2, [](Session& session) {
    const auto x = random_leaf();
    bool throws_here = false;
    x.register_hook([&throws_here](const at::Tensor& g) {
      if (throws_here) throw std::runtime_error("one of the root's");
      return g * 1;
    });
    hooked();
    for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
      const Context context(session);
      const auto y = session.rpc_sync<times_hooked>("worker1", x);
      int seen = 0;
      y.register_hook([&](const at::Tensor& g) {
        if (++seen == 1) throw std::runtime_error("of what has come");
        return g * 1;
      });
      const auto loss = y.sum();
      const BackwardOptions options{.mode = mode, .retain_graph = true, .timeout = 20s};
      const auto fails = [&](const char* worker, const char* text) {
        try {
          context.backward({loss}, options);
          ADD_FAILURE() << "it did not fail";
        } catch (const rpc::RemoteError& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kRemote) << error.what();
          EXPECT_EQ(error.worker(), worker) << error.what();
          EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
        }
        EXPECT_TRUE(context.gradients().empty());
        EXPECT_EQ(session.rpc_sync<gradients_here>("worker1", context.id()), 0U);
        EXPECT_EQ(session.rpc_sync<count_passes>("worker1"), 0U);
      };
      fails("worker0", "of what has come");
      throws = true;
      fails("worker1", "a hook that throws");
      throws = false;
      throws_here = true;
      fails("worker0", "one of the root's");
      throws_here = false;
      context.backward({loss}, options);
      expect_close(context.gradients().at(x), hooked().detach());
      EXPECT_EQ(session.rpc_sync<gradients_here>("worker1", context.id()), 1U);
    }
  });
}

// One that is frozen behind the forward pass; ones that are no leaves.
TEST(AutogradUseTest, RequiresGradAndRetainGrad) {
  run_root(2, [](Session& session) {
    for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
      const auto x = random_leaf(), frozen = random_leaf();
      const auto run = [&](auto&& product) {
        const auto sent = x * 2;
        const auto received = product(sent, frozen);
        sent.retain_grad();
        received.retain_grad();
        return std::vector{sent, received, received.square().sum()};
      };
      const auto here = run([](const auto& a, const auto& b) { return a * b; });
      const Context context(session);
      const auto there =
          run([&](const auto& a, const auto& b) { return session.rpc_sync<mul>("worker1", a, b); });
      frozen.set_requires_grad(false);
      here[2].backward();
      context.backward({there[2]}, {.mode = mode});
      EXPECT_FALSE(frozen.grad().defined());
      EXPECT_EQ(context.gradients().size(), 1U);
      expect_close(context.gradients().at(x), x.grad());
      for (const int i : {0, 1}) expect_close(there[i].grad(), here[i].grad());
    }
  });
}

// Whatever the thread that waits is in, a guard or a hook: gradients are on in continuations.
TEST(AutogradUseTest, ContinuationsOfWaitingThreads) {
  run_root(2, [](Session& session) {
    const auto x = random_leaf();
    const Context context(session);
    const auto begin = [&] {
      opened().set(false);
      continued().set(false);
      return session.rpc_async<square_when_opened>("worker1", x).then([](const at::Tensor& t) {
        const auto sum = t.sum();
        continued().set(true);
        return sum;
      });
    };
    const auto wait = [&] { session.rpc_sync<open_and_wait>("worker1"); };
    for (int i = 0; i < 10; ++i) {
      const auto of_guard = begin();
      {
        const torch::NoGradGuard no_grad;
        wait();
      }
      EXPECT_TRUE(of_guard.wait().requires_grad());
      const auto of_hook = begin();
      const auto y = x * 1;
      y.register_hook([&](const at::Tensor& g) {
        wait();
        return g * 1;
      });
      context.backward({y.sum()});
      EXPECT_TRUE(of_hook.wait().requires_grad());
    }
  });
}

// A continuation that runs while this thread waits in a node of a pass: gradients are on in it.
TEST(AutogradUseTest, ContinuationsInPasses) {
  run_root(3,
           [](Session& session) {
             const auto x = random_leaf();
             const Context context(session);
             for (int i = 1; i <= 20; ++i) {
               std::vector<rpc::Future<at::Tensor>> passes;
               for (int k = 0; k < 8; ++k) {
                 passes.push_back(session.rpc_async<backward_in_continuation>(
                     "worker1", k % 2 == 0 ? "worker1" : "worker2", x));
               }
               rpc::wait_all(passes);
               EXPECT_TRUE(at::allclose(context.gradients().at(x), 16.0 * i * x.detach(), 1e-4));
             }
           },
           {.threads = 1});
}

// Calls and passes of a hook are not part of the pass that it runs in.
TEST(AutogradUseTest, HooksThatCall) {
  run_root(2,
           [](Session& session) {
             const auto x = random_leaf();
             const auto other = random_leaf();
             const Context context(session);
             const auto inner = session.rpc_sync<square>("worker1", other).sum();
             x.register_hook([&](const at::Tensor& g) {
               EXPECT_EQ(current().id(), context.id());
               context.backward({inner}, {.retain_graph = true});
               return session.rpc_sync<mul>("worker1", g, torch::full({3, 3}, 2.0));
             });
             context.backward({session.rpc_sync<square>("worker1", x).sum()});
             expect_close(context.gradients().at(x), 4 * x.detach());
             expect_close(context.gradients().at(other), 2 * other.detach());
           },
           {.threads = 1});
}

// The graph of what a worker has received may be used in its own contexts, too.
TEST(AutogradUseTest, ContextsBesideEachOther) {
  run_root(3, [](Session& session) {
    const auto x = random_leaf();
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&session, &x, i] {
        for (int round = 0; round < 20; ++round) {
          const Context context(session);
          const Way way{i % 2 == 0 ? "worker2" : "worker0", "worker1"};
          context.backward({session.rpc_sync<deeper>("worker1", way, x * (i + 1)).sum()},
                           {.deterministic = i % 3 == 0});
          expect_close(context.gradients().at(x), torch::full({3, 3}, 2.0 * (i + 1)));
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_FALSE(x.grad().defined());
  });
}

// Whoever is the root: calls of a deterministic pass must not be nested deeper than it can tell.
TEST(AutogradUseTest, DeterministicPasses) {
  run_root(2, [](Session& session) {
    const auto x = random_leaf({1});
    Way way;
    for (int i = 0; i < 16; ++i) way.push_back(i % 2 == 0 ? "worker0" : "worker1");
    const Context context(session);
    const auto here = session.rpc_sync<deeper>("worker1", way, x);
    const auto there = session.remote<deeper>("worker1", way, x);
    const BackwardOptions options{.retain_graph = true, .deterministic = true};
    expect_error(ErrorKind::kUnsupported, "nested too deep",
                 [&] { context.backward({here}, options); });
    expect_error(ErrorKind::kUnsupported, "nested too deep",
                 [&] { there.backward(context, options); });
    EXPECT_TRUE(context.gradients().empty());
    context.backward({here});
    there.backward(context);
    expect_close(context.gradients().at(x), torch::full({1}, 4.0));
  });
}

}  // namespace
}  // namespace convoy::autograd::uses_test
