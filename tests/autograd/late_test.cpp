// What comes late in a pass that has failed: nobody begins a part of it then.
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/types.h>

#include <optional>
#include <string>
#include <string_view>

#include "agent/agent.h"
#include "autograd/lineage.h"
#include "base/error.h"
#include "convoy/autograd.h"
#include "convoy/distributed_optimizer.h"
#include "convoy/rref.h"
#include "rpc/session_impl.h"
#include "simulated.h"
#include "transport/simulation.h"

namespace convoy::autograd::late_test {

using rpc::Session;
using test::SimulatedWorkers;
using Sending = SimulatedWorkers::Sending;
using namespace std::chrono_literals;

// By the world's clock; what others do meanwhile is done.
template <class Ready>
bool wait(const Session& session, std::chrono::milliseconds most, Ready ready) {
  auto& agent = session.impl()->agent();
  return agent.wait(Deadline::after(most, agent.now()), ready);
}
void sleep(const Session& session, std::chrono::milliseconds time) {
  wait(session, time, [] { return false; });
}

at::Tensor doubled(const at::Tensor& x) { return x * 2; }
CONVOY_RPC(doubled);
at::Tensor doubled_by(const std::string& worker, const at::Tensor& x) {
  return rpc::current().session().rpc_sync<doubled>(worker, x * 1) * 1;
}
CONVOY_RPC(doubled_by);

// One thing at a time happens in the world: no locks.
struct Hook {
  bool is_in = false;
  bool goes_on = false;
};
Hook& hook() {
  static Hook one;
  return one;
}
// Before the gradient goes on to the other worker, a hook here takes its time.
at::Tensor doubled_behind_hook(const std::string& worker, const at::Tensor& x) {
  const auto session = rpc::current().session();
  const auto y = session.rpc_sync<doubled>(worker, x);
  y.register_hook([session](const at::Tensor& g) {
    hook().is_in = true;
    EXPECT_TRUE(wait(session, 30s, [] { return hook().goes_on; }));
    return g * 1;
  });
  return y * 1;
}
CONVOY_RPC(doubled_behind_hook);
// The same at the last one.
at::Tensor doubled_slowly(const at::Tensor& x) {
  x.register_hook([session = rpc::current().session()](const at::Tensor& g) {
    hook().is_in = true;
    EXPECT_TRUE(wait(session, 30s, [] { return hook().goes_on; }));
    return g * 1;
  });
  return x * 2;
}
CONVOY_RPC(doubled_slowly);
at::Tensor doubled_by_slow(const std::string& worker, const at::Tensor& x) {
  return rpc::current().session().rpc_sync<doubled_slowly>(worker, x * 1) * 1;
}
CONVOY_RPC(doubled_by_slow);
at::Tensor make_parameter() { return torch::ones({2}).requires_grad_(true); }
CONVOY_RPC(make_parameter);
at::Tensor times_parameter(const rpc::RRef<at::Tensor>& parameter, const at::Tensor& x) {
  return parameter.local_value() * x;
}
CONVOY_RPC(times_parameter);
// Fails when somebody is in that hook.
struct Failing : torch::autograd::Function<Failing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    EXPECT_TRUE(wait(rpc::current().session(), 30s, [] { return hook().is_in; }));
    throw std::runtime_error("as it should");
  }
};
at::Tensor failing(const at::Tensor& x) { return Failing::apply(x); }
CONVOY_RPC(failing);

namespace {

// Four workers, of whom worker0 runs the function.
class World {
 public:
  using Function = std::function<void(const Session&)>;

  explicit World(const SimulatedWorkers::Send& send) : workers_(world_, {2, 2, 2, 2}, send) {}

  SimulatedWorkers& workers() { return workers_; }
  void crash_after(std::chrono::nanoseconds delay, int rank) {
    world_.call_after(delay, [this, rank] { workers_.crash(rank); });
  }
  // Beside what run() runs; that waits for it.
  void start(const std::function<void()>& function) { world_.start(function); }
  void run(const Function& function) {
    bool ended = false;
    world_.start([&] {
      function(workers_[0]);
      ended = true;
    });
    world_.run([&] { return ended; }, 1'000'000);
    ASSERT_TRUE(ended) << "somebody waits for ever";
    world_.run([&] { return world_.running() == 0 && workers_.is_empty(); }, 1'000'000);
    EXPECT_EQ(world_.running(), 0U) << "somebody waits for ever";
    EXPECT_TRUE(workers_.is_empty()) << "contexts or passes are left";
  }

 private:
  transport::World world_;
  SimulatedWorkers workers_;
};

class NoLineages {
 public:
  NoLineages() { detail::set_most_upstream(0); }
  NoLineages(const NoLineages&) = delete;
  NoLineages& operator=(const NoLineages&) = delete;
  ~NoLineages() { detail::set_most_upstream(before_); }

 private:
  const std::size_t before_ = detail::most_upstream();
};

// worker3 dies while worker1 is being asked; what that one answers names worker2, whom nobody has
// asked yet.
TEST(AutogradLateTest, AnswersOfDiscovery) {
  const NoLineages none;
  bool held = false;
  World* here = nullptr;
  World world([&](const Sending& sending) -> std::optional<transport::SendResult> {
    if (held || !sending.answer || sending.from != 1 || !sending.function.ends_with("::expand")) {
      return std::nullopt;
    }
    held = true;
    here->workers().send_after(200ms, sending);
    here->crash_after(10us, 3);
    return transport::SendResult::kSent;
  });
  here = &world;
  world.run([&](const Session& session) {
    const auto x = torch::ones({2}).requires_grad_(true);
    const Context context(session);
    const auto y = session.rpc_sync<doubled_by>("worker1", "worker2", x);
    const auto loss = (y + session.rpc_sync<doubled>("worker3", x)).sum();
    try {
      context.backward({loss}, {.timeout = 30s});
      ADD_FAILURE() << "it did not fail";
    } catch (const rpc::RemoteError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
      EXPECT_EQ(error.worker(), "worker3") << error.what();
    }
    EXPECT_TRUE(held);
    sleep(session, 2s);
    EXPECT_EQ(world.workers().passes(), 0U) << "somebody has begun a pass that has failed";
    EXPECT_EQ(stats(world.workers()[2]).contexts, 1U);
  });
}

// worker1 is in a hook when the pass fails; behind it is worker2, of whom nobody has heard.
TEST(AutogradLateTest, GradientsInFastMode) {
  hook() = {};
  World world([](const Sending&) { return std::nullopt; });
  world.run([&](const Session& session) {
    const auto x = torch::ones({2}).requires_grad_(true);
    const Context context(session);
    const auto y = session.rpc_sync<doubled_behind_hook>("worker1", "worker2", x);
    const auto loss = (y + session.rpc_sync<failing>("worker3", x)).sum();
    try {
      context.backward({loss}, {.mode = Mode::kFast, .timeout = 30s});
      ADD_FAILURE() << "it did not fail";
    } catch (const rpc::RemoteError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kRemote) << error.what();
      EXPECT_EQ(error.worker(), "worker3") << error.what();
    }
    EXPECT_EQ(world.workers().passes(), 0U);
    hook().goes_on = true;
    world.workers()[1].impl()->agent().wake();
    sleep(session, 2s);
    EXPECT_EQ(world.workers().passes(), 0U) << "somebody has begun a pass that has failed";
    EXPECT_EQ(stats(world.workers()[2]).contexts, 1U);
  });
}

// worker1 says once only to whom it has sent gradients, and that is lost: it is asked again.
TEST(AutogradLateTest, AnswersToAborts) {
  hook() = {};
  int lost = 0;
  World world([&](const Sending& sending) -> std::optional<transport::SendResult> {
    const bool its = sending.answer && sending.from == 1;
    if (!its || lost > 0 || !sending.function.ends_with("::abort_pass")) return std::nullopt;
    ++lost;
    return transport::SendResult::kSent;
  });
  world.run([&](const Session& session) {
    const auto x = torch::ones({2}).requires_grad_(true);
    const Context context(session);
    const auto y = session.rpc_sync<doubled_by_slow>("worker1", "worker2", x);
    const auto loss = (y + session.rpc_sync<failing>("worker3", x)).sum();
    EXPECT_THROW(context.backward({loss}, {.mode = Mode::kFast, .timeout = 30s}), rpc::RemoteError);
    EXPECT_EQ(lost, 1);
    EXPECT_EQ(world.workers().passes(), 0U) << "somebody was not told";
    hook().goes_on = true;
    world.workers()[2].impl()->agent().wake();
  });
}

// The end of the context ends its pass, and comes to worker1 before the root asks who has stepped.
TEST(AutogradLateTest, ReleasesBeforeAborts) {
  hook() = {};
  World* here = nullptr;
  World world([&](const Sending& sending) -> std::optional<transport::SendResult> {
    const bool its = !sending.answer && sending.from == 0 && sending.to == 1;
    if (!its || !sending.function.ends_with("::abort_pass")) return std::nullopt;
    here->workers().send_after(500ms, sending);
    return transport::SendResult::kSent;
  });
  here = &world;
  world.run([&](const Session& session) {
    const auto parameter = session.remote<make_parameter>("worker1");
    const DistributedOptimizer optimizer(session, {parameter}, Sgd{.lr = 1});
    const auto x = torch::ones({2}).requires_grad_(true);
    std::optional<Context> context(std::in_place, session);
    const auto loss = (session.rpc_sync<times_parameter>("worker1", parameter, x) +
                       session.rpc_sync<doubled_slowly>("worker2", x))
                          .sum();
    bool failed = false;
    world.start([&, id = context->id()] {
      try {
        find(session, id).backward({loss}, {.optimizers = {optimizer.in_backward()}});
        ADD_FAILURE() << "it did not fail";
      } catch (const rpc::RemoteError& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kCancelled) << error.what();
        EXPECT_NE(std::string(error.what())
                      .find("its context was released on worker0 [stepped: worker1; not stepped: "
                            "worker0, worker2]"),
                  std::string::npos)
            << error.what();
      }
      failed = true;
      session.impl()->agent().wake();
    });
    EXPECT_TRUE(wait(session, 30s, [] { return hook().is_in; }));
    sleep(session, 50ms);
    EXPECT_TRUE(at::equal(parameter.to_here().detach(), torch::zeros({2})));
    context.reset();
    EXPECT_TRUE(wait(session, 30s, [&] { return failed; }));
    hook().goes_on = true;
    world.workers()[2].impl()->agent().wake();
  });
}

}  // namespace
}  // namespace convoy::autograd::late_test
