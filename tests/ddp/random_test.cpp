// Random programs against one process with the whole batch: how gradients become one, parameters
// that are not used, gradients that are kept, no_sync, Join, SyncBatchNorm, batches of any sizes.
// Every rank derives the whole program from the seed, so that each knows what all must get.
#include <algorithm>
#include <cstdlib>
#include <random>

#include "base/error.h"
#include "convoy/join.h"
#include "convoy/sync_batch_norm.h"
#include "ddp/support.h"

namespace convoy::test {
namespace {

using torch::nn::Linear;

constexpr std::int64_t kBranches = 3;
constexpr double kTolerance = 1e-10;

enum class Zero { kToNone, kInPlace, kKeep };
enum class Last { kBackward, kSyncGradients };

// One micro-batch of all ranks. `uses`: a bit for each branch.
struct Micro {
  std::vector<std::int64_t> sizes;
  std::vector<int> uses;
  std::vector<bool> runs;  // false: this rank leaves it out
  bool directly = false;   // the module itself is called
  std::uint64_t seed = 0;
};

struct Step {
  Zero zero = Zero::kToNone;
  GradReduce::Kind kind = GradReduce::Kind::kMean;
  std::vector<Micro> micros;  // the last one is reduced, all others are in no_sync()
  Last last = Last::kBackward;
  bool updates = false;
};

struct Phase {
  std::vector<Step> steps;
  bool joins = false, by_initial_size = true;
  std::vector<std::size_t> full;  // steps of each rank
  std::vector<bool> leaves;       // after the micro-batches in no_sync() of one more step
};

struct Program {
  int size = 2;
  bool norms = false;
  DdpOptions options;
  std::vector<Phase> phases;
};

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  std::int64_t below(std::int64_t count) {
    return std::uniform_int_distribution<std::int64_t>(0, count - 1)(engine_);
  }
  bool chance(double share) {
    return std::uniform_real_distribution<double>(0, 1)(engine_) < share;
  }

 private:
  std::mt19937_64 engine_;
};

std::vector<std::int64_t> random_sizes(Dice& dice, int size, bool equal) {
  std::vector<std::int64_t> sizes;
  const std::int64_t same = 1 + dice.below(4);
  for (int r = 0; r < size; ++r) sizes.push_back(equal ? same : dice.below(5));
  return sizes;
}

Micro random_micro(Dice& dice, const Program& program, const std::vector<int>& always) {
  Micro micro;
  micro.sizes = random_sizes(dice, program.size, dice.chance(0.2));
  micro.seed = static_cast<std::uint64_t>(dice.below(1 << 30));
  for (int r = 0; r < program.size; ++r) {
    const auto rank = static_cast<std::size_t>(r);
    micro.uses.push_back(program.options.static_graph ? always[rank]
                         : program.options.find_unused_parameters
                             ? static_cast<int>(dice.below(1 << kBranches))
                             : (1 << kBranches) - 1);
    micro.runs.push_back(true);
  }
  return micro;
}

Step random_step(Dice& dice, const Program& program, const std::vector<int>& always, bool first) {
  Step step;
  step.zero = first ? Zero::kToNone : static_cast<Zero>(dice.below(3));
  const std::int64_t extra = dice.chance(0.5) ? 0 : 1 + dice.below(2);
  for (std::int64_t i = 0; i <= extra; ++i) {
    step.micros.push_back(random_micro(dice, program, always));
    Micro& micro = step.micros.back();
    if (i == extra) break;
    micro.directly = step.zero != Zero::kKeep && dice.chance(0.2);
    // Without collectives in it, ranks may accumulate over different numbers of batches.
    for (std::size_t r = 0; r < micro.runs.size() && !program.norms; ++r) {
      micro.runs[r] = dice.chance(0.8);
    }
  }
  step.last = extra > 0 && dice.chance(0.3) ? Last::kSyncGradients : Last::kBackward;
  step.updates = dice.chance(0.5);
  return step;
}

// How many live ranks reduce step `s`.
std::int64_t live_in(const Phase& phase, std::size_t s) {
  return std::count_if(phase.full.begin(), phase.full.end(), [s](std::size_t n) { return n > s; });
}

bool takes_part(const Phase& phase, std::size_t s, std::size_t rank) {
  return phase.full[rank] > s || (phase.leaves[rank] && phase.full[rank] == s);
}

bool runs(const Phase& phase, std::size_t s, std::size_t m, std::size_t rank) {
  const Step& step = phase.steps[s];
  const bool is_last = m + 1 == step.micros.size();
  if (is_last && step.last == Last::kSyncGradients) return false;
  if (phase.full[rank] > s) return step.micros[m].runs[rank];
  return !is_last && takes_part(phase, s, rank) && step.micros[m].runs[rank];
}

// Of one rank in one step.
std::int64_t samples_in(const Phase& phase, std::size_t s, std::size_t rank) {
  std::int64_t sum = 0;
  for (std::size_t m = 0; m < phase.steps[s].micros.size(); ++m) {
    if (runs(phase, s, m, rank)) sum += phase.steps[s].micros[m].sizes[rank];
  }
  return sum;
}

bool anybody_runs(const Phase& phase, std::size_t s) {
  for (std::size_t m = 0; m < phase.steps[s].micros.size(); ++m) {
    for (std::size_t r = 0; r < phase.full.size(); ++r) {
      if (runs(phase, s, m, r)) return true;
    }
  }
  return false;
}

// Statistics need two values, and weights a sample.
void make_sizes_fit(const Program& program, Phase& phase) {
  for (std::size_t s = 0; s < phase.steps.size(); ++s) {
    if (!anybody_runs(phase, s)) phase.steps[s].last = Last::kBackward;
    std::int64_t all = 0;
    for (std::size_t m = 0; m < phase.steps[s].micros.size(); ++m) {
      auto& sizes = phase.steps[s].micros[m].sizes;
      std::int64_t sum = 0;
      std::size_t some = 0;
      for (std::size_t r = 0; r < sizes.size(); ++r) {
        if (!runs(phase, s, m, r)) continue;
        sum += sizes[r];
        some = r;
      }
      if (program.norms && sum < 2) {
        sizes[some] += 2;
        sum += 2;
      }
      all += sum;
    }
    if (all == 0) {
      for (auto& micro : phase.steps[s].micros) {
        for (auto& one : micro.sizes) one = 1;
      }
    }
  }
}

Program random_program(std::uint64_t seed) {
  Dice dice(seed);
  Program program;
  program.size = static_cast<int>(2 + dice.below(3));
  program.norms = dice.chance(0.5);
  DdpOptions& options = program.options;
  options.find_unused_parameters = dice.chance(0.6);
  options.static_graph = dice.chance(0.15);
  if (dice.chance(0.7)) options.bucket_cap_mb = 1e-5;
  options.gradient_as_bucket_view = dice.chance(0.7);
  options.skip_all_reduce_unused_params = dice.chance(0.3);
  options.launch = dice.chance(0.5) ? BucketLaunch::kEarly : BucketLaunch::kLate;
  std::vector<int> always;
  for (int r = 0; r < program.size; ++r) always.push_back(static_cast<int>(dice.below(8)));
  const auto random_kind = [&] { return static_cast<GradReduce::Kind>(dice.below(3)); };
  GradReduce::Kind kind = random_kind();
  for (std::int64_t p = 1 + dice.below(2); p >= 0; --p) {
    Phase phase;
    phase.joins = dice.chance(0.5);
    phase.by_initial_size = dice.chance(0.5);
    const std::int64_t steps = 2 + dice.below(5);
    for (std::int64_t s = 0; s < steps; ++s) {
      phase.steps.push_back(random_step(dice, program, always, s == 0));
      // What is kept may have been reduced in another way.
      // (Not in a Join: ranks without inputs would not know.)
      if (!phase.joins && dice.chance(0.15)) kind = random_kind();
      phase.steps.back().kind = kind;
    }
    for (int r = 0; r < program.size; ++r) {
      const bool ends = phase.joins && dice.chance(0.6);
      phase.full.push_back(static_cast<std::size_t>(ends ? dice.below(steps + 1) : steps));
      phase.leaves.push_back(ends && dice.chance(0.4));
    }
    const auto longest = static_cast<std::size_t>(dice.below(program.size));
    phase.full[longest] = static_cast<std::size_t>(steps);  // somebody reduces every step
    make_sizes_fit(program, phase);
    program.phases.push_back(std::move(phase));
  }
  return program;
}

// --- the model ---

template <class Norm>
struct RandomNetImpl : torch::nn::Module {
  explicit RandomNetImpl(const Norm& its_norm) : first(register_module("first", Linear(3, 4))) {
    if (its_norm) norm = register_module("norm", its_norm);
    for (std::int64_t b = 0; b < kBranches; ++b) {
      branches.push_back(register_module(concat("branch", b), Linear(4, 4)));
    }
    last = register_module("last", Linear(4, 2));
    this->to(at::kDouble);
  }
  at::Tensor trunk(const at::Tensor& x) {
    at::Tensor y = first(x);
    if (norm) y = norm(y);
    return torch::tanh(y);
  }
  at::Tensor rest(const at::Tensor& y, int uses) {
    at::Tensor sum = y;
    for (std::size_t b = 0; b < branches.size(); ++b) {
      if ((uses >> b & 1) != 0) sum = sum + torch::sin(branches[b](y));
    }
    return last(sum);
  }
  at::Tensor forward(const at::Tensor& x, int uses) { return rest(trunk(x), uses); }

  Linear first, last{nullptr};
  Norm norm{nullptr};
  std::vector<Linear> branches;
};
using SyncNet = RandomNetImpl<nn::SyncBatchNorm1d>;
using LocalNet = RandomNetImpl<torch::nn::BatchNorm1d>;

at::Tensor inputs_of(const Micro& micro, std::size_t rank) {
  return random(micro.seed + 7 * rank, {micro.sizes[rank], 3}, at::kDouble) + 0.5;
}

// With bounded derivatives: where training diverges, rounding errors grow to any size.
at::Tensor loss_of(const at::Tensor& output, std::int64_t samples) {
  return (output.sin() + output * 0.5).sum() /
         static_cast<double>(std::max<std::int64_t>(samples, 1));
}

void zero(torch::nn::Module& module, Zero how) {
  if (how != Zero::kKeep) module.zero_grad(how == Zero::kToNone);
}

void update(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& p : module.parameters()) {
    if (p.grad().defined()) p.sub_(p.grad(), 0.01);
  }
}

// --- one process ---

class OneProcess {
 public:
  OneProcess(const Program& program)  // NOLINT(google-explicit-constructor)
      : program_(program), net_(seeded(5, [&] {
          return std::make_shared<LocalNet>(program.norms ? torch::nn::BatchNorm1d(4)
                                                          : torch::nn::BatchNorm1d(nullptr));
        })) {}

  LocalNet& net() { return *net_; }

  void play(const Phase& phase, std::size_t s) {
    const Step& step = phase.steps[s];
    zero(*net_, step.zero);
    for (std::size_t m = 0; m < step.micros.size(); ++m) play(phase, s, m);
    if (step.updates) update(*net_);
  }

 private:
  // How much the loss of a rank counts.
  double factor(const Phase& phase, std::size_t s, std::size_t rank) const {
    const auto size = static_cast<double>(program_.size);
    switch (phase.steps[s].kind) {
      case GradReduce::Kind::kSum: return 1;
      case GradReduce::Kind::kMean:
        return 1 / (phase.joins && !phase.by_initial_size ? static_cast<double>(live_in(phase, s))
                                                          : size);
      case GradReduce::Kind::kWeighted: break;
    }
    std::int64_t all = 0;
    for (std::size_t r = 0; r < phase.full.size(); ++r) all += samples_in(phase, s, r);
    return static_cast<double>(samples_in(phase, s, rank)) / static_cast<double>(all);
  }

  void play(const Phase& phase, std::size_t s, std::size_t m) {
    const Micro& micro = phase.steps[s].micros[m];
    std::vector<std::size_t> ranks;
    std::vector<at::Tensor> parts;
    for (std::size_t r = 0; r < phase.full.size(); ++r) {
      if (!runs(phase, s, m, r)) continue;
      ranks.push_back(r);
      parts.push_back(inputs_of(micro, r));
    }
    if (ranks.empty()) return;
    const at::Tensor whole = net_->trunk(at::cat(parts));
    at::Tensor sum = at::zeros({}, at::kDouble);
    std::int64_t begin = 0;
    for (const std::size_t r : ranks) {
      const at::Tensor part = whole.narrow(0, begin, micro.sizes[r]);
      begin += micro.sizes[r];
      sum = sum +
            loss_of(net_->rest(part, micro.uses[r]), samples_in(phase, s, r)) * factor(phase, s, r);
    }
    sum.backward();
  }

  const Program& program_;
  const std::shared_ptr<LocalNet> net_;
};

// --- many ---

template <class Get>
void expect_same(const torch::nn::Module& actual, const torch::nn::Module& expected, Get get,
                 const std::string& what) {
  const auto other = actual.named_parameters();
  for (const auto& item : expected.named_parameters()) {
    const at::Tensor want = get(item.value()), got = get(other[item.key()]);
    ASSERT_EQ(got.defined(), want.defined()) << what << ", " << item.key();
    if (!want.defined()) continue;
    const double off = (got - want).abs().max().item<double>();
    ASSERT_LE(off, kTolerance * (1 + want.abs().max().item<double>()))
        << what << ", " << item.key() << "\ngot " << got << "\nnot " << want;
  }
}

class ManyRanks {
 public:
  ManyRanks(const Program& program, Rank& rank, const ProcessGroup& world)
      : program_(program),
        rank_(static_cast<std::size_t>(rank.id())),
        world_(world),
        net_(seeded(5,
                    [&] {
                      return std::make_shared<SyncNet>(
                          program.norms ? nn::SyncBatchNorm1d(4) : nn::SyncBatchNorm1d(nullptr));
                    })),
        norms_(nn::convert_sync_batchnorm(*net_, world)),
        model_(net_, world, program.options),
        oracle_(program) {}

  void run() {
    for (std::size_t p = 0; p < program_.phases.size(); ++p) {
      const Phase& phase = program_.phases[p];
      where_ = concat("phase ", p, phase.joins ? " (join)" : "");
      set_reduce(phase.steps[0].kind, 1);  // also on ranks that have no inputs
      if (phase.joins) {
        join({&model_}, [&] { run_steps(phase); },
             {.divide_by_initial_world_size = phase.by_initial_size});
        for (std::size_t s = phase.full[rank_]; s < phase.steps.size(); ++s) oracle_.play(phase, s);
      } else {
        run_steps(phase);
      }
      expect_same(
          *net_, oracle_.net(), [](const at::Tensor& t) { return t.detach(); },
          where_ + ", parameters");
      expect_equal_on_all(world_, net_->parameters());
      if (program_.norms) compare_statistics();
      net_->zero_grad();
      oracle_.net().zero_grad();
    }
  }

 private:
  void run_steps(const Phase& phase) {
    for (std::size_t s = 0; s < phase.full[rank_]; ++s) {
      run_step(phase, s);
      oracle_.play(phase, s);
      expect_same(
          *net_, oracle_.net(), [](const at::Tensor& t) { return t.grad(); },
          concat(where_, ", step ", s, ", rank ", rank_));
    }
    if (phase.leaves[rank_] && phase.full[rank_] < phase.steps.size()) {
      run_step(phase, phase.full[rank_]);
    }
  }

  void run_step(const Phase& phase, std::size_t s) {
    const Step& step = phase.steps[s];
    const bool reduces = phase.full[rank_] > s;
    zero(*net_, step.zero);
    set_reduce(step.kind, static_cast<double>(samples_in(phase, s, rank_)));
    for (std::size_t m = 0; m < step.micros.size(); ++m) {
      if (!runs(phase, s, m, rank_)) continue;
      if (m + 1 == step.micros.size()) {
        add(phase, s, m);
      } else {
        const auto scope = model_.no_sync();
        add(phase, s, m);
      }
    }
    if (!reduces) return;
    if (step.last == Last::kSyncGradients) model_.sync_gradients();
    if (step.updates) update(*net_);
  }

  void set_reduce(GradReduce::Kind kind, double samples) {
    model_.set_reduce(kind == GradReduce::Kind::kMean  ? GradReduce::kMean
                      : kind == GradReduce::Kind::kSum ? GradReduce::kSum
                                                       : GradReduce::weighted(samples));
  }

  void add(const Phase& phase, std::size_t s, std::size_t m) {
    const Micro& micro = phase.steps[s].micros[m];
    const at::Tensor x = inputs_of(micro, rank_);
    const at::Tensor out =
        micro.directly ? net_->forward(x, micro.uses[rank_]) : model_(x, micro.uses[rank_]);
    loss_of(out, samples_in(phase, s, rank_)).backward();
  }

  void compare_statistics() {
    const auto buffers = net_->named_buffers();
    for (const auto& item : oracle_.net().named_buffers()) {
      const at::Tensor got = buffers[item.key()].to(at::kDouble);
      ASSERT_TRUE(at::allclose(got, item.value().to(at::kDouble), kTolerance, kTolerance))
          << where_ << ", " << item.key();
    }
  }

  const Program& program_;
  const std::size_t rank_;
  const ProcessGroup world_;
  const std::shared_ptr<SyncNet> net_;
  const std::size_t norms_;
  DistributedDataParallel<SyncNet> model_;
  OneProcess oracle_;
  std::string where_;
};

// CONVOY_SEEDS=first:count chooses others; the long run takes hundreds.
std::pair<std::uint64_t, std::uint64_t> chosen_seeds() {
  const char* const text = std::getenv("CONVOY_SEEDS");
  std::uint64_t first = 0, count = 60;
  if (text != nullptr) {
    char* end = nullptr;
    first = std::strtoull(text, &end, 10);
    if (*end == ':') count = std::strtoull(end + 1, nullptr, 10);
  }
  return {first, count};
}

TEST(RandomDdpTest, IsOneProcessWithTheWholeBatch) {
  const auto [first, count] = chosen_seeds();
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE(concat("CONVOY_SEEDS=", seed, ":1"));
    const Program program = random_program(seed);
    run_ranks(program.size,
              [&](Rank& r, const ProcessGroup& world) { ManyRanks(program, r, world).run(); });
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace convoy::test
