// Passes that fail, are late, or whose workers or contexts go.
#include <gmock/gmock.h>
#include <signal.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "autograd/functions.h"
#include "autograd/registry.h"
#include "base/concat.h"
#include "os/flight_calls.h"
#include "os/flight_recorder.h"
#include "support.h"

namespace convoy::autograd::faults_test {

using namespace test;
using namespace std::chrono_literals;

Signal& begun() {
  static Signal one;
  return one;
}
Signal& released() {
  static Signal one;
  return one;
}

at::Tensor waiting_square(const at::Tensor& t) {
  begun().set(true);
  released().wait();
  return t * t;
}
CONVOY_RPC(waiting_square);

// Its backward says that it has begun, and waits.
std::atomic<int> slow_nodes{0};
struct Slow : torch::autograd::Function<Slow> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& g) {
    ++slow_nodes;
    begun().set(true);
    released().wait();
    return g;
  }
};
at::Tensor slow_chain(const at::Tensor& x, int length) {
  at::Tensor t = x;
  for (int i = 0; i < length; ++i) t = Slow::apply(t);
  return t;
}
CONVOY_RPC(slow_chain);
// Fails when the others have begun.
struct Late : torch::autograd::Function<Late> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    begun().wait();
    throw std::runtime_error("too late");
  }
};
at::Tensor late(const at::Tensor& x) { return Late::apply(x); }
CONVOY_RPC(late);
// Its gradient is whole when those of all its copies have come.
at::Tensor& kept() {
  static at::Tensor one;
  return one;
}
void keep(const at::Tensor& x) { kept() = x * 2; }
CONVOY_RPC(keep);
at::Tensor copy_of_kept() { return kept() * 1; }
CONVOY_RPC(copy_of_kept);
at::Tensor slow_behind(const std::string& worker, const at::Tensor& x) {
  return rpc::current().session().rpc_sync<slow_chain>(worker, x, 1);
}
CONVOY_RPC(slow_behind);
at::Tensor slow_loss(const std::string& worker, const at::Tensor& x) {
  return slow_behind(worker, x).sum();
}
CONVOY_RPC(slow_loss);
at::Tensor late_loss(const std::string& worker, const at::Tensor& x) {
  begun().set(true);  // it does not wait for others
  return rpc::current().session().rpc_sync<late>(worker, x).sum();
}
CONVOY_RPC(late_loss);

// What a node or a hook does.
std::function<void()>& affair() {
  static std::function<void()> one;
  return one;
}
struct Affair : torch::autograd::Function<Affair> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& g) {
    affair()();
    return g;
  }
};
at::Tensor with_affair(const at::Tensor& x, bool in_hook) {
  if (!in_hook) return Affair::apply(x);
  const auto y = x * 1;
  y.register_hook([](const at::Tensor&) { affair()(); });
  return y * 2;
}
CONVOY_RPC(with_affair);

at::Tensor around(const Way& way, const at::Tensor& x) {
  if (way.empty()) return x * 2;
  return rpc::current().session().rpc_sync<around>(way[0], Way(way.begin() + 1, way.end()), x * 2);
}
CONVOY_RPC(around);

namespace {

void run_faulty(int n, const std::function<void(Session&)>& function,
                const rpc::SessionOptions& more = {}) {
  begun().set(false);
  released().set(false);
  slow_nodes = 0;
  test::run_root(n, function, more);
}
at::Tensor leaf() { return test::leaf(1, {3}); }

// The node that runs goes on to its end; those behind it are not run any more.
TEST(AutogradFaultTest, AFailureStopsOthersBetweenNodes) {
  run_faulty(3, [](Session& session) {
    const auto x = leaf();
    const Context context(session);
    const auto slow = session.rpc_sync<slow_chain>("worker1", x, 50);
    const auto failing = session.rpc_sync<late>("worker2", x);
    expect_error(ErrorKind::kRemote, "too late",
                 [&] { context.backward({(slow + failing).sum()}, {.retain_graph = true}); });
    // Everybody has been told, also who is still in a node.
    EXPECT_EQ(session.rpc_sync<count_passes>("worker1"), 0U);
    EXPECT_EQ(session.rpc_sync<count_passes>("worker2"), 0U);
    released().set(true);
    context.backward({slow.sum()});
    EXPECT_EQ(slow_nodes, 51);
    EXPECT_TRUE(at::equal(context.gradients().at(x), torch::ones({3})));
  });
}

TEST(AutogradFaultTest, ADeadlineNamesWhoIsWaitedFor) {
  run_faulty(3, [](Session& session) {
    const auto x = leaf();
    const Context context(session);
    const auto y =
        session.rpc_sync<slow_chain>("worker1", session.rpc_sync<square>("worker2", x), 2);
    try {
      context.backward({y.sum()}, {.retain_graph = true, .timeout = 100ms});
      ADD_FAILURE() << "it did not fail";
    } catch (const rpc::RemoteError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
      EXPECT_NE(std::string(error.what()).find("worker1"), std::string::npos) << error.what();
    }
    EXPECT_TRUE(context.gradients().empty());
    released().set(true);
    context.backward({y.sum()});
    EXPECT_TRUE(at::equal(context.gradients().at(x), torch::full({3}, 2.0)));
  });
}

// Its own deadline counts, not that of calls.
TEST(AutogradFaultTest, APassMayTakeLongerThanCalls) {
  run_faulty(2, [](Session& session) {
    const auto x = leaf();
    const Context context(session);
    const auto y = session.rpc_sync<slow_chain>("worker1", x, 1);
    session.set_timeout(1ms);
    std::thread opener([] {
      begun().wait();
      released().wait(50ms);  // nobody sets it: the node takes so long
      released().set(true);
    });
    context.backward({y.sum()});
    opener.join();
    session.set_timeout(60s);
    EXPECT_TRUE(at::equal(context.gradients().at(x), torch::ones({3})));
  });
}

TEST(AutogradFaultTest, ReleasedDuringAPass) {
  run_faulty(2, [](Session& session) {
    const auto x = leaf();
    std::thread other;
    {
      const Context context(session);
      const auto y = session.rpc_sync<slow_chain>("worker1", x, 1);
      other = std::thread([context = find(session, context.id()), y] {
        expect_error(ErrorKind::kCancelled, "released", [&] { context.backward({y.sum()}); });
        expect_error(ErrorKind::kInvalidArgument, "released", [&] { context.gradients(); });
      });
      EXPECT_TRUE(begun().wait());
    }
    released().set(true);
    other.join();
  });
}

// A call that arrives, or answers, after the end of its context does not bring it back.
TEST(AutogradFaultTest, LateCallsMakeNoContexts) {
  run_faulty(3, [](Session& session) {
    const auto x = leaf();
    rpc::Future<at::Tensor> future;
    {
      const Context context(session);
      future = session.rpc_async<waiting_square>("worker1", x);
      EXPECT_TRUE(begun().wait());
    }
    const auto deadline = Deadline::after(10s);
    while (session.rpc_sync<count_contexts>("worker1") != 0 && !deadline.expired()) {
    }
    released().set(true);
    EXPECT_TRUE(at::equal(future.wait(), torch::ones({3})));
    EXPECT_EQ(session.rpc_sync<count_contexts>("worker1"), 0U);
    EXPECT_EQ(stats(session).contexts, 0U);
  });
}

// The flight record says what each worker does in it, for whoever looks from outside.
TEST(AutogradFaultTest, TheFlightRecordTellsOfPasses) {
  using testing::Contains, testing::ContainsRegex;
  const auto read = [] {
    const auto& recorder = flight::Recorder::instance();
    return std::vector{flight::read(*recorder.ring(), recorder.bytes()).value()};
  };
  run_faulty(3, [&](Session& session) {
    const auto x = leaf();
    const Context context(session);
    const auto y = session.rpc_sync<slow_behind>("worker1", "worker2", x);
    std::thread other([&, context = find(session, context.id())] { context.backward({y.sum()}); });
    EXPECT_TRUE(begun().wait());
    const auto hangs =
        Contains(ContainsRegex("worker0 \\(pid [0-9]+\\): backward pass 1 since [0-9.]+ m?s, waits "
                               "for others; worker1 waits for gradients; worker2 runs since"));
    std::vector<std::string> lines;
    const auto deadline = Deadline::after(20s);
    do {
      const auto logs = read();
      lines =
          flight::calls_under_way(flight::Calls(logs), 20, flight::Clock::now().time_since_epoch());
    } while (!testing::Value(lines, hangs) && !deadline.expired());
    EXPECT_THAT(lines, hangs);
    // Seen from inside.
    const std::string text = context.dump();
    EXPECT_THAT(text, ContainsRegex("worker0:[^:]*\n  send [0-9]+ to worker1, call of [^\n]*: "
                                    "[^\n]* \\[active, waits for its gradient\\]\n"));
    EXPECT_THAT(text, ContainsRegex("send [0-9]+ to worker0, reply of [^\n]* \\[active\\]\n"));
    EXPECT_THAT(text, ContainsRegex("  pass 1 of worker0: running, 1 active sends, waits for 1\n"));
    EXPECT_THAT(text, ContainsRegex("  pass 1 of worker0: running, 2 active sends, waits for 1\n"));
    released().set(true);
    other.join();
    const auto logs = read();
    const auto over = flight::last_calls(logs[0], 100, flight::Clock::now().time_since_epoch());
    EXPECT_THAT(over, Contains(ContainsRegex("worker0 .*: backward pass 1, done in")));
    EXPECT_THAT(over, Contains(ContainsRegex("worker2 .*: for worker0: backward pass 1, done in")));
  });
}

// Nobody can be told by calls then.
TEST(AutogradFaultTest, AnAbortedSessionEndsAPass) {
  for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
    begun().set(false);
    released().set(false);
    RankGroup(3, RankMode::kThreads).run([&](Rank& r) {
      Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
      if (r.id() == 0) {
        const auto x = leaf();
        const Context context(session);
        const auto y = session.rpc_sync<slow_behind>("worker1", "worker2", x);
        std::thread other([&, context = find(session, context.id())] {
          expect_error(ErrorKind::kCancelled, "shut down",
                       [&] { context.backward({y.sum()}, {.mode = mode, .timeout = 20s}); });
        });
        EXPECT_TRUE(begun().wait());
        session.shutdown({.graceful = false});
        other.join();
        EXPECT_EQ(stats(session).passes, 0U);
        released().set(true);
      } else {
        EXPECT_TRUE(released().wait());
        session.shutdown({.graceful = false});
        EXPECT_EQ(stats(session).passes, 0U);
      }
    });
  }
}

// The root has no call to it under way, and with kFast does not even know that it takes part.
TEST(AutogradFaultTest, AWorkerThatLeavesEndsAPass) {
  for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
    begun().set(false);
    released().set(false);
    RankGroup(3, RankMode::kThreads).run([&](Rank& r) {
      Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
      if (r.id() == 0) {
        const auto x = leaf();
        const Context context(session);
        const auto y = session.rpc_sync<slow_behind>("worker1", "worker2", x);
        expect_error(ErrorKind::kPeerLost, "worker2",
                     [&] { context.backward({y.sum()}, {.mode = mode, .timeout = 20s}); });
        EXPECT_EQ(session.rpc_sync<count_passes>("worker1"), 0U);
        released().set(true);
      } else {
        EXPECT_TRUE((r.id() == 2 ? begun() : released()).wait());
      }
      session.shutdown({.graceful = false});
    });
  }
}

// Of a pass that runs at the owner of a reference the caller hears what its root would.
TEST(AutogradFaultTest, BehindAReference) {
  run_faulty(3, [](Session& session) {
    const auto x = leaf();
    const Context context(session);
    const auto fails = [&](ErrorKind kind, const std::string& worker, const std::string& text,
                           const rpc::RRef<at::Tensor>& loss, const BackwardOptions& options) {
      try {
        loss.backward(context, options);
        ADD_FAILURE() << "it did not fail";
      } catch (const rpc::RemoteError& error) {
        EXPECT_EQ(error.kind(), kind) << error.what();
        // At the deadline whoever waits may be the first to say so.
        EXPECT_TRUE(error.worker() == worker || kind == ErrorKind::kTimeout) << error.what();
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find(worker), std::string::npos) << error.what();
      }
      EXPECT_TRUE(context.gradients().empty());
    };
    const auto slow = session.remote<slow_loss>("worker1", "worker2", x);
    fails(ErrorKind::kTimeout, "worker2", "", slow, {.retain_graph = true, .timeout = 100ms});
    released().set(true);
    const auto failing = session.remote<late_loss>("worker1", "worker2", x);
    fails(ErrorKind::kRemote, "worker2", "Error on Node 2: too late (in ", failing, {});
    const auto no_scalar = session.remote<slow_chain>("worker1", x, 1);
    fails(ErrorKind::kInvalidArgument, "worker1", "not a scalar", no_scalar, {});
    slow.backward(context);
    EXPECT_TRUE(at::equal(context.gradients().at(x), torch::ones({3})));
  });
}

// The same of a worker that neither knows the root's affairs nor is the owner.
TEST(AutogradFaultTest, AWorkerThatLeavesBehindAReference) {
  begun().set(false);
  released().set(false);
  RankGroup(3, RankMode::kThreads).run([](Rank& r) {
    Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
    if (r.id() == 0) {
      const auto x = leaf();
      const Context context(session);
      const auto loss = session.remote<slow_loss>("worker1", "worker2", x);
      try {
        loss.backward(context, BackwardOptions{.timeout = 20s});
        ADD_FAILURE() << "it did not fail";
      } catch (const rpc::RemoteError& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
        EXPECT_EQ(error.worker(), "worker2") << error.what();
      }
      released().set(true);
    } else {
      EXPECT_TRUE((r.id() == 2 ? begun() : released()).wait());
    }
    session.shutdown({.graceful = false, .ignore_leaks = true});
  });
}

// Whatever a node or a hook waited for in vain: the pass has failed in it, and nobody is lost.
TEST(AutogradFaultTest, WhatNodesWaitForInVain) {
  const std::vector<std::function<void()>> affairs = {
      [] { throw rpc::RemoteError(ErrorKind::kPeerLost, "so sad", "worker7", ""); },
      [] { throw Error(ErrorKind::kPeerLost, "so sad: a collective"); },
      [] { throw Error(ErrorKind::kTimeout, "so sad: a collective"); },
      [] {
        try {
          const auto there = current().session().to("worker2", {.timeout = 5ms});
          static_cast<void>(there.rpc_sync<waiting_square>(torch::ones({1})));
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
          EXPECT_NE(std::string(error.what()).find("waiting_square"), std::string::npos);
          throw;
        }
      },
  };
  const std::vector<std::string> texts = {"so sad", "so sad", "so sad", "waiting_square"};
  run_faulty(3, [&](Session& session) {
    const auto x = leaf();
    for (std::size_t i = 0; i < affairs.size(); ++i) {
      for (const int to : {0, 1}) {
        for (const bool in_hook : {false, true}) {
          SCOPED_TRACE(concat("affair ", i, ", worker", to, in_hook ? ", hook" : ", node"));
          affair() = affairs[i];
          const Context context(session);
          const auto y = session.rpc_sync<with_affair>(to, x, in_hook);
          try {
            context.backward({y.sum()}, {.timeout = 20s});
            ADD_FAILURE() << "it did not fail";
          } catch (const rpc::RemoteError& error) {
            const std::string text = error.what();
            EXPECT_EQ(error.kind(), ErrorKind::kRemote) << text;
            EXPECT_EQ(error.worker(), concat("worker", to)) << text;
            EXPECT_NE(text.find(texts[i]), std::string::npos) << text;
            EXPECT_NE(text.find(in_hook ? "(in a hook after MulBackward1)" : "::Affair>)"),
                      std::string::npos)
                << text;
          }
          EXPECT_TRUE(context.gradients().empty());
        }
      }
    }
    released().set(true);
  });
}

// The root may have fewer calls under way than there are gradients for one worker, which can do
// nothing until all of them have come.
TEST(AutogradFaultTest, MoreGradientsThanCalls) {
  rpc::SessionOptions options;
  options.most_calls = 4;
  run_faulty(
      2,
      [](Session& session) {
        const auto x = leaf();
        const Context context(session);
        session.rpc_sync<keep>("worker1", x);
        std::vector<at::Tensor> parts;
        for (int i = 0; i < 40; ++i) parts.push_back(session.rpc_sync<copy_of_kept>("worker1"));
        context.backward({torch::stack(parts).sum()}, {.timeout = 20s});
        EXPECT_TRUE(at::equal(context.gradients().at(x), torch::full({3}, 80.0)));
        kept().reset();
      },
      options);
}
TEST(AutogradFaultTest, MoreBytesOfGradientsThanCallsMayHave) {
  rpc::SessionOptions options;
  options.most_bytes = 4 << 20;
  run_faulty(
      2,
      [](Session& session) {
        const auto x = torch::ones({600'000}).requires_grad_(true);
        const Context context(session);
        session.rpc_sync<keep>("worker1", x);
        std::vector<at::Tensor> parts;
        for (int i = 0; i < 4; ++i) parts.push_back(session.rpc_sync<copy_of_kept>("worker1"));
        context.backward({torch::stack(parts).sum()}, {.timeout = 20s});
        EXPECT_TRUE(at::equal(context.gradients().at(x), torch::full({600'000}, 8.0)));
        kept().reset();
      },
      options);
}

// Passes of one root do not end each other.
TEST(AutogradFaultTest, ManyPassesAtOnce) {
  run_faulty(2, [](Session& session) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&session] {
        const auto x = leaf();
        const Context context(session);
        const auto y = session.rpc_sync<square>("worker1", x).sum();
        for (int i = 0; i < 200; ++i) context.backward({y}, {.retain_graph = true});
        EXPECT_TRUE(at::equal(context.gradients().at(x), torch::full({3}, 400.0)));
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

// Numbers of workers are part of those of contexts and messages.
TEST(AutogradFaultTest, WorkersWithLargeNumbersAreRefused) {
  EXPECT_EQ(detail::numbered_by(65535, 7), 0xffff'0000'0000'0007U);
  expect_error(ErrorKind::kUnsupported, "worker 65536", [] { detail::numbered_by(65536, 1); });
}

TEST(AutogradFaultTest, OthersCannotFillTablesHere) {
  detail::EndedNumbers ended;
  for (std::uint64_t i = 0; i < 200'000; ++i) ended.add(2 * i);
  EXPECT_LE(ended.numbers.size(), detail::EndedNumbers::kMost);
  EXPECT_TRUE(ended.contains(2 * 199'999));
  run_faulty(2, [](Session& session) {
    detail::Registry& registry = detail::Registry::of(session);
    std::uint64_t made = 0;
    expect_error(ErrorKind::kResource, "contexts", [&] {
      while (made < 200'000) {
        registry.find_or_make(detail::numbered_by(1, made + 1));
        ++made;
      }
    });
    EXPECT_EQ(made, detail::kMostAtOnce);
    registry.release(detail::numbered_by(1, 1), made + 2, 1);
  });
}

TEST(AutogradFaultTest, OnlyItsRootEndsAPass) {
  run_faulty(2, [](Session& session) {
    const auto x = leaf();
    const Context context(session);
    const auto y = session.rpc_sync<square>("worker1", x);
    detail::PassHead head;
    head.pass = {1, 1};
    head.context = context.id();
    const std::vector<detail::WorkerId> others;
    expect_error(ErrorKind::kRemote, "not the root",
                 [&] { session.rpc_sync<detail::abort_pass>("worker1", head, "for fun"); });
    expect_error(ErrorKind::kRemote, "not the root",
                 [&] { session.rpc_sync<detail::commit>("worker1", head); });
    expect_error(ErrorKind::kRemote, "itself",
                 [&] { session.rpc_sync<detail::pass_done>("worker1", head.pass, 1, others); });
    context.backward({y.sum()});
    EXPECT_TRUE(at::equal(context.gradients().at(x), torch::full({3}, 2.0)));
  });
}

// test_backward_node_failure: half of the workers die.
TEST(AutogradFaultTest, LostWorkers) {
  RankGroup group(4, RankMode::kProcesses);
  group.start([](Rank& r) {
    Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
    if (r.id() == 0) {
      const auto x = leaf();
      {
        const Context context(session);
        const auto y = session.rpc_sync<around>("worker1", Way{"worker2", "worker3", "worker1"}, x);
        context.backward({y.sum()}, {.retain_graph = true});
        r.mark("ready");
        r.wait_for("killed");
        try {
          context.backward({y.sum()}, {.timeout = 20s});
          ADD_FAILURE() << "it did not fail";
        } catch (const rpc::RemoteError& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
          EXPECT_TRUE(error.worker() == "worker1" || error.worker() == "worker3") << error.what();
        }
        EXPECT_TRUE(at::equal(context.gradients().at(x), torch::full({3}, 16.0)));
        // What can be seen of it.
        EXPECT_NE(context.dump().find("worker1: cannot be asked"), std::string::npos);
        EXPECT_NE(context.dump(DumpFormat::kGraphviz).find("cannot be asked"), std::string::npos);
      }
      // Those who are left go on; worker2's context has gone, though nobody is left to tell it.
      const auto deadline = Deadline::after(20s);
      while (session.rpc_sync<count_contexts>("worker2") != 0 && !deadline.expired()) {
      }
      EXPECT_EQ(session.rpc_sync<count_contexts>("worker2"), 0U);
      const Context context(session);
      context.backward({session.rpc_sync<square>("worker2", x).sum()});
      EXPECT_TRUE(at::equal(context.gradients().at(x), torch::full({3}, 2.0)));
      r.mark("done");
    } else {
      r.mark("ready");
      r.wait_for("end");
    }
    session.shutdown({.graceful = false});
  });
  group.wait_mark("ready");
  group.kill(1, SIGKILL);
  group.kill(3, SIGKILL);
  group.post("killed");
  group.wait_mark("done", 0);
  group.post("end");
  group.join();
}

}  // namespace
}  // namespace convoy::autograd::faults_test
