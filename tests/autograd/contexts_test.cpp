// Contexts: the scenarios of PyTorch's dist_autograd_test.py, whose names stand behind them, and
// what PyTorch does not have.
#include <algorithm>
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
at::Tensor stack(const Tensors& tensors) { return torch::stack(tensors); }
CONVOY_RPC(stack);
at::Tensor nested_add(const Way& way, const at::Tensor& a, const at::Tensor& b) {
  if (way.empty()) return a + b;
  return rpc::current().session().rpc_sync<nested_add>(way[0], Way(way.begin() + 1, way.end()), a,
                                                       b);
}
CONVOY_RPC(nested_add);
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

// Many at once, which end in any order: each goes everywhere, and no other one with it.
TEST(AutogradTest, ManyContextsAtOnce) {
  static constexpr std::size_t kContexts = 3000;
  run_root(2, [](Session& session) {
    auto& registry = detail::Registry::of(session);
    std::vector<ContextId> ids;
    for (std::size_t i = 0; i < kContexts; ++i) {
      ids.push_back(registry.make_context()->id());
      const Scope scope(find(session, ids.back()));
      session.rpc_sync<add_numbers>("worker1", 1, 1);
    }
    const auto left = [&] { return session.rpc_sync<count_contexts>("worker1"); };
    EXPECT_EQ(left(), kContexts);
    std::swap(ids[0], ids[kContexts - 1]);  // the oldest one stays for long
    for (std::size_t i = 0; i < kContexts; ++i) {
      registry.release_own(ids[i]);
      if (i % 500 != 0) continue;
      EXPECT_EQ(stats(session).contexts, kContexts - 1 - i);
      const auto deadline = Deadline::after(20s);
      while (left() != kContexts - 1 - i && !deadline.expired()) {
      }
      EXPECT_EQ(left(), kContexts - 1 - i);
    }
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

// What was received in one context is not for passes of another, whose messages may have the same
// numbers.
TEST(AutogradTest, GraphsOfOtherContexts) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    std::vector<Session> sessions;
    for (const char* const name : {"a", "b"}) {
      sessions.emplace_back(rpc::SessionOptions{
          .name = concat(name, r.id()), .rank = r.id(), .size = r.size(), .store = r.store()});
    }
    if (r.id() == 0) {
      const auto x = random_leaf();
      at::Tensor before, beside, nested;
      {
        const Context context(sessions[0]);
        before = sessions[0].rpc_sync<square>(1, x);
      }
      std::thread([&] {
        const Context context(sessions[1]);
        beside = sessions[1].rpc_sync<square>(1, x);
      }).join();
      for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
        const Context context(sessions[0]);
        const auto good = sessions[0].rpc_sync<square>(1, x).sum();
        const auto refuses = [&](const at::Tensor& loss, const std::string& text) {
          expect_error(ErrorKind::kRemote, text, [&] {
            context.backward({loss}, {.mode = mode, .retain_graph = true, .timeout = 20s});
          });
          EXPECT_TRUE(context.gradients().empty());
        };
        refuses(good + before.sum(),
                concat("received in context ", context.id() - 1 - (mode == Mode::kFast)));
        refuses(good + beside.sum(), "received in a context of another session");
        // Somebody else's pass leads there.
        if (mode == Mode::kFast) continue;
        for (const at::Tensor& each : {before, beside}) {
          refuses(sessions[0].rpc_sync<add>(1, each, x).sum(), "received in ");
        }
        context.backward({good});
        expect_close(context.gradients().at(x), 2 * x);
      }
    }
    for (const Session& session : sessions) session.shutdown();
  });
}

// Nor for passes of a later session, which may lie where an ended one lay.
TEST(AutogradTest, GraphsOfEndedSessions) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto x = random_leaf();
    at::Tensor earlier;
    for (int i = 0; i < 4; ++i) {
      Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
      if (r.id() == 0) {
        const Context context(session);
        const auto sum = session.rpc_sync<square>(1, x).sum();
        if (earlier.defined()) {
          expect_error(ErrorKind::kRemote, "received in a context of another session",
                       [&] { context.backward({sum + earlier}, {.timeout = 20s}); });
          EXPECT_TRUE(context.gradients().empty());
        }
        earlier = sum;
      }
      session.shutdown();
    }
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

TEST(AutogradTest, NamesInPictures) {
  run_root(2, [](Session& session) {
    const Context context(session);
    session.rpc_sync<quoted>("worker1", random_leaf());
    const std::string picture = context.dump(DumpFormat::kGraphviz);
    EXPECT_NE(picture.find(R"("a \"quoted\" name \\")"), std::string::npos) << picture;
  });
}

// Of the call and of its reply, whichever threads take them, and of both parts of the pass.
TEST(AutogradTest, Events) {  // test_dist_autograd_profiling
  run_root(2, [](Session& session) {
    static std::mutex mutex;
    static std::map<std::string, int> counts;
    counts.clear();
    const auto handle = at::addGlobalCallback(
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
    const std::lock_guard lock(mutex);
    for (const char* const name : {"send", "recv", "backward"}) {
      EXPECT_EQ(counts[concat("convoy::autograd::", name)], 2) << name;
    }
  });
}

}  // namespace
}  // namespace convoy::autograd::contexts_test
