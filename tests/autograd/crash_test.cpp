// Roots that die in a pass, at every point of what they say to one of the others; others, too.
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/types.h>

#include <optional>
#include <vector>

#include "base/concat.h"
#include "base/error.h"
#include "convoy/autograd.h"
#include "convoy/rref.h"
#include "kill.h"
#include "simulated.h"
#include "transport/simulation.h"

namespace convoy::autograd::crash_test {

using rpc::Session;
using test::SimulatedWorkers;
using namespace std::chrono_literals;

// Each worker (they are threads of this process) has a parameter.
at::Tensor& weight_of(int rank) {
  static std::vector<at::Tensor> all = [] {
    std::vector<at::Tensor> made;
    for (int i = 0; i < 3; ++i) made.push_back(torch::full({2}, i + 2.0).requires_grad_(true));
    return made;
  }();
  return all[static_cast<std::size_t>(rank)];
}
int rank_here() { return rpc::current().session().worker_info().rank; }

at::Tensor weighted(const at::Tensor& x) { return x * weight_of(rank_here()); }
CONVOY_RPC(weighted);
// What the context has of this worker's parameter; undefined: nothing.
at::Tensor gradient_here(ContextId id) {
  const auto gradients = find(rpc::current().session(), id).gradients();
  const at::Tensor& weight = weight_of(rank_here());
  return gradients.contains(weight) ? gradients.at(weight).clone() : at::Tensor();
}
CONVOY_RPC(gradient_here);

// The letters of worker0 are counted from here on.
bool& is_counted() {
  static bool on = false;
  return on;
}
// worker0 in a context of its own.
void train_here() {
  const auto session = rpc::current().session();
  const Context context(session);
  const auto y = session.rpc_sync<weighted>("worker1", weight_of(0));
  const auto z = session.rpc_sync<weighted>("worker2", weight_of(0));
  is_counted() = true;
  context.backward({(y + z).sum()}, {.timeout = 20s});
}
CONVOY_RPC(train_here);
// worker0 as the owner of a loss, in the context of another.
at::Tensor loss_here(const at::Tensor& x) {
  const auto session = rpc::current().session();
  return session.rpc_sync<weighted>("worker2", x * weight_of(0)).sum();
}
CONVOY_RPC(loss_here);

namespace {

// A world in which worker0 dies soon after its n-th letter to `deaf`, which is not heard any more.
class Dying {
 public:
  Dying(int deaf, int letters) : deaf_(deaf), left_(letters), workers_(world_, {2, 2, 2}, hear()) {
    is_counted() = false;
  }
  Dying(const Dying&) = delete;
  Dying& operator=(const Dying&) = delete;
  // Threads of the dead one wait for ever: its session ends them.
  ~Dying() {
    is_counted() = false;
    world_.start([this] { workers_[0].shutdown({.graceful = false, .ignore_leaks = true}); });
    world_.run([this] { return world_.running() == 0; }, 1'000'000);
    EXPECT_EQ(world_.running(), 0U) << "somebody waits for ever";
  }

  // As worker1, who lives.
  void run(const std::function<void(Session&)>& function) {
    bool ended = false;
    world_.start([&] {
      function(workers_[1]);
      ended = true;
    });
    world_.run([&] { return ended; }, 1'000'000);
    ASSERT_TRUE(ended) << "somebody waits for ever";
  }
  // Nothing is left of the dead one's.
  void expect_empty() {
    world_.run([&] { return workers_.is_empty(); }, 1'000'000);
    EXPECT_TRUE(workers_.is_empty()) << "contexts or passes are left";
  }
  bool has_died() const { return left_ < 0; }

 private:
  SimulatedWorkers::Send hear() {
    return
        [this](const SimulatedWorkers::Sending& sending) -> std::optional<transport::SendResult> {
          if (!is_counted() || sending.from != 0 || sending.to != deaf_) return std::nullopt;
          if (left_ < 0) return transport::SendResult::kSent;
          if (--left_ >= 0) return std::nullopt;
          world_.call_after(200us, [this] { workers_.crash(0); });
          return transport::SendResult::kSent;
        };
  }

  const int deaf_;
  int left_;
  transport::World world_;
  SimulatedWorkers workers_;
};

bool is_nothing_or(const at::Tensor& got, const at::Tensor& wanted) {
  return !got.defined() || at::equal(got, wanted);
}
void expect_lost(const Error& error) {
  EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
  EXPECT_NE(std::string(error.what()).find("worker0"), std::string::npos) << error.what();
}

// Its contexts go with it, whoever has committed.
TEST(AutogradCrashTest, RootsOfTheirOwnContexts) {
  for (const int deaf : {1, 2}) {
    int letters = 0;
    for (bool died = true; died; ++letters) {
      ASSERT_LT(letters, 100);
      SCOPED_TRACE(concat("deaf ", deaf, ", letters ", letters));
      Dying world(deaf, letters);
      world.run([](Session& session) {
        try {
          session.to("worker0", {.timeout = 30s}).rpc_sync<train_here>();
        } catch (const Error& error) {
          expect_lost(error);
        }
      });
      died = world.has_died();
      world.expect_empty();
      // The others go on.
      world.run([](Session& session) {
        const Context context(session);
        context.backward({session.rpc_sync<weighted>("worker2", weight_of(1)).sum()});
        EXPECT_TRUE(at::equal(context.gradients().at(weight_of(1)), weight_of(2)));
        EXPECT_TRUE(
            at::equal(session.rpc_sync<gradient_here>("worker2", context.id()), weight_of(1)));
      });
      world.expect_empty();
      if (testing::Test::HasFailure()) return;
    }
    EXPECT_GT(letters, 2);
  }
}

// The context lives on. If its pass went well, all have its gradients; if not, each has all of its
// own, or nothing.
TEST(AutogradCrashTest, RootsInContextsOfOthers) {
  for (const int deaf : {1, 2}) {
    int letters = 0;
    int failed = 0;
    for (bool died = true; died; ++letters) {
      ASSERT_LT(letters, 100);
      SCOPED_TRACE(concat("deaf ", deaf, ", letters ", letters));
      Dying world(deaf, letters);
      world.run([&](Session& session) {
        const Context context(session);
        const auto wanted1 = (weight_of(0) * weight_of(2)).detach();
        const auto wanted2 = (weight_of(0) * weight_of(1)).detach();
        const auto loss = session.remote<loss_here>("worker0", weight_of(1));
        loss.created().wait();
        is_counted() = true;
        bool good = true;
        try {
          loss.backward(context, BackwardOptions{.timeout = 20s});
        } catch (const Error& error) {
          good = false;
          ++failed;
          expect_lost(error);
        }
        const auto gradients = context.gradients();
        const auto got1 =
            gradients.contains(weight_of(1)) ? gradients.at(weight_of(1)).clone() : at::Tensor();
        const auto got2 = session.rpc_sync<gradient_here>("worker2", context.id());
        EXPECT_TRUE(is_nothing_or(got1, wanted1)) << got1;
        EXPECT_TRUE(is_nothing_or(got2, wanted2)) << got2;
        EXPECT_TRUE(!good || (got1.defined() && got2.defined()));
        // It can be used again.
        context.backward({session.rpc_sync<weighted>("worker2", weight_of(1)).sum()});
        const auto before = got1.defined() ? got1 : torch::zeros({2});
        EXPECT_TRUE(at::equal(context.gradients().at(weight_of(1)), before + weight_of(2)));
      });
      died = world.has_died();
      world.expect_empty();
      if (testing::Test::HasFailure()) return;
    }
    EXPECT_GT(failed, 0);
  }
}

TEST(AutogradCrashTest, KilledWorkers) { kill_test::kill_workers_with_letters(1, 4); }

}  // namespace
}  // namespace convoy::autograd::crash_test
