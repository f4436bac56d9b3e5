// Optimizers over RPC: the scenarios of PyTorch's dist_optimizer_test.py, whose names stand behind
// them, and what PyTorch does not have.
#include "convoy/distributed_optimizer.h"

#include <signal.h>
#include <torch/torch.h>

#include <array>
#include <atomic>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "optim/optimizer_rule.h"
#include "optim/step_turns.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::distributed_optimizer_test {

using autograd::Context;
using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using rpc::Session;
using State = OwnerStep::State;
using Parameters = std::vector<RRef<at::Tensor>>;
using namespace std::chrono_literals;

// f(a i + b)
at::Tensor waves(std::int64_t count, double a, double b, at::Tensor (*f)(const at::Tensor&)) {
  return f(a * torch::arange(count, torch::kDouble) + b).to(torch::kFloat);
}
at::Tensor weight(int which) {
  return (which == 1 ? waves(9, 0.7, 0.3, at::sin) : waves(9, 0.4, 0.9, at::cos)).reshape({3, 3});
}

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int which, bool requires_grad = true)
      : w(register_parameter("w", weight(which), requires_grad)) {}
  at::Tensor forward(const at::Tensor& x) { return w.mm(x); }
  at::Tensor parameter() { return w; }
  at::Tensor w;
};
TORCH_MODULE(Layer);
Layer make_layer(int which, bool requires_grad) { return Layer(which, requires_grad); }
CONVOY_RPC(make_layer);
CONVOY_RPC(&LayerImpl::forward);
CONVOY_RPC(&LayerImpl::parameter);

at::Tensor make_parameter(const std::vector<std::int64_t>& sizes) {
  return torch::zeros(sizes).requires_grad_(true);
}
CONVOY_RPC(make_parameter);
at::Tensor make_computed() { return torch::ones({3}).requires_grad_(true) * 2; }
CONVOY_RPC(make_computed);
at::Tensor make_numbers() { return torch::ones({3}, torch::kLong); }
CONVOY_RPC(make_numbers);
at::Tensor make_nothing() { throw std::runtime_error("no such parameter"); }
CONVOY_RPC(make_nothing);
// Computed at the owner.
at::Tensor times(const RRef<at::Tensor>& parameter, const at::Tensor& factor) {
  return (parameter.local_value() * factor).sum();
}
CONVOY_RPC(times);
at::Tensor rows_of(const RRef<at::Tensor>& table, const at::Tensor& rows) {
  return torch::embedding(table.local_value(), rows, -1, false, /*sparse=*/true);
}
CONVOY_RPC(rows_of);
at::Tensor rows_of_table(const at::Tensor& table, const at::Tensor& rows) {
  return torch::embedding(table, rows, -1, false, /*sparse=*/true);
}
CONVOY_RPC(rows_of_table);
bool has_gradient(const RRef<at::Tensor>& parameter) {
  return parameter.local_value().grad().defined();
}
CONVOY_RPC(has_gradient);

// Workers are threads: a tensor of one of them that all see.
at::Tensor& watched() {
  static at::Tensor one;
  return one;
}
void watch(const RRef<at::Tensor>& parameter) { watched() = parameter.local_value().detach(); }
CONVOY_RPC(watch);
// Its backward fails, once that one was stepped.
struct FailsAfterStep : torch::autograd::Function<FailsAfterStep> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    const auto deadline = Deadline::after(30s);
    while (!deadline.expired() && watched()._version() == 0) std::this_thread::yield();
    throw std::runtime_error("after the step");
  }
};
at::Tensor times_failing(const RRef<at::Tensor>& parameter, const at::Tensor& factor) {
  return FailsAfterStep::apply(times(parameter, factor));
}
CONVOY_RPC(times_failing);

Parameters& shared() {
  static Parameters all;
  return all;
}
Parameters shared_parameters() { return shared(); }
CONVOY_RPC(shared_parameters);

// Keeps steps of a parameter waiting, until its process ends.
void hold_turn(const RRef<at::Tensor>& parameter) {
  std::atomic<bool> held{false};
  std::thread([&held, tensor = parameter.local_value()] {
    const StepTurns turns({tensor});
    const auto turn = turns.take();
    held = true;
    held.notify_one();
    for (;;) std::this_thread::sleep_for(1h);
  }).detach();
  held.wait(false);
}
CONVOY_RPC(hold_turn);

// Not in the middle of a step.
double first_element(const RRef<at::Tensor>& parameter) {
  const at::Tensor& tensor = parameter.local_value();
  const StepTurns turns({tensor});
  const auto turn = turns.take();
  return tensor.view(-1)[0].item<double>();
}
CONVOY_RPC(first_element);

namespace {

void run_all(int n, const std::function<void(Session&, int rank)>& function) {
  RankGroup(n, RankMode::kThreads).run([&](Rank& r) {
    rpc::SessionOptions options;
    options.rank = r.id();
    options.size = r.size();
    options.store = r.store();
    Session session(options);
    function(session, r.id());
    session.shutdown();
    EXPECT_EQ(autograd::stats(session).contexts, 0U);
  });
}
void run_root(int n, const std::function<void(Session&)>& function) {
  run_all(n, [&](Session& session, int rank) { rank == 0 ? function(session) : void(); });
}

at::Tensor input_of(int step) { return waves(9, 0.5, 0.2 + step, at::sin).reshape({3, 3}); }

// Two layers, one behind the other, on two workers.
struct TwoLayers {
  explicit TwoLayers(const Session& on, const std::string& owner1 = "worker1",
                     const std::string& owner2 = "worker2", bool trains2 = true)
      : session(on),
        first(on.remote<make_layer>(owner1, 1, true)),
        second(on.remote<make_layer>(owner2, 2, trains2)) {
    parameters = {first.remote<&LayerImpl::parameter>(), second.remote<&LayerImpl::parameter>()};
  }
  at::Tensor loss(int step) const {
    const auto y =
        second.rpc_sync<&LayerImpl::forward>(first.rpc_sync<&LayerImpl::forward>(input_of(step)));
    return (y + torch::ones({3, 3})).sum();
  }
  std::vector<OwnerStep> train(const DistributedOptimizer& optimizer, int step) const {
    const Context context(session);
    context.backward({loss(step)});
    return optimizer.step(context);
  }
  at::Tensor weights() const {
    return torch::cat(
        {parameters[0].to_here().detach().flatten(), parameters[1].to_here().detach().flatten()});
  }

  const Session& session;
  RRef<Layer> first, second;
  Parameters parameters;
};

void expect_equal(const at::Tensor& got, const at::Tensor& wanted) {
  EXPECT_TRUE(at::equal(got, wanted)) << got << "\n instead of\n" << wanted;
}

struct Configuration {
  OptimizerRule rule;
  std::array<float, 18> expected;  // what Python's torch.optim (2.13) makes of both in three steps
};
const std::vector<Configuration>& configurations() {
  static const std::vector<Configuration> all{
      {Adagrad{.lr = 0.05},
       {0.404837936F, 0.850321949F, 0.876093209F, 0.78730619F, 0.0480479077F, -0.730694234F,
        -0.870807588F, -0.871062875F, -0.48794651F, 0.657326579F, 0.155451477F, -0.0828027725F,
        -0.469129503F, -0.913190901F, -0.924916387F, -0.951763153F, -0.960147321F, -0.528782248F}},
      {Adam{.lr = 1e-2, .amsgrad = true},
       {0.32472527F, 0.856061637F, 0.962470829F, 0.704717398F, 0.0560997725F, -0.641103566F,
        -0.948280573F, -0.868601084F, -0.403145403F, 0.622406363F, 0.238243848F, -0.105777748F,
        -0.504049718F, -0.83039856F, -0.947891414F, -0.986683369F, -0.87735498F, -0.551757216F}},
      {AdamW{.lr = 0.05, .amsgrad = true},
       {0.440052778F, 0.910887063F, 0.845520377F, 0.820574522F, 0.110824466F, -0.756756842F,
        -0.830034196F, -0.804611862F, -0.519720852F, 0.621885955F, 0.121370792F, -0.0164638832F,
        -0.502881229F, -0.945669413F, -0.857314944F, -0.984791279F, -0.99255538F, -0.461774707F}},
      {Sgd{.lr = 0.05},
       {0.555981755F, 0.83904618F, 0.730860293F, 1.16857934F, -0.0975870192F, -1.12466276F,
        -0.601067007F, -0.836649418F, -0.743718147F, 0.799925625F, -0.158212885F, -0.0275713652F,
        -0.326530457F, -1.22685528F, -0.869685054F, -0.809164166F, -1.2738117F, -0.473550826F}},
      {Sgd{.lr = 1e-3, .momentum = 1, .weight_decay = 1, .nesterov = true},
       {0.308219999F, 0.837081611F, 0.967849493F, 0.693904638F, 0.0460117385F, -0.630190969F,
        -0.93953228F, -0.869261384F, -0.398848325F, 0.62464726F, 0.242508247F, -0.113801278F,
        -0.491688728F, -0.816533446F, -0.948349357F, -0.969986379F, -0.863068044F, -0.555774093F}},
      {Adadelta{.rho = 0.95},
       {0.30820176F, 0.840784848F, 0.977830529F, 0.688209534F, 0.0408447236F, -0.625774562F,
        -0.964871705F, -0.884111822F, -0.387704968F, 0.629883707F, 0.254486531F, -0.12452586F,
        -0.496572375F, -0.814155877F, -0.966639519F, -0.979206026F, -0.861112297F, -0.570505321F}},
      {RmsProp{.lr = 0.05},
       {1.52787054F, 0.760243893F, -0.293547153F, 1.91557074F, -0.0123252273F, -1.90899301F,
        -0.265341878F, -0.593383789F, -1.16764116F, 0.252023399F, -0.927038074F, -0.0535892248F,
        -0.874432683F, -1.99568045F, -0.895702958F, -1.35706627F, -2.04263687F, -0.499568701F}},
      {Adamax{.lr = 0.05},
       {0.417510569F, 0.905664146F, 0.871499836F, 0.799629152F, 0.105296262F, -0.734234095F,
        -0.849591255F, -0.814528286F, -0.498796225F, 0.608816385F, 0.14405106F, -0.0328198932F,
        -0.517639637F, -0.924591362F, -0.874933541F, -1.00027335F, -0.971547782F, -0.478799373F}},
      {Rprop{.lr = 0.05},
       {0.477520227F, 0.866470993F, 0.809664786F, 0.857463241F, 0.0665806606F, -0.793857932F,
        -0.795530081F, -0.858454645F, -0.555876672F, 0.59660995F, 0.0854988173F, -0.0188445002F,
        -0.529846132F, -0.983143628F, -0.860958159F, -1.01247978F, -1.03009999F, -0.464823961F}},
  };
  return all;
}

TEST(DistributedOptimizerTest, AsPythons) {  // test_dist_optim
  run_all(4, [](Session& session, int rank) {
    const auto name = [](int worker) { return "worker" + std::to_string(worker % 4); };
    for (const auto& [rule, expected] : configurations()) {
      SCOPED_TRACE(describe(rule));
      const TwoLayers layers(session, name(rank + 1), name(rank + 2));
      const DistributedOptimizer optimizer(session, layers.parameters, rule);
      for (int step = 0; step < 3; ++step) layers.train(optimizer, step);
      const auto weights = layers.weights();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(weights[static_cast<std::int64_t>(i)].item<float>(), expected[i], 3e-6) << i;
      }
      EXPECT_FALSE(session.rpc_sync<has_gradient>(name(rank + 1), layers.parameters[0]));
    }
  });
}

TEST(DistributedOptimizerTest, WithoutGradients) {  // test_dist_optim_none_grads
  run_root(3, [](Session& session) {
    for (const OptimizerRule& rule :
         {OptimizerRule(Sgd{.lr = 0.05}), OptimizerRule(RmsProp{.lr = 0.05}),
          OptimizerRule(Rprop{.lr = 0.05}), OptimizerRule(Adadelta{.rho = 0.95})}) {
      const TwoLayers layers(session, "worker1", "worker2", /*trains2=*/false);
      const DistributedOptimizer optimizer(session, layers.parameters, rule);
      const auto before = layers.weights();
      const auto steps = layers.train(optimizer, 0);
      const auto after = layers.weights();
      EXPECT_FALSE(at::equal(before.slice(0, 0, 9), after.slice(0, 0, 9)));
      expect_equal(before.slice(0, 9), after.slice(0, 9));
      ASSERT_EQ(steps.size(), 2U);
      EXPECT_EQ(steps[0].worker, "worker1");
      EXPECT_EQ(steps[0].stepped, 1U);
      EXPECT_EQ(steps[1].worker, "worker2");
      EXPECT_EQ(steps[1].stepped, 0U);
      EXPECT_EQ(steps[1].skipped, 1U);
    }
  });
}

// A worker that had no part in the context; one that has none of the graph's.
TEST(DistributedOptimizerTest, OwnersWithoutAPart) {
  run_root(3, [](Session& session) {
    const auto used = session.remote<make_parameter>("worker1", std::vector<std::int64_t>{2});
    const auto unused = session.remote<make_parameter>("worker2", std::vector<std::int64_t>{2});
    const DistributedOptimizer optimizer(session, {used, unused}, Sgd{.lr = 1});
    const Context context(session);
    context.backward({session.rpc_sync<times>("worker1", used, torch::ones({2}))});
    optimizer.step(context);
    expect_equal(used.to_here(), torch::full({2}, -1.0));
    expect_equal(unused.to_here(), torch::zeros({2}));
    // Again, with the same gradients.
    optimizer.step(context);
    expect_equal(used.to_here(), torch::full({2}, -2.0));
  });
}

TEST(DistributedOptimizerTest, LocalParameters) {
  run_root(2, [](Session& session) {
    const auto mine = torch::ones({2}).requires_grad_(true);
    const auto theirs = session.remote<make_parameter>("worker1", std::vector<std::int64_t>{2});
    const DistributedOptimizer optimizer(session, {session.rref(mine), theirs}, Sgd{.lr = 0.5});
    EXPECT_EQ(optimizer.owners(), (std::vector<std::string>{"worker0", "worker1"}));
    const Context context(session);
    context.backward({session.rpc_sync<times>("worker1", theirs, mine * 2)});
    optimizer.step(context);
    expect_equal(mine.detach(), torch::ones({2}));  // its gradient is that of a parameter of zeros
    expect_equal(theirs.to_here().detach(), torch::full({2}, -1.0));
    EXPECT_FALSE(mine.grad().defined());
  });
}

TEST(DistributedOptimizerTest, GroupsAndLearningRates) {
  run_root(3, [](Session& session) {
    const std::vector<std::int64_t> sizes{2};
    const auto a = session.remote<make_parameter>("worker1", sizes);
    const auto b = session.remote<make_parameter>("worker2", sizes);
    const auto c = session.remote<make_parameter>("worker1", sizes);
    const DistributedOptimizer optimizer(
        session, {DistributedGroup{{a, b}, Sgd{.lr = 1}},
                  DistributedGroup{{c}, Sgd{.lr = 10, .maximize = true}, {"c"}}});
    const Context context(session);
    const auto one = torch::ones(sizes);
    context.backward({session.rpc_sync<times>("worker1", a, one) +
                      session.rpc_sync<times>("worker2", b, one) +
                      session.rpc_sync<times>("worker1", c, one)});
    const auto expect = [&](double at_a, double at_b, double at_c) {
      expect_equal(a.to_here().detach(), torch::full(sizes, at_a));
      expect_equal(b.to_here().detach(), torch::full(sizes, at_b));
      expect_equal(c.to_here().detach(), torch::full(sizes, at_c));
    };
    optimizer.step(context);
    expect(-1, -1, 10);
    optimizer.set_lr(0, 2);
    optimizer.step(context);
    expect(-3, -3, 20);
    optimizer.set_lr(4);
    optimizer.step(context);
    expect(-7, -7, 24);
    optimizer.step(context);
    expect(-11, -11, 28);
    optimizer.set_rule(1, Sgd{.lr = 1, .weight_decay = 1});
    optimizer.step(context);
    expect(-15, -15, 28 - (1 + 28));
    EXPECT_EQ(optimizer.groups(), 2U);
    EXPECT_EQ(std::get<Sgd>(optimizer.rule(0)).lr, 4);
    expect_error(ErrorKind::kInvalidArgument, "there is no group 2",
                 [&] { optimizer.set_lr(2, 1); });
    expect_error(ErrorKind::kInvalidArgument, "cannot change from SGD",
                 [&] { optimizer.set_rule(0, Adam{}); });
    expect_error(ErrorKind::kInvalidArgument, "lr must be >= 0, got -1",
                 [&] { optimizer.set_lr(-1); });
    optimizer.step(context);
    expect(-19, -19, -1);  // its gradient and its decay cancel
  });
}

TEST(DistributedOptimizerTest, SparseGradients) {
  run_root(2, [](Session& session) {
    const auto rows = torch::tensor({1, 4, 1});
    const auto train = [&](const OptimizerRule& rule, int steps) {
      const auto table = session.remote<make_parameter>("worker1", std::vector<std::int64_t>{6, 2});
      const DistributedOptimizer optimizer(session, {table}, rule);
      for (int i = 0; i < steps; ++i) {
        const Context context(session);
        context.backward({session.rpc_sync<rows_of>("worker1", table, rows + i % 2).sum()});
        optimizer.step(context);
      }
      return table.to_here().detach();
    };
    // Beside plain arithmetic.
    auto expected = torch::zeros({6, 2});
    expected[1] = -4, expected[2] = -2, expected[4] = -2, expected[5] = -1;
    expect_equal(train(Sgd{.lr = 1}, 3), expected);
    expected = torch::zeros({6, 2});
    // The momentum goes on in rows that have no gradient: 2, 0 + 1, 2 + 0.5 of row 1.
    expected[1] = -2 - 1 - 2.5, expected[4] = -1 - 0.5 - 1.25;
    expected[2] = -2 - 1, expected[5] = -1 - 0.5;
    expect_equal(train(Sgd{.lr = 1, .momentum = 0.5}, 3), expected);
    const auto adagrad = train(Adagrad{.lr = 1, .eps = 0}, 2);
    expected = torch::zeros({6, 2});
    expected[1] = expected[4] = expected[2] = expected[5] = -1;
    EXPECT_TRUE(at::allclose(adagrad, expected)) << adagrad;
    expect_error(ErrorKind::kRemote, "parameter 0: its gradient is sparse, which Adam",
                 [&] { train(Adam{}, 1); });
  });
}

// A sparse gradient that another worker computes, of a table here.
TEST(DistributedOptimizerTest, SparseGradientsOfOthers) {
  run_root(2, [](Session& session) {
    const auto table = torch::zeros({6, 2}).requires_grad_(true);
    const DistributedOptimizer optimizer(session, {session.rref(table)}, Sgd{.lr = 1});
    for (const auto mode : {autograd::Mode::kSmart, autograd::Mode::kFast}) {
      const Context context(session);
      const auto rows = session.rpc_sync<rows_of_table>("worker1", table, torch::tensor({1, 1, 4}));
      context.backward({rows.sum()}, {.mode = mode});
      EXPECT_TRUE(context.gradients().at(table).is_sparse());
      optimizer.step(context);
    }
    auto expected = torch::zeros({6, 2});
    expected[1] = -4, expected[4] = -2;
    expect_equal(table.detach(), expected);
  });
}

TEST(DistributedOptimizerTest, ErrorsOfConstruction) {  // test_dist_optim_exception_on_constructor
  run_root(3, [](Session& session) {
    const auto good = session.remote<make_parameter>("worker1", std::vector<std::int64_t>{2});
    const auto expect = [&](const Parameters& parameters, const char* worker, const char* text) {
      try {
        const DistributedOptimizer optimizer(session, parameters, Sgd{});
        ADD_FAILURE() << "it was made: " << text;
      } catch (const rpc::RemoteError& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kRemote) << error.what();
        EXPECT_EQ(error.worker(), worker) << error.what();
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
      }
    };
    expect({good, session.remote<make_computed>("worker2")}, "worker2",
           "parameter 1: can't optimize a non-leaf Tensor");
    expect({session.remote<make_numbers>("worker2"), good}, "worker2",
           "parameter 0: it is of Long");
    expect({good, session.remote<make_nothing>("worker2")}, "worker2", "no such parameter");
    expect({good, good}, "worker1", "parameter 1: it is the same tensor as parameter 0");
    const auto mine = session.rref(torch::ones({2}).requires_grad_(true) * 2);
    expect({good, mine}, "worker0", "parameter 1: can't optimize a non-leaf Tensor");
    expect_error(ErrorKind::kInvalidArgument, "empty parameter list",
                 [&] { const DistributedOptimizer none(session, Parameters(), Sgd{}); });
    expect_error(ErrorKind::kInvalidArgument, "parameter 1 is an empty reference",
                 [&] { const DistributedOptimizer none(session, Parameters{good, {}}, Sgd{}); });
    expect_error(ErrorKind::kInvalidArgument, "momentum must be >= 0, got -1", [&] {
      const DistributedOptimizer none(session, Parameters{good}, Sgd{.momentum = -1});
    });
    expect_error(ErrorKind::kInvalidArgument, "1 parameters, but 2 names", [&] {
      const DistributedOptimizer none(session, {DistributedGroup{{good}, Sgd{}, {"a", "b"}}});
    });
  });
}

TEST(DistributedOptimizerTest, ErrorsOfSteps) {  // test_dist_optim_exception
  run_root(3, [](Session& session) {
    const auto dense = session.remote<make_parameter>("worker1", std::vector<std::int64_t>{6, 2});
    const auto table = session.remote<make_parameter>("worker2", std::vector<std::int64_t>{6, 2});
    const auto other = session.remote<make_parameter>("worker2", std::vector<std::int64_t>{6, 2});
    const auto one = torch::ones({6, 2});
    const DistributedOptimizer optimizer(
        session, {DistributedGroup{{dense, other, table}, Adam{}, {"fc", "other", "table"}}});
    Context context(session);
    context.backward({session.rpc_sync<times>("worker1", dense, one) +
                      session.rpc_sync<times>("worker2", other, one) +
                      session.rpc_sync<rows_of>("worker2", table, torch::tensor({1})).sum()});
    try {
      optimizer.step(context);
      ADD_FAILURE() << "it did not fail";
    } catch (const StepError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kRemote);
      EXPECT_EQ(error.worker(), "worker2");
      const std::string text = error.what();
      EXPECT_NE(text.find("the step failed on worker2"), std::string::npos) << text;
      EXPECT_NE(text.find("table: its gradient is sparse"), std::string::npos) << text;
      EXPECT_NE(text.find("[stepped: worker1 (1 parameter); not stepped: worker2]"),
                std::string::npos)
          << text;
      ASSERT_EQ(error.owners().size(), 2U);
      EXPECT_EQ(error.owners()[0].state, State::kStepped);
      EXPECT_EQ(error.owners()[1].state, State::kNotStepped);
      EXPECT_NE(error.owners()[1].error, "");
    }
    EXPECT_FALSE(at::equal(dense.to_here(), torch::zeros({6, 2})));
    expect_equal(other.to_here().detach(), torch::zeros({6, 2}));  // none, if not all
  });
}

TEST(DistributedOptimizerTest, Contexts) {
  run_root(2, [](Session& session) {
    const auto parameter = session.remote<make_parameter>("worker1", std::vector<std::int64_t>{2});
    const DistributedOptimizer optimizer(session, {parameter}, Sgd{});
    std::optional<autograd::ContextRef> released;
    {
      const Context context(session);
      released = context;
    }
    expect_error(ErrorKind::kInvalidArgument, "Could not find autograd context with id",
                 [&] { optimizer.step(*released); });
  });
}

// Of all rules.
TEST(DistributedOptimizerTest, StateRoundTrip) {
  run_root(3, [](Session& session) {
    for (const OptimizerRule& rule :
         {OptimizerRule(Sgd{.lr = 0.05, .momentum = 0.9, .dampening = 0.1}),
          OptimizerRule(Adam{.lr = 0.05}), OptimizerRule(AdamW{.lr = 0.05, .amsgrad = true}),
          OptimizerRule(Adagrad{.lr = 0.05, .lr_decay = 0.1, .initial_accumulator_value = 0.1}),
          OptimizerRule(RmsProp{.lr = 0.05, .momentum = 0.5, .centered = true}),
          OptimizerRule(Adadelta{.rho = 0.95}), OptimizerRule(Adamax{.lr = 0.05}),
          OptimizerRule(Rprop{.lr = 0.05})}) {
      SCOPED_TRACE(describe(rule));
      const TwoLayers straight(session), resumed(session);
      const DistributedOptimizer one(session, straight.parameters, rule);
      std::stringstream whole, of_first, of_second;
      {
        const DistributedOptimizer before(session, resumed.parameters, rule);
        for (int step = 0; step < 2; ++step) {
          straight.train(one, step);
          resumed.train(before, step);
        }
        const auto write = [&](std::ostream& to, const auto&... owner) {
          torch::serialize::OutputArchive archive;
          before.save(archive, owner...);
          archive.save_to(to);
        };
        write(whole);
        write(of_first, "worker1");
        write(of_second, "worker2");
      }
      const auto read = [](std::istream& from) {
        torch::serialize::InputArchive archive;
        archive.load_from(from);
        return archive;
      };
      const DistributedOptimizer after(session, resumed.parameters, rule);
      auto archive = read(whole);
      after.load(archive);
      straight.train(one, 2);
      resumed.train(after, 2);
      expect_equal(resumed.weights(), straight.weights());

      // By owner.
      auto first = read(of_first), second = read(of_second);
      expect_error(ErrorKind::kInvalidArgument, "no parameter", [&] { after.load(first); });
      expect_error(ErrorKind::kInvalidArgument, "no parameter",
                   [&] { after.load(first, "worker2"); });
      expect_error(ErrorKind::kInvalidArgument, "worker9 has none of its parameters",
                   [&] { after.load(first, "worker9"); });
      const TwoLayers again(session);
      const DistributedOptimizer fresh(session, again.parameters, rule);
      for (int step = 0; step < 2; ++step) again.train(fresh, step);
      const DistributedOptimizer by_owner(session, again.parameters, rule);
      by_owner.load(first, "worker1");
      by_owner.load(second, "worker2");
      again.train(by_owner, 2);
      expect_equal(again.weights(), straight.weights());

      // Of something else: nothing changes.
      const bool is_adagrad = std::holds_alternative<Adagrad>(rule);
      const DistributedOptimizer other(session, straight.parameters,
                                       is_adagrad ? OptimizerRule(Sgd{}) : Adagrad{});
      auto others = read(whole.seekg(0));
      expect_error(ErrorKind::kInvalidArgument, "with another rule", [&] { other.load(others); });
      const DistributedOptimizer half(session, {straight.parameters[0]}, rule);
      expect_error(ErrorKind::kInvalidArgument, "the archive has 2 parameters, not 1",
                   [&] { half.load(others); });
    }
  });
}

// Trainers on all workers, each with its own optimizer of the same parameters and so its own
// momentum. What they add up to does not depend on their order: a lost update would show.
TEST(DistributedOptimizerTest, ConcurrentTrainers) {
  constexpr int kTrainers = 3, kSteps = 20;
  constexpr std::int64_t kSize = 50'000;
  RankGroup(kTrainers, RankMode::kThreads).run([&](Rank& r) {
    rpc::SessionOptions options;
    options.rank = r.id();
    options.size = r.size();
    options.store = r.store();
    Session session(options);
    if (r.id() == 0) {
      shared() = {session.rref(torch::zeros({kSize}).requires_grad_(true)),
                  session.remote<make_parameter>("worker1", std::vector<std::int64_t>{kSize})};
      shared()[1].created().wait();
    }
    r.barrier();
    const auto parameters = session.rpc_sync<shared_parameters>("worker0");
    const DistributedOptimizer optimizer(session, parameters, Sgd{.lr = 1, .momentum = 1});
    for (int i = 0; i < kSteps; ++i) {
      const Context context(session);
      const auto factor = torch::full({kSize}, static_cast<double>(1 + r.id()));
      context.backward({session.rpc_sync<times>("worker0", parameters[0], factor) +
                        session.rpc_sync<times>("worker1", parameters[1], factor)});
      optimizer.step(context);
    }
    r.barrier();
    // One trainer after the other: velocities of 1, 2, ... kSteps times its gradient.
    const double sum = -kSteps * (kSteps + 1) / 2.0 * (1 + 2 + 3);
    expect_equal(parameters[0].to_here().detach(), torch::full({kSize}, sum));
    expect_equal(parameters[1].to_here().detach(), torch::full({kSize}, sum));
    r.barrier();
    if (r.id() == 0) shared().clear();
    session.shutdown();
  });
}

// Sets that share memory take turns, also when they come together later; others do not.
TEST(DistributedOptimizerTest, Turns) {
  const auto a = torch::zeros({4}), b = torch::zeros({4});
  const StepTurns first({a});
  const StepTurns view({a.slice(0, 2)});
  const StepTurns second({b});
  {
    const auto turn = first.take();
    const auto beside = second.take();  // does not wait
  }
  const auto waits_for = [](const StepTurns& held, const StepTurns& other) {
    std::atomic<bool> taken{false};
    auto turn = held.take();
    std::thread thread([&] {
      const auto theirs = other.take();
      taken = true;
    });
    for (int i = 0; i < 100; ++i) std::this_thread::yield();
    EXPECT_FALSE(taken);
    turn.unlock();
    thread.join();
  };
  waits_for(first, view);
  {
    const StepTurns both({a, b});
    waits_for(first, second);
    waits_for(both, first);
    waits_for(second, both);
  }
  waits_for(first, second);  // whoever was together stays together
}

// The owner that goes may have stepped, or not; the others have, and are named.
TEST(DistributedOptimizerTest, OwnerKilledInAStep) {
  RankGroup group(3, RankMode::kProcesses);
  group.start([](Rank& r) {
    Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
    if (r.id() == 0) {
      const std::vector<std::int64_t> sizes{2};
      const auto lost = session.remote<make_parameter>("worker1", sizes);
      const auto kept = session.remote<make_parameter>("worker2", sizes);
      const DistributedOptimizer optimizer(session, {lost, kept}, Sgd{.lr = 1});
      std::optional<Context> context(std::in_place, session);
      context->backward({session.rpc_sync<times>("worker1", lost, torch::ones(sizes)) +
                         session.rpc_sync<times>("worker2", kept, torch::ones(sizes))});
      session.rpc_sync<hold_turn>("worker1", lost);
      std::thread stepping([&] {
        try {
          optimizer.step(*context);
          ADD_FAILURE() << "it did not fail";
        } catch (const StepError& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
          EXPECT_EQ(error.worker(), "worker1") << error.what();
          EXPECT_EQ(error.owners().at(0).state, State::kUnknown) << error.what();
          EXPECT_EQ(error.owners().at(1).state, State::kStepped) << error.what();
          EXPECT_NE(std::string(error.what()).find("stepped: worker2"), std::string::npos);
        }
      });
      // worker1 was called before worker2 was.
      while (!r.deadline().expired() && session.rpc_sync<first_element>("worker2", kept) == 0) {
      }
      r.mark("in the step");
      stepping.join();
      // With those who are left it goes on.
      const DistributedOptimizer rest(session, {kept}, Sgd{.lr = 1});
      context.reset();
      const Context next(session);
      next.backward({session.rpc_sync<times>("worker2", kept, torch::ones(sizes))});
      rest.step(next);
      expect_equal(kept.to_here().detach(), torch::full(sizes, -2.0));
      r.mark("done");
    } else {
      r.wait_for("end");
    }
    session.shutdown({.graceful = false, .ignore_leaks = true});
  });
  group.wait_mark("in the step", 0);
  group.kill(1, SIGKILL);
  group.wait_mark("done", 0);
  group.post("end");
  group.join();
}

// --- the step in backward ---

TEST(StepInBackwardTest, AsPythons) {
  run_all(3, [](Session& session, int rank) {
    const auto name = [](int worker) { return "worker" + std::to_string(worker % 3); };
    for (const auto& [rule, expected] : configurations()) {
      SCOPED_TRACE(describe(rule));
      const TwoLayers layers(session, name(rank + 1), name(rank + 2));
      const DistributedOptimizer optimizer(session, layers.parameters, rule);
      for (int step = 0; step < 3; ++step) {
        const Context context(session);
        const auto mode = step == 1 ? autograd::Mode::kFast : autograd::Mode::kSmart;
        context.backward({layers.loss(step)},
                         {.mode = mode, .optimizers = {optimizer.in_backward()}});
      }
      const auto weights = layers.weights();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(weights[static_cast<std::int64_t>(i)].item<float>(), expected[i], 3e-6) << i;
      }
    }
  });
}

// Of this worker, with rules that change, gradients of two passes, and several optimizers.
TEST(StepInBackwardTest, WhatIsStepped) {
  run_root(3, [](Session& session) {
    const std::vector<std::int64_t> sizes{2};
    const auto mine = torch::zeros(sizes).requires_grad_(true);
    const auto theirs = session.remote<make_parameter>("worker1", sizes);
    const auto other = session.remote<make_parameter>("worker1", sizes);
    const auto unused = session.remote<make_parameter>("worker2", sizes);
    const DistributedOptimizer first(session, {session.rref(mine), theirs, unused}, Sgd{.lr = 1});
    const DistributedOptimizer second(session, {other}, Sgd{.lr = 10});
    const auto one = torch::ones(sizes);
    const Context context(session);
    const auto pass = [&](const autograd::BackwardOptions& options) {
      context.backward({session.rpc_sync<times>("worker1", theirs, one) +
                        session.rpc_sync<times>("worker1", other, one) + (mine * one).sum()},
                       options);
    };
    const auto expect = [&](double at_mine, double at_theirs, double at_other) {
      expect_equal(mine.detach(), torch::full(sizes, at_mine));
      expect_equal(theirs.to_here().detach(), torch::full(sizes, at_theirs));
      expect_equal(other.to_here().detach(), torch::full(sizes, at_other));
      expect_equal(unused.to_here().detach(), torch::zeros(sizes));
    };
    pass({});
    expect(0, 0, 0);
    // With both passes' gradients.
    pass({.optimizers = {first.in_backward(), second.in_backward()}});
    expect(-2, -2, -20);
    expect_equal(context.gradients().at(mine), torch::full(sizes, 2.0));
    first.set_lr(2);
    pass({.optimizers = {first.in_backward()}});
    expect(-8, -8, -20);
    first.step(context);
    expect(-14, -14, -20);
    // A pass whose root is another worker's.
    const auto loss = session.remote<times>("worker1", theirs, one);
    loss.backward(context, autograd::BackwardOptions{.optimizers = {first.in_backward()}});
    expect_equal(theirs.to_here().detach(), torch::full(sizes, -14 - 2.0 * 4));
  });
}

// Those who have stepped are named; the context gets nothing.
TEST(StepInBackwardTest, APassThatFails) {
  run_root(3, [](Session& session) {
    const std::vector<std::int64_t> sizes{2};
    const auto stepped = session.remote<make_parameter>("worker1", sizes);
    const auto failing = session.remote<make_parameter>("worker2", sizes);
    const DistributedOptimizer optimizer(session, {stepped, failing}, Sgd{.lr = 1});
    const Context context(session);
    session.rpc_sync<watch>("worker1", stepped);
    const auto loss = session.rpc_sync<times>("worker1", stepped, torch::ones(sizes)) +
                      session.rpc_sync<times_failing>("worker2", failing, torch::ones(sizes));
    try {
      context.backward({loss}, {.optimizers = {optimizer.in_backward()}});
      ADD_FAILURE() << "it did not fail";
    } catch (const rpc::RemoteError& error) {
      EXPECT_EQ(error.worker(), "worker2");
      const std::string text = error.what();
      EXPECT_NE(text.find("after the step"), std::string::npos) << text;
      EXPECT_NE(text.find("[stepped: worker1; not stepped: worker0, worker2]"), std::string::npos)
          << text;
    }
    watched().reset();
    EXPECT_TRUE(context.gradients().empty());
    expect_equal(stepped.to_here().detach(), torch::full(sizes, -1.0));
    expect_equal(failing.to_here().detach(), torch::zeros(sizes));
  });
}

// A table whose rows were looked up, and which was used as a whole in another pass.
TEST(StepInBackwardTest, SparseAndDenseGradients) {
  run_root(2, [](Session& session) {
    const std::vector<std::int64_t> sizes{3, 2};
    for (const bool sparse_first : {true, false}) {
      const auto table = session.remote<make_parameter>("worker1", sizes);
      const DistributedOptimizer optimizer(session, {table}, Sgd{.lr = 1});
      const Context context(session);
      const auto rows = session.rpc_sync<rows_of>("worker1", table, torch::tensor({1})).sum();
      const auto whole = session.rpc_sync<times>("worker1", table, torch::ones(sizes));
      context.backward({sparse_first ? rows : whole});
      context.backward({sparse_first ? whole : rows}, {.optimizers = {optimizer.in_backward()}});
      expect_equal(table.to_here().detach(),
                   torch::tensor({{-1.F, -1.F}, {-2.F, -2.F}, {-1.F, -1.F}}));
    }
  });
}

// It may have stepped, or not.
TEST(StepInBackwardTest, OwnerKilledInAStep) {
  RankGroup group(3, RankMode::kProcesses);
  group.start([](Rank& r) {
    Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
    if (r.id() == 0) {
      const std::vector<std::int64_t> sizes{2};
      const auto lost = session.remote<make_parameter>("worker1", sizes);
      const auto kept = session.remote<make_parameter>("worker2", sizes);
      const DistributedOptimizer optimizer(session, {lost, kept}, Sgd{.lr = 1});
      std::optional<Context> context(std::in_place, session);
      const auto loss = session.rpc_sync<times>("worker1", lost, torch::ones(sizes)) +
                        session.rpc_sync<times>("worker2", kept, torch::ones(sizes));
      session.rpc_sync<hold_turn>("worker1", lost);
      std::thread passing([&, id = context->id()] {
        try {
          autograd::find(session, id).backward({loss}, {.optimizers = {optimizer.in_backward()}});
          ADD_FAILURE() << "it did not fail";
        } catch (const rpc::RemoteError& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
          EXPECT_EQ(error.worker(), "worker1") << error.what();
          const std::string text = error.what();
          EXPECT_NE(text.find("[stepped: worker2; not stepped: worker0; not known: worker1]"),
                    std::string::npos)
              << text;
        }
      });
      while (!r.deadline().expired() && session.rpc_sync<first_element>("worker2", kept) == 0) {
      }
      r.mark("in the step");
      passing.join();
      EXPECT_TRUE(context->gradients().empty());
      context.reset();
      // With those who are left it goes on.
      const DistributedOptimizer rest(session, {kept}, Sgd{.lr = 1});
      const Context next(session);
      next.backward({session.rpc_sync<times>("worker2", kept, torch::ones(sizes))},
                    {.optimizers = {rest.in_backward()}});
      expect_equal(kept.to_here().detach(), torch::full(sizes, -2.0));
      r.mark("done");
    } else {
      r.wait_for("end");
    }
    session.shutdown({.graceful = false, .ignore_leaks = true});
  });
  group.wait_mark("in the step", 0);
  group.kill(1, SIGKILL);
  group.wait_mark("done", 0);
  group.post("end");
  group.join();
}

TEST(StepInBackwardTest, AStepThatFails) {
  run_root(2, [](Session& session) {
    const auto table = session.remote<make_parameter>("worker1", std::vector<std::int64_t>{6, 2});
    const DistributedOptimizer optimizer(session,
                                         {DistributedGroup::named({{"the table", table}}, Adam{})});
    const Context context(session);
    const auto loss = session.rpc_sync<rows_of>("worker1", table, torch::tensor({1})).sum();
    try {
      context.backward({loss}, {.optimizers = {optimizer.in_backward()}});
      ADD_FAILURE() << "it did not fail";
    } catch (const rpc::RemoteError& error) {
      EXPECT_EQ(error.worker(), "worker1");
      const std::string text = error.what();
      EXPECT_NE(text.find("the table: its gradient is sparse"), std::string::npos) << text;
      EXPECT_NE(text.find("[not stepped: worker0, worker1]"), std::string::npos) << text;
    }
    EXPECT_TRUE(context.gradients().empty());
  });
}

}  // namespace
}  // namespace convoy::distributed_optimizer_test
