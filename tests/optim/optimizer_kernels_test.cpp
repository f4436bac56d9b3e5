// Steps of optimizers over plain memory, and what is left of one whose process is killed.
#include "optim/optimizer_kernels.h"

#include <signal.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "ddp/support.h"
#include "optim/commit_word.h"
#include "optim/optimizer_rule.h"
#include "support/segment_address.h"

namespace convoy::test {
namespace {

// The kernels by themselves: every length and alignment, beside plain arithmetic in f64.
TEST(OptimizerKernelsTest, EveryLength) {
  for (const std::int64_t n : {0, 1, 3, 7, 8, 9, 31, 64, 1009}) {
    for (const std::int64_t shift : {0, 1}) {
      const auto make = [&](std::uint64_t seed) {
        return random(seed, {n + shift}).narrow(0, shift, n);
      };
      const auto p = make(1), g = make(2), m = make(3);
      const auto p0 = p.to(at::kDouble), g0 = g.to(at::kDouble), m0 = m.to(at::kDouble);
      const SgdStep step{
          .lr = 0.1, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.2, .gradient_scale = 0.3};
      const RuleMemory<float> memory{
          p.data_ptr<float>(), g.data_ptr<float>(), {m.data_ptr<float>()}};
      rule_step(step, memory, static_cast<std::size_t>(n));
      const auto change = g0 * 0.3 + 0.2 * p0, moved = 0.9 * m0 + 0.5 * change;
      EXPECT_TRUE(at::allclose(m.to(at::kDouble), moved, 1e-5, 1e-6));
      EXPECT_TRUE(at::allclose(p.to(at::kDouble), p0 - 0.1 * moved, 1e-5, 1e-6));
      const auto size = static_cast<std::size_t>(n);
      EXPECT_NEAR(sum_of_squares(g.data_ptr<float>(), size), g0.pow(2).sum().item<double>(), 1e-6);
      const double most = n == 0 ? 0 : g0.abs().max().item<double>();
      EXPECT_EQ(largest_magnitude(g.data_ptr<float>(), size), most);
      if (n > 2) {
        g[n / 2] = NAN;
        EXPECT_TRUE(std::isnan(largest_magnitude(g.data_ptr<float>(), size)));
        EXPECT_TRUE(std::isnan(sum_of_squares(g.data_ptr<float>(), size)));
      }
    }
  }
}

// Five steps of Python's torch.optim (2.13), of the same names: parameters are sin(0.7 i + 0.3),
// gradients sin(0.7 i + 0.5 + 1.3 step).
struct PythonsSteps {
  OptimizerRule rule;
  std::array<float, 6> expected;
};

TEST(OptimizerRuleTest, AsPythons) {
  const std::vector<PythonsSteps> all{
      {Sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0.2, .weight_decay = 0.1, .maximize = true},
       {0.535637677F, 1.01620626F, 1.01883745F, 0.542293131F, -0.189299941F, -0.831862271F}},
      {Adam{.lr = 0.05, .weight_decay = 0.1, .amsgrad = true, .maximize = true},
       {0.423767477F, 0.930160105F, 1.02889931F, 0.657330871F, -0.0948679671F, -0.721966386F}},
      {AdamW{.lr = 0.05, .weight_decay = 0.1, .maximize = true},
       {0.421048492F, 0.925655782F, 1.0282203F, 0.658103347F, -0.0942946076F, -0.717745602F}},
      {Adagrad{.lr = 0.1, .lr_decay = 0.01, .weight_decay = 0.1, .maximize = true},
       {0.380115569F, 0.874170303F, 0.996613026F, 0.685491323F, -0.0803477317F, -0.66463244F}},
      {RmsProp{
           .lr = 0.02, .weight_decay = 0.1, .momentum = 0.5, .centered = true, .maximize = true},
       {0.717998564F, 1.01563716F, 0.989442766F, 0.633297682F, -0.531357646F, -0.891754866F}},
      {Adadelta{.lr = 0.5, .weight_decay = 0.1},
       {0.294927388F, 0.840801418F, 0.990743279F, 0.674350619F, 0.0424039885F, -0.611343265F}},
      {Adadelta{.rho = 0.8, .eps = 1e-4, .maximize = true},
       {0.299831212F, 0.840729833F, 0.994824946F, 0.683656573F, 0.030643804F, -0.610335708F}},
      {Adamax{.lr = 0.05, .weight_decay = 0.1},
       {0.180516794F, 0.732759535F, 0.916831732F, 0.653110147F, 0.148296461F, -0.487449348F}},
      {Adamax{.beta1 = 0.8, .beta2 = 0.9, .maximize = true},
       {0.299677938F, 0.84511447F, 0.993676782F, 0.675701737F, 0.0374401733F, -0.616151333F}},
      {Rprop{.lr = 0.02},
       {0.237120226F, 0.809471011F, 0.993664861F, 0.660463214F, 0.0999806672F, -0.594257951F}},
      {Rprop{.eta_minus = 0.4,
             .eta_plus = 1.5,
             .step_min = 0.015,
             .step_max = 0.03,
             .maximize = true},
       {0.348020226F, 0.863970935F, 0.969164908F, 0.690463185F, -0.0109193372F, -0.611857891F}},
  };
  for (const PythonsSteps& one : all) {
    SCOPED_TRACE(describe(one.rule));
    std::array<float, 6> parameter, gradient;
    std::array<std::array<float, 6>, kMostStates> states = {};
    states[0].fill(static_cast<float>(initial_state(one.rule)));
    const auto fill = [](std::array<float, 6>& values, double phase) {
      for (std::size_t i = 0; i < 6; ++i) {
        values[i] = static_cast<float>(std::sin(0.7 * static_cast<double>(i) + phase));
      }
    };
    fill(parameter, 0.3);
    for (int step = 0; step < 5; ++step) {
      fill(gradient, 0.5 + 1.3 * step);
      RuleMemory<float> memory{parameter.data(), gradient.data(), {}};
      for (std::size_t k = 0; k < kMostStates; ++k) {
        if ((states_of(one.rule) >> k & 1) != 0) memory.states[k] = states[k].data();
      }
      apply_rule(one.rule, {.number = step + 1, .first = step == 0}, memory, 6);
    }
    for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(parameter[i], one.expected[i], 2e-6) << i;
  }
}

TEST(OptimizerRuleTest, ValuesWithoutAMeaning) {
  EXPECT_THROW(check_rule("test", Rprop{.eta_minus = 1}), Error);
  EXPECT_THROW(check_rule("test", Rprop{.step_min = 2, .step_max = 1}), Error);
  EXPECT_THROW(check_rule("test", Adadelta{.rho = 2}), Error);
  EXPECT_THROW(check_rule("test", Adamax{.beta2 = 1}), Error);
  EXPECT_NE(hash_of(Rprop{}, 0), hash_of(Rprop{.maximize = true}, 0));
  EXPECT_NE(describe(Adam{}), describe(Adam{.maximize = true}));
}

template <class T>
struct Numbers {
  explicit Numbers(std::size_t count) {
    std::mt19937 random(7);
    std::uniform_real_distribution<T> any(0, 1);
    for (auto* const one : {&parameter, &first, &second, &states[0], &states[1], &states[2]}) {
      for (std::size_t i = 0; i < count; ++i) one->push_back(any(random));
    }
    for (T& square : states[0]) square += 1;  // not below the square of a mean
  }
  RuleMemory<T> memory(const T* gradient, unsigned used) {
    RuleMemory<T> all{parameter.data(), gradient, {}};
    for (std::size_t k = 0; k < kMostStates; ++k) {
      if ((used >> k & 1) != 0) all.states[k] = states[k].data();
    }
    return all;
  }

  std::vector<T> parameter, first, second, states[kMostStates];
};

// To the bit what two passes do: the mean of two gradients, and the step. States are kept as they
// were.
template <class T>
void expect_one_pass_equals_two(const OptimizerRule& rule, std::size_t count) {
  const RuleStep step{.number = 3, .gradient_scale = 0.7};
  const unsigned used = states_of(rule);
  for (const bool two : {false, true}) {
    Numbers<T> plain(count), passed(count);
    const Numbers<T> before(count);
    std::vector<T> mean = plain.first;
    for (std::size_t i = 0; two && i < count; ++i) mean[i] = (mean[i] + plain.second[i]) * T{0.5};
    apply_rule(rule, step, plain.memory(mean.data(), used), count);

    std::uint64_t word = CommitWord::kWhole;
    std::vector<T> journal[kMostStates];
    auto memory = passed.memory(passed.first.data(), used);
    memory.passage = {.word = &word, .journal = 5};
    if (two) memory.passage.second_gradient = passed.second.data();
    if (two) memory.passage.share = T{0.5};
    for (std::size_t k = 0; k < kMostStates; ++k) {
      journal[k].resize(count);
      if ((used >> k & 1) != 0) memory.passage.copies[k] = journal[k].data();
    }
    apply_rule(rule, step, memory, count);
    EXPECT_EQ(passed.parameter, plain.parameter);
    EXPECT_NE(passed.parameter, before.parameter);
    for (std::size_t k = 0; k < kMostStates; ++k) {
      EXPECT_EQ(passed.states[k], plain.states[k]);
      EXPECT_EQ(CommitWord::is_changing(word, k), (used >> k & 1) != 0);
      if ((used >> k & 1) != 0) {
        EXPECT_EQ(journal[k], before.states[k]);
      }
    }
    EXPECT_EQ(CommitWord::journal_of(word), 5u);
    EXPECT_EQ(CommitWord::numbers_of(word), count);
  }
}

TEST(OptimizerKernelsTest, OnePassEqualsTwo) {
  const std::vector<OptimizerRule> rules = {Sgd{.lr = 0.1, .weight_decay = 0.2},
                                            Sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0.5},
                                            Sgd{.lr = 0.1, .momentum = 0.9, .nesterov = true},
                                            Adam{.lr = 0.1, .weight_decay = 0.2},
                                            AdamW{.lr = 0.1, .amsgrad = true},
                                            Adagrad{.lr = 0.1, .lr_decay = 0.1},
                                            RmsProp{.lr = 0.1},
                                            RmsProp{.lr = 0.1, .momentum = 0.9, .centered = true}};
  for (const OptimizerRule& rule : rules) {
    for (const std::size_t count : {1, 7, 15, 16, 17, 32, 63, 1009}) {
      SCOPED_TRACE(concat(describe(rule), ", ", count, " numbers"));
      expect_one_pass_equals_two<float>(rule, count);
      expect_one_pass_equals_two<double>(rule, count);
    }
  }
}

// Processes that change a chunk again and again are killed at random moments. The states of two
// rules: whatever is found, it is that of the same step everywhere.
TEST(OptimizerKernelsTest, AKilledStepLeavesWholeStates) {
  constexpr int kVictims = 8;
  constexpr std::size_t kCount = 8000;
  struct Chunk {
    std::uint64_t word;
    float parameter[kCount], gradients[2][kCount], states[2][kCount], journals[2][kCount];
  };
  RankGroup group(kVictims, RankMode::kProcesses);
  std::vector<Segment> memory;
  for (int v = 0; v < kVictims; ++v) memory.push_back(Segment::create(sizeof(Chunk), "test"));
  group.start([&](Rank& r) {
    const Segment mine = segment_at(r.store()->get(concat("chunk", r.id()), r.deadline()));
    auto& chunk = *reinterpret_cast<Chunk*>(mine.data());
    for (auto& one : chunk.gradients) std::fill_n(one, kCount, 1.0F);
    const bool adam = r.id() % 2 == 0;
    const OptimizerRule rule = adam ? OptimizerRule(Adam{.lr = 1e-6, .beta1 = 0.5, .beta2 = 0.999})
                                    : OptimizerRule(Sgd{.lr = 1e-6, .momentum = 1});
    const RuleMemory<float> all{
        .parameter = chunk.parameter,
        .gradient = chunk.gradients[0],
        .states = {chunk.states[0], adam ? chunk.states[1] : nullptr, nullptr},
        .passage = {.word = &chunk.word,
                    .journal = 0,
                    .copies = {chunk.journals[0], adam ? chunk.journals[1] : nullptr, nullptr},
                    .second_gradient = adam ? chunk.gradients[1] : nullptr,
                    .share = 0.5}};
    for (int step = 1;; ++step) {
      if (step == 2) r.mark("running");
      apply_rule(rule, {.number = step, .first = step == 1}, all, kCount);
      std::atomic_ref<std::uint64_t>(chunk.word).store(CommitWord::kWhole);
    }
  });
  for (int v = 0; v < kVictims; ++v) {
    group.store()->set(concat("chunk", v), address_of(memory[static_cast<std::size_t>(v)]));
  }
  group.wait_mark("running");
  std::mt19937 random(11);
  for (int v = 0; v < kVictims; ++v) {
    const auto until = Deadline::after(std::chrono::microseconds(random() % 20'000));
    while (!until.expired()) std::this_thread::yield();
    group.kill(v, SIGKILL);
  }
  group.join();
  if (in_rank()) return;
  int amid = 0;
  for (int v = 0; v < kVictims; ++v) {
    const auto& chunk = *reinterpret_cast<const Chunk*>(memory[static_cast<std::size_t>(v)].data());
    const std::size_t changed = CommitWord::numbers_of(chunk.word);
    amid += changed > 0 && changed < kCount ? 1 : 0;
    for (std::size_t k = 0; k < 2; ++k) {
      const bool changing = CommitWord::is_changing(chunk.word, k);
      std::vector<float> found(kCount);
      copy_whole_state(chunk.word, reinterpret_cast<const std::byte*>(chunk.states[k]),
                       changing ? reinterpret_cast<const std::byte*>(chunk.journals[k]) : nullptr,
                       kCount, sizeof(float), reinterpret_cast<std::byte*>(found.data()));
      EXPECT_EQ(found, std::vector<float>(kCount, found[0]))
          << "victim " << v << ", state " << k << ", " << changed << " numbers changed";
      EXPECT_EQ(found[0] > 0, k == 0 || v % 2 == 0);
    }
  }
  EXPECT_GT(amid, 0) << "no step was interrupted: what does this test?";
}

// What a rule of before has kept is not touched by one that does not use it.
TEST(OptimizerKernelsTest, StatesThatARuleDoesNotUseStay) {
  constexpr std::size_t kCount = 40;
  std::vector<float> parameter(kCount, 1), gradient(kCount, 1);
  std::uint64_t word = CommitWord::kWhole;
  const RuleMemory<float> memory{parameter.data(), gradient.data(), {}, {.word = &word}};
  rule_step(SgdStep{.lr = 0.1}, memory, kCount);
  EXPECT_EQ(CommitWord::numbers_of(word), kCount);
  for (std::size_t k = 0; k < kMostStates; ++k) EXPECT_FALSE(CommitWord::is_changing(word, k));
}

}  // namespace
}  // namespace convoy::test
