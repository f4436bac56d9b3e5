// What a distributed optimizer does at one owner: gradients as they come, several optimizers in one
// step, steps that cannot be made, contexts that are over.
#include "optim/local_optimizer.h"

#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "convoy/distributed_optimizer.h"
#include "optim/optimizer_rule.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::local_optimizer_test {

using autograd::Context;
using autograd::Gradients;
using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using detail::LocalOptimizerPtr;
using rpc::Session;
using State = OwnerStep::State;
using namespace std::chrono_literals;

at::Tensor make_copy(const at::Tensor& of) { return of.clone().requires_grad_(true); }
CONVOY_RPC(make_copy);
at::Tensor value_of(const RRef<at::Tensor>& parameter) { return parameter.local_value().detach(); }
CONVOY_RPC(value_of);
at::Tensor product_of(const RRef<at::Tensor>& parameter, const at::Tensor& factor) {
  return (parameter.local_value() * factor).sum();
}
CONVOY_RPC(product_of);
at::Tensor row_of(const RRef<at::Tensor>& table, std::int64_t row) {
  return torch::embedding(table.local_value(), torch::tensor({row}), -1, false, /*sparse=*/true)
      .sum();
}
CONVOY_RPC(row_of);
// The gradient of w.conj() is a lazy conjugate.
at::Tensor distance(const at::Tensor& w, const at::Tensor& x, const at::Tensor& y) {
  return (w.conj() * x - y).abs().square().sum();
}
at::Tensor distance_of(const RRef<at::Tensor>& w, const at::Tensor& x, const at::Tensor& y) {
  return distance(w.local_value(), x, y);
}
CONVOY_RPC(distance_of);
// From here on nobody can write to it.
void lock_memory(const RRef<at::Tensor>& parameter) {
  parameter.local_value().storage().unsafeGetStorageImpl()->set_throw_on_mutable_data_ptr();
}
CONVOY_RPC(lock_memory);
std::size_t contexts_here() { return autograd::stats(rpc::current().session()).contexts; }
CONVOY_RPC(contexts_here);

namespace {

void run_root(int n, const std::function<void(Session&)>& function) {
  RankGroup(n, RankMode::kThreads).run([&](Rank& r) {
    rpc::SessionOptions options;
    options.rank = r.id();
    options.size = r.size();
    options.store = r.store();
    Session session(options);
    if (r.id() == 0) function(session);
    session.shutdown();
    EXPECT_EQ(autograd::stats(session).contexts, 0U);
  });
}

// An optimizer of this worker's own tensors.
LocalOptimizerPtr make_here(const Session& session, const std::vector<at::Tensor>& parameters,
                            const OptimizerRule& rule) {
  std::vector<detail::OwnedParameter> owned;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    owned.push_back({session.rref(parameters[i]), i, 0, "parameter " + std::to_string(i)});
  }
  return detail::make_optimizer_in(session, 1, owned, {1, {rule}});
}
at::Tensor leaf(const at::Tensor& value) { return value.clone().requires_grad_(true); }
at::Tensor numbers(std::int64_t count, double seed, at::ScalarType type) {
  const auto real = torch::sin(torch::arange(count, torch::kDouble) * 0.7 + seed);
  return at::isComplexType(type)
             ? torch::complex(real, torch::cos(torch::arange(count, torch::kDouble) + seed))
                   .to(type)
             : real.to(type);
}
void expect_equal(const at::Tensor& got, const at::Tensor& wanted) {
  EXPECT_TRUE(at::equal(got, wanted)) << got << "\n instead of\n" << wanted;
}
std::vector<OptimizerRule> all_rules() {
  return {Sgd{.lr = 0.05, .momentum = 0.9},
          Adam{.lr = 0.05, .amsgrad = true},
          AdamW{.lr = 0.05},
          Adagrad{.lr = 0.05, .initial_accumulator_value = 0.1},
          RmsProp{.lr = 0.05, .momentum = 0.5, .centered = true},
          Adadelta{.lr = 0.5},
          Adamax{.lr = 0.05},
          Rprop{.lr = 0.05}};
}

// --- gradients as they come ---

// Parameters of this worker and of another, stepped in backward and apart, beside libtorch's.
TEST(LocalOptimizerTest, ComplexAndDoubles) {
  run_root(2, [](Session& session) {
    for (const auto type : {torch::kDouble, torch::kComplexFloat, torch::kComplexDouble}) {
      for (const bool in_backward : {false, true}) {
        SCOPED_TRACE(testing::Message() << type << (in_backward ? ", in backward" : ""));
        const auto mine = leaf(numbers(5, 0, type));
        const auto theirs = session.remote<make_copy>("worker1", numbers(5, 1, type));
        const DistributedOptimizer optimizer(session, {session.rref(mine), theirs},
                                             Sgd{.lr = 0.05, .momentum = 0.9});
        const std::vector<at::Tensor> plain{leaf(numbers(5, 0, type)), leaf(numbers(5, 1, type))};
        torch::optim::SGD reference(plain, torch::optim::SGDOptions(0.05).momentum(0.9));
        for (int step = 0; step < 4; ++step) {
          const auto x = numbers(5, 2 + step, type), y = numbers(5, 3 + step, type);
          {
            const Context context(session);
            const auto loss =
                distance(mine, x, y) + session.rpc_sync<distance_of>("worker1", theirs, x, y);
            context.backward({loss},
                             {.optimizers = in_backward ? std::vector{optimizer.in_backward()}
                                                        : std::vector<autograd::StepId>()});
            if (!in_backward) optimizer.step(context);
          }
          reference.zero_grad();
          (distance(plain[0], x, y) + distance(plain[1], x, y)).backward();
          reference.step();
        }
        const double tolerance = type == torch::kComplexFloat ? 1e-6 : 1e-13;
        EXPECT_TRUE(at::allclose(mine, plain[0], tolerance, tolerance)) << mine << plain[0];
        const auto got = session.rpc_sync<value_of>("worker1", theirs);
        EXPECT_TRUE(at::allclose(got, plain[1], tolerance, tolerance)) << got << plain[1];
      }
    }
  });
}

// To every rule a complex number is a pair of real ones, as to those of torch.optim.
TEST(LocalOptimizerTest, ComplexNumbersArePairs) {
  run_root(1, [](Session& session) {
    for (const OptimizerRule& rule : all_rules()) {
      SCOPED_TRACE(describe(rule));
      const auto w = leaf(numbers(5, 0, torch::kComplexDouble));
      const auto pairs = leaf(torch::view_as_real(w.detach()));
      const DistributedOptimizer optimizer(session, {session.rref(w), session.rref(pairs)}, rule);
      for (int step = 0; step < 3; ++step) {
        const auto x = numbers(5, 2 + step, torch::kComplexDouble);
        const Context context(session);
        context.backward(
            {distance(w, x, 2 * x) + distance(torch::view_as_complex(pairs), x, 2 * x)});
        optimizer.step(context);
      }
      expect_equal(torch::view_as_real(w.detach()), pairs.detach());
    }
  });
}

// Lazy conjugates and negatives: gradients, parameters, and values of sparse gradients.
TEST(LocalOptimizerTest, LazyTensors) {
  run_root(1, [](Session& session) {
    const auto one = numbers(6, 1, torch::kComplexDouble);
    const auto zero = torch::zeros({6}, torch::kComplexDouble);
    const auto a = leaf(zero), b = leaf(zero), c = leaf(zero.reshape({3, 2}));
    const auto d = zero.clone().conj().detach().requires_grad_(true);
    ASSERT_TRUE(d.is_conj());
    const auto optimizer = make_here(session, {a, b, c, d}, Sgd{.lr = 1});
    const auto rows = at::_sparse_coo_tensor_unsafe(
        torch::tensor({{2, 0}}), one.slice(0, 0, 4).reshape({2, 2}).conj(), {3, 2});
    const auto step = optimizer->step(
        Gradients({{a, one.conj()}, {b, at::_neg_view(one)}, {c, rows}, {d, one}}), {});
    EXPECT_EQ(step.stepped, 4U);
    expect_equal(a.detach(), -one.conj().resolve_conj());
    expect_equal(b.detach(), one);
    expect_equal(c.detach().reshape({6}),
                 -torch::cat({one.slice(0, 2, 4), zero.slice(0, 0, 2), one.slice(0, 0, 2)})
                      .conj()
                      .resolve_conj());
    expect_equal(d.detach().resolve_conj(), -one);
  });
}

// Zeros without memory (ZeroTensor).
TEST(LocalOptimizerTest, ZeroTensors) {
  run_root(1, [](Session& session) {
    for (const OptimizerRule& rule : all_rules()) {
      SCOPED_TRACE(describe(rule));
      const auto a = leaf(torch::ones({3})), b = leaf(torch::ones({3}));
      const auto optimizer = make_here(session, {a, b}, rule);
      for (int step = 0; step < 3; ++step) {
        const auto zeros = torch::zeros({3});
        const auto lazy = at::_efficientzerotensor({3}, zeros.options());
        optimizer->step(step == 1 ? Gradients({{a, torch::ones({3})}, {b, torch::ones({3})}})
                                  : Gradients({{a, lazy}, {b, zeros}}),
                        {});
      }
      expect_equal(a.detach(), b.detach());
    }
  });
}

// A parameter that gets other data: laid out in another way, of other sizes, of another type.
TEST(LocalOptimizerTest, ReplacedData) {
  run_root(1, [](Session& session) {
    for (const OptimizerRule& rule : all_rules()) {
      SCOPED_TRACE(describe(rule));
      const auto twin = leaf(torch::ones({2, 3})), replaced = leaf(torch::ones({2, 3})),
                 first = leaf(torch::zeros({1}));
      const auto beside = make_here(session, {twin}, rule);
      const auto optimizer = make_here(session, {first, replaced}, rule);
      for (int step = 0; step < 3; ++step) {
        const auto g = torch::arange(6, torch::kFloat).reshape({2, 3}) - step;
        beside->step(Gradients({{twin, g}}), {});
        optimizer->step(Gradients({{replaced, g}}), {});
        replaced.set_data(step == 0 ? replaced.detach().t().contiguous().t()
                                    : replaced.detach().contiguous());
        expect_equal(replaced.detach(), twin.detach());
      }
      for (const auto& data : {torch::ones({50}), torch::ones({2, 3}, torch::kDouble),
                               torch::ones({2, 3}, torch::kHalf)}) {
        replaced.set_data(data);
        const auto gradients =
            Gradients({{first, torch::ones({1})}, {replaced, torch::ones_like(data)}});
        expect_error(ErrorKind::kInvalidArgument, "parameter 1: it is now ",
                     [&] { optimizer->step(gradients, {}); });
        expect_equal(replaced.detach(), torch::ones_like(data));
        expect_equal(first.detach(), torch::zeros({1}));
      }
    }
    // Without any state.
    const auto parameter = leaf(torch::ones({3}));
    const auto plain = make_here(session, {parameter}, Sgd{.lr = 1});
    parameter.set_data(torch::ones({3}, torch::kHalf));
    expect_error(ErrorKind::kInvalidArgument, "parameter 0: it is now Half", [&] {
      plain->step(Gradients({{parameter, torch::ones({3}, torch::kHalf)}}), {});
    });
    parameter.set_data(torch::ones({5}));
    plain->step(Gradients({{parameter, torch::ones({5})}}), {});
    expect_equal(parameter.detach(), torch::zeros({5}));
  });
}

// --- all, or none ---

// Looked at before the first parameter is changed.
TEST(LocalOptimizerTest, RowsThatAreNotThere) {
  run_root(1, [](Session& session) {
    const auto first = leaf(torch::zeros({2})), table = leaf(torch::zeros({3, 2}));
    for (const double momentum : {0.0, 0.5}) {  // by rows, and as a dense one
      const auto optimizer = make_here(session, {first, table}, Sgd{.lr = 1, .momentum = momentum});
      for (const std::int64_t row : {3, -1}) {
        const auto rows =
            at::_sparse_coo_tensor_unsafe(torch::tensor({{1L, row}}), torch::ones({2, 2}), {3, 2});
        const auto gradients = Gradients({{first, torch::ones({2})}, {table, rows}});
        expect_error(ErrorKind::kInvalidArgument,
                     "parameter 1: its sparse gradient has index " + std::to_string(row) +
                         " in dimension 0 of size 3",
                     [&] { optimizer->step(gradients, {}); });
      }
    }
    expect_equal(first.detach(), torch::zeros({2}));
    expect_equal(table.detach(), torch::zeros({3, 2}));
  });
}

// The first optimizer of a pass steps, the second refuses: neither has. They share a parameter, so
// that they take one turn.
TEST(LocalOptimizerTest, AllOptimizersOfAPassOrNone) {
  run_root(2, [](Session& session) {
    const auto zeros = torch::zeros({4, 2});
    const auto dense = session.remote<make_copy>("worker1", zeros);
    const auto table = session.remote<make_copy>("worker1", zeros);
    const DistributedOptimizer first(session, {dense}, Sgd{.lr = 1, .momentum = 0.5});
    const DistributedOptimizer second(session, {dense, table}, Adam{.lr = 0.5});
    const auto pass = [&](const at::Tensor& more) {
      const Context context(session);
      context.backward({session.rpc_sync<product_of>("worker1", dense, torch::ones({4, 2})) + more},
                       {.optimizers = {first.in_backward(), second.in_backward()}});
    };
    try {
      const Context context(session);
      const auto loss = session.rpc_sync<product_of>("worker1", dense, torch::ones({4, 2})) +
                        session.rpc_sync<row_of>("worker1", table, 1);
      context.backward({loss}, {.optimizers = {first.in_backward(), second.in_backward()}});
      ADD_FAILURE() << "it did not fail";
    } catch (const rpc::RemoteError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("parameter 1: its gradient is sparse"), std::string::npos) << text;
      EXPECT_NE(text.find("[not stepped: worker0, worker1]"), std::string::npos) << text;
    }
    expect_equal(session.rpc_sync<value_of>("worker1", dense), zeros);
    expect_equal(session.rpc_sync<value_of>("worker1", table), zeros);
    // As if it had never been tried: a first step of SGD, and a first one of Adam behind it.
    pass(torch::zeros({}).requires_grad_(true) * 1);
    const auto wanted = leaf(zeros - 1);
    torch::optim::Adam adam({wanted}, torch::optim::AdamOptions(0.5));
    wanted.mutable_grad() = torch::ones({4, 2});
    adam.step();
    const auto got = session.rpc_sync<value_of>("worker1", dense);
    EXPECT_TRUE(at::allclose(got, wanted)) << got;
  });
}

TEST(LocalOptimizerTest, OneThatIsListedTwice) {
  run_root(1, [](Session& session) {
    const auto parameter = leaf(torch::zeros({2}));
    const DistributedOptimizer optimizer(session, {session.rref(parameter)}, Sgd{.lr = 1});
    const Context context(session);
    context.backward({parameter.sum()},
                     {.optimizers = {optimizer.in_backward(), optimizer.in_backward()}});
    expect_equal(parameter.detach(), torch::full({2}, -1.0));
  });
}

// What nobody could foresee: whoever had begun is not said to have stepped nothing.
TEST(LocalOptimizerTest, AStepThatFailsInTheMiddle) {
  run_root(2, [](Session& session) {
    for (const bool in_backward : {false, true}) {
      const auto good = session.remote<make_copy>("worker1", torch::zeros({2}));
      const auto locked = session.remote<make_copy>("worker1", torch::zeros({2}));
      const DistributedOptimizer optimizer(session, {good, locked}, Sgd{.lr = 1});
      const Context context(session);
      const auto loss = session.rpc_sync<product_of>("worker1", good, torch::ones({2})) +
                        session.rpc_sync<product_of>("worker1", locked, torch::ones({2}));
      session.rpc_sync<lock_memory>("worker1", locked);
      try {
        if (in_backward) {
          context.backward({loss}, {.optimizers = {optimizer.in_backward()}});
        } else {
          context.backward({loss});
          optimizer.step(context);
        }
        ADD_FAILURE() << "it did not fail";
      } catch (const rpc::RemoteError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find(in_backward ? "[stepped: worker1; not stepped: worker0]"
                                        : "after 1 of 2 parameters, parameter 1: "),
                  std::string::npos)
            << text;
        const auto* const failed = dynamic_cast<const StepError*>(&error);
        ASSERT_EQ(failed == nullptr, in_backward);
        if (failed) {
          EXPECT_EQ(failed->owners().at(0).state, State::kUnknown) << text;
        }
      }
      expect_equal(session.rpc_sync<value_of>("worker1", good), torch::full({2}, -1.0));
    }
  });
}

// --- contexts ---

// One that this worker has had no part in has no gradients; one that is over is an error.
TEST(LocalOptimizerTest, ReleasedContexts) {
  run_root(2, [](Session& session) {
    const auto mine = leaf(torch::zeros({2}));
    const auto here = make_here(session, {mine}, Sgd{.lr = 1});
    const auto theirs = session.remote<make_copy>("worker1", torch::zeros({2}));
    const auto there = session.remote<detail::make_local_optimizer>(
        "worker1", autograd::StepId{2},
        std::vector<detail::OwnedParameter>{{theirs, 0, 0, "parameter 0"}},
        detail::RuleList{1, {Sgd{.lr = 1}}});
    const auto step_there = [&](autograd::ContextId id) {
      return there.rpc_sync<&detail::LocalOptimizer::step_here>(id, detail::RuleList());
    };
    std::optional<autograd::ContextId> released;
    {
      const Context context(session);
      released = context.id();
      context.backward({session.rpc_sync<product_of>("worker1", theirs, leaf(torch::ones({2})))});
      EXPECT_EQ(here->step_in(session, context.id(), {}).stepped, 0U);  // of another leaf
      EXPECT_EQ(step_there(context.id()).stepped, 1U);
    }
    const auto deadline = Deadline::after(30s);
    while (!deadline.expired() && session.rpc_sync<contexts_here>("worker1") != 0) {
    }
    expect_error(ErrorKind::kInvalidArgument, "has been released",
                 [&] { here->step_in(session, *released, {}); });
    expect_error(ErrorKind::kRemote, "has been released", [&] { step_there(*released); });
    const Context other(session);
    const auto none = step_there(other.id());
    EXPECT_EQ(none.stepped, 0U);
    EXPECT_EQ(none.skipped, 1U);
  });
}

// --- several trainers ---

// Threads that share one optimizer, and so its momentum: gradients are alike, so that any order
// gives what one thread gives. A lost update of the state would show.
TEST(LocalOptimizerTest, ConcurrentStepsOfOneState) {
  constexpr int kThreads = 3, kSteps = 20;
  constexpr std::int64_t kSize = 50'000;
  run_root(2, [](Session& session) {
    const auto parameter = session.remote<make_copy>("worker1", torch::zeros({kSize}));
    const DistributedOptimizer optimizer(session, {parameter}, Sgd{.lr = 1, .momentum = 1});
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kSteps; ++i) {
          const Context context(session);
          const auto loss =
              session.rpc_sync<product_of>("worker1", parameter, torch::ones({kSize}));
          if ((i + t) % 2 == 0) {
            context.backward({loss}, {.optimizers = {optimizer.in_backward()}});
          } else {
            context.backward({loss});
            optimizer.step(context);
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    // Velocities 1, 2, 3, ...
    constexpr double kAll = kThreads * kSteps;
    expect_equal(session.rpc_sync<value_of>("worker1", parameter),
                 torch::full({kSize}, -kAll * (kAll + 1) / 2));
  });
}

}  // namespace
}  // namespace convoy::local_optimizer_test
