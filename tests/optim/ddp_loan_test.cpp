// The `.grad` that a distributed backward pass lends a model's reducer, when the pass does not end
// well: it comes back as it was, and the model goes on.
#include <signal.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "convoy/autograd.h"
#include "convoy/ddp.h"
#include "convoy/init.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::autograd::ddp_loan_test {

using convoy::test::error_of;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using rpc::Session;
using namespace std::chrono_literals;

// Of the server, for whose backward the trainers wait. Workers are threads, or processes.
std::atomic<bool> is_closed{false};
std::atomic<int> waiting{0};

struct Gate : torch::autograd::Function<Gate> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& g) {
    const auto deadline = Deadline::after(30s);
    ++waiting;
    while (!deadline.expired() && is_closed) std::this_thread::yield();
    return {g[0]};
  }
};
at::Tensor through_gate(const at::Tensor& x) { return Gate::apply(x); }
CONVOY_RPC(through_gate);
at::Tensor twice(const at::Tensor& x) { return 2 * x; }
CONVOY_RPC(twice);

namespace {

constexpr int kTrainers = 2, kServer = 2;

at::Tensor batch_of(int rank, int step) {
  return at::rand({4, 3},
                  at::detail::createCPUGenerator(static_cast<std::uint64_t>(7 + 10 * step + rank)));
}

struct NetImpl : torch::nn::Module {
  NetImpl() : w(register_parameter("w", torch::arange(6, torch::kFloat).reshape({3, 2}))) {}
  at::Tensor forward(const at::Tensor& x) { return x.mm(w); }
  at::Tensor w;
};

// A model of this rank, with something of the user's in `.grad`.
struct Trainer {
  Trainer(Session& on, int rank, const ProcessGroup& trainers)
      : session(on), id(rank), group(trainers), ddp(std::make_shared<NetImpl>(), group) {
    ddp->w.mutable_grad() = kept;
  }
  // The model's output goes through the server: its gradient has to come back first, and the loan
  // is out since the engine began.
  at::Tensor loss_by_gate() {
    return session.rpc_sync<through_gate>("worker2", ddp(batch_of(id, 0))).square().sum();
  }
  static at::Tensor mean_of(int step) {
    NetImpl net;
    for (int rank = 0; rank < kTrainers; ++rank) {
      (net.forward(batch_of(rank, step)).square().sum() / kTrainers).backward();
    }
    return net.w.grad();
  }
  void expect_as_before(const char* when) const {
    EXPECT_TRUE(ddp->w.grad().is_same(kept)) << when;
    EXPECT_TRUE(at::equal(kept, torch::ones({3, 2}))) << when << ": " << kept;
  }
  // In a new context, twice in one, and outside of any.
  void expect_goes_on() {
    for (int round = 0; round < 2; ++round) {
      const Context context(session);
      context.backward({ddp(batch_of(id, 1)).square().sum()});
      const auto once = context.gradients().at(ddp->w).clone();
      EXPECT_TRUE(at::allclose(once, mean_of(1))) << once << "\n instead of\n" << mean_of(1);
      context.backward({ddp(batch_of(id, 2)).square().sum()});
      const auto both = context.gradients().at(ddp->w);
      EXPECT_TRUE(at::allclose(both, mean_of(1) + mean_of(2))) << both;
      expect_as_before("after a pass that went well");
    }
    ddp(batch_of(id, 1)).square().sum().backward();
    EXPECT_TRUE(at::allclose(ddp->w.grad(), 1 + mean_of(1))) << ddp->w.grad();
  }

  Session& session;
  const int id;
  const ProcessGroup group;
  DistributedDataParallel<NetImpl> ddp;
  const at::Tensor kept = torch::ones({3, 2});
};

ProcessGroup group_of(const Rank& r) {
  return new_group(
      "convoy",
      {.timeout = 30s, .store = r.store(), .rank = r.id(), .size = kTrainers, .name = "trainers"});
}

// Two trainers and a server, threads all.
void run_trainers(const std::function<void(Trainer&, const Rank&)>& function) {
  is_closed = false;
  waiting = 0;
  RankGroup(kTrainers + 1, RankMode::kThreads).run([&](Rank& r) {
    Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
    if (r.id() != kServer) {
      Trainer trainer(session, r.id(), group_of(r));
      function(trainer, r);
    }
    session.shutdown();
    EXPECT_EQ(stats(session).passes, 0U);
    EXPECT_EQ(stats(session).contexts, 0U);
  });
}

void expect_kind(const std::optional<Error>& error, ErrorKind kind, const std::string& text) {
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(to_string(error->kind()), to_string(kind)) << error->what();
  EXPECT_NE(std::string(error->what()).find(text), std::string::npos) << error->what();
}

// Before the model has any gradient.
TEST(DdpLoanTest, TheDeadlineBeforeTheModel) {
  run_trainers([](Trainer& trainer, const Rank&) {
    is_closed = true;
    {
      const Context context(trainer.session);
      const auto loss = trainer.loss_by_gate();
      expect_kind(error_of([&] { context.backward({loss}, {.timeout = 500ms}); }),
                  ErrorKind::kTimeout, "failed on worker");
      EXPECT_TRUE(context.gradients().empty());
      trainer.expect_as_before("after a timeout");
    }
    trainer.group.barrier();  // both have given up
    is_closed = false;
    trainer.expect_goes_on();
  });
}

// When the model has all of its gradients, and the reducer is in its backward: FAST mode waits for
// a gradient that nobody sends.
TEST(DdpLoanTest, TheDeadlineBehindTheModel) {
  run_trainers([](Trainer& trainer, const Rank&) {
    {
      const Context context(trainer.session);
      const auto unused =
          trainer.session.rpc_sync<twice>("worker2", torch::ones({2}).requires_grad_(true));
      const auto loss = trainer.ddp(batch_of(trainer.id, 0)).square().sum();
      expect_kind(error_of([&] { context.backward({loss}, {.mode = Mode::kFast, .timeout = 1s}); }),
                  ErrorKind::kTimeout, "every tensor that was sent must be used");
      EXPECT_TRUE(context.gradients().empty());
      trainer.expect_as_before("after a timeout");
      EXPECT_EQ(trainer.ddp.stats().backwards, 1U);  // which the ranks have ended together
    }
    trainer.expect_goes_on();
  });
}

TEST(DdpLoanTest, AReleasedContext) {
  run_trainers([](Trainer& trainer, const Rank& r) {
    is_closed = true;
    std::optional<Error> error;
    std::thread passing;
    {
      const Context context(trainer.session);
      const auto loss = trainer.loss_by_gate();
      passing = std::thread([&error, &trainer, loss, id = context.id()] {
        const auto there = find(trainer.session, id);
        error = error_of([&] { there.backward({loss}); });
      });
      while (!r.deadline().expired() && waiting != kTrainers) std::this_thread::yield();
    }
    passing.join();
    expect_kind(error, ErrorKind::kCancelled, "was released");
    trainer.expect_as_before("after a release");
    trainer.group.barrier();
    is_closed = false;
    trainer.expect_goes_on();
  });
}

TEST(DdpLoanTest, AKilledServer) {
  RankGroup group(kTrainers + 1, RankMode::kProcesses);
  group.start([](Rank& r) {
    is_closed = true;
    Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
    if (r.id() == kServer) {
      while (!r.deadline().expired() && waiting != kTrainers) std::this_thread::yield();
      r.mark("waits");
      r.wait_for("end");
    } else {
      Trainer trainer(session, r.id(), group_of(r));
      {
        const Context context(session);
        const auto loss = trainer.loss_by_gate();
        expect_kind(error_of([&] { context.backward({loss}); }), ErrorKind::kPeerLost, "worker2");
        EXPECT_TRUE(context.gradients().empty());
        trainer.expect_as_before("after a loss");
      }
      trainer.expect_goes_on();
      r.mark("done");
      r.wait_for("end");
    }
    session.shutdown({.graceful = false, .ignore_leaks = true});
  });
  group.wait_mark("waits", kServer);
  group.kill(kServer, SIGKILL);
  for (int rank = 0; rank < kTrainers; ++rank) group.wait_mark("done", rank);
  group.post("end");
  group.join();
}

}  // namespace
}  // namespace convoy::autograd::ddp_loan_test
