#include "programs.h"

#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/types.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>

#include "agent/agent.h"
#include "autograd/lineage.h"
#include "base/concat.h"
#include "base/random.h"
#include "rpc/session_impl.h"
#include "simulated.h"
#include "transport/simulation.h"

namespace convoy::autograd::programs {

using rpc::Session;
using Tensors = std::vector<at::Tensor>;
using namespace std::chrono_literals;

// --- Parameters -------------------------------------------------------------------------------

constexpr std::size_t kParameters = 3;

struct Parameters {
  std::mutex mutex;
  std::uint64_t seed = UINT64_MAX;
  std::map<int, Tensors> of_rank;
  int hook_calls = 0;
  std::optional<int> fails;  // the rank whose hook throws
};
Parameters& parameters() {
  static Parameters all;
  return all;
}

at::Tensor number_grid(Random& random) {
  at::Tensor grid = torch::empty({2, 2}, torch::kDouble);
  for (int i = 0; i < 4; ++i) {
    grid.data_ptr<double>()[i] = 0.2 + static_cast<double>(random.below(1000)) / 1600;
  }
  return grid;
}

// Every other program is deterministic: its gradients have the bits of one process. A third of them
// have lineages, a third have none, so that workers are asked, and a third have short ones.
bool is_deterministic(std::uint64_t seed) { return seed % 2 == 1; }
std::size_t most_upstream_of(std::uint64_t seed) {
  const std::size_t most[] = {detail::Lineage::kMost, 0, 3};
  return most[seed / 2 % 3];
}

// Of the program that was prepared last.
bool prepared_is_deterministic() {
  const std::lock_guard lock(parameters().mutex);
  return is_deterministic(parameters().seed);
}

// Every process can make those of all workers.
void prepare(std::uint64_t seed) {
  detail::set_most_upstream(most_upstream_of(seed));
  auto& all = parameters();
  const std::lock_guard lock(all.mutex);
  if (all.seed == seed) return;
  all.seed = seed;
  all.of_rank.clear();
  all.hook_calls = 0;
  Random random(seed ^ 0x9a7a);
  for (int rank = 0; rank < 4; ++rank) {
    for (std::size_t i = 0; i < kParameters; ++i) {
      all.of_rank[rank].push_back(number_grid(random).requires_grad_(true));
    }
    all.of_rank[rank][0].register_hook([rank](const at::Tensor& g) {
      const std::lock_guard in_hook(parameters().mutex);
      if (parameters().fails == rank) throw std::runtime_error("as it should");
      ++parameters().hook_calls;
      return g * 2;
    });
  }
}
CONVOY_RPC(prepare);

Tensors parameters_of(int rank) {
  auto& all = parameters();
  const std::lock_guard lock(all.mutex);
  return all.of_rank.at(rank);
}

// What the context has of this worker's; undefined: nothing.
Tensors gradients_of(ContextId id) {
  const auto session = rpc::current().session();
  const auto gradients = find(session, id).gradients();
  Tensors result;
  for (const auto& leaf : parameters_of(session.worker_info().rank)) {
    result.push_back(gradients.contains(leaf) ? gradients.at(leaf).clone() : at::Tensor());
  }
  return result;
}
CONVOY_RPC(gradients_of);

std::vector<std::uint64_t> left_over() {
  const auto now = stats(rpc::current().session());
  return {now.contexts, now.passes};
}
CONVOY_RPC(left_over);

// --- Programs ---------------------------------------------------------------------------------

// Differentiates inside its own backward.
struct Cube : torch::autograd::Function<Cube> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& g) {
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    at::Tensor y;
    {
      const at::AutoGradMode enabled(true);
      y = x * x * x;
    }
    y.backward(g[0]);
    return {x.grad()};
  }
};

void explode(const Tensors&) { throw std::runtime_error("as it should"); }
CONVOY_RPC(explode);

Tensors compute(std::uint64_t seed, int depth, int workers, const Tensors& inputs);

// A part of a program on one worker; without a session, in one process.
class Part {
 public:
  Part(int rank, const Session* session, std::uint64_t seed, int workers)
      : rank_(rank), session_(session), random_(seed), workers_(workers) {}

  Tensors run(int depth, const Tensors& inputs) {
    pool_ = inputs;
    for (const auto& leaf : parameters_of(rank_)) pool_.push_back(leaf);
    pool_.push_back(number_grid(random_));
    // Bits tell orders apart only where several gradients are added up.
    reuses_ = prepared_is_deterministic();
    const std::uint64_t steps = (reuses_ ? 6 : 3) + random_.below(5);
    for (std::uint64_t i = 0; i < steps; ++i) step(depth);
    Tensors results;
    const std::uint64_t count = 1 + random_.below(3);
    // Mostly what others have computed.
    for (std::uint64_t i = 0; i < count; ++i) {
      const bool any = random_.below(4) == 0 || called_.empty();
      results.push_back(any ? pick() : called_[random_.below(called_.size())]);
    }
    return results;
  }

 private:
  at::Tensor pick() {
    const bool old = reuses_ && random_.below(2) == 0;
    return pool_[random_.below(old ? std::min<std::size_t>(pool_.size(), 4) : pool_.size())];
  }

  void step(int depth) {
    const at::Tensor a = pick();
    const at::Tensor b = pick();
    switch (random_.below(12)) {
      case 0: pool_.push_back((a + b) * 0.5); break;
      case 1: pool_.push_back(a * b); break;
      case 2: pool_.push_back(a.sin()); break;
      case 3: pool_.push_back(a.t() * 0.5 + b * 0.25); break;
      case 4: {
        const auto rows = a.unbind(0);
        pool_.push_back(torch::stack({rows[1], rows[0] * 0.5}));
        break;
      }
      case 5: {  // in place, through views
        at::Tensor y = a * 0.5;
        y[0].mul_(1.5);
        y.t()[1].add_(b[0] * 0.1);
        pool_.push_back(y);
        break;
      }
      case 6: pool_.push_back(Cube::apply(a)); break;
      case 7: pool_.push_back(a.detach() * b); break;
      default: call(depth); break;
    }
  }

  void call(int depth) {
    const int to = static_cast<int>(random_.below(static_cast<std::uint64_t>(workers_)));
    const std::uint64_t seed = random_.next();
    Tensors arguments;
    const std::uint64_t count = 1 + random_.below(3);
    for (std::uint64_t i = 0; i < count; ++i) arguments.push_back(pick());
    const std::uint64_t how = random_.below(10);
    if (depth == 0) return;
    Tensors results;
    if (how == 0) {  // nobody waits for it
      if (session_) {
        static_cast<void>(session_->rpc_async<compute>(to, seed, depth - 1, workers_, arguments));
      }
      return;
    }
    if (how == 1) {  // it fails
      if (session_) {
        EXPECT_THROW(session_->rpc_sync<explode>(to, arguments), rpc::RemoteError);
      }
      return;
    }
    if (!session_) {
      results = as_message(
          Part(to, nullptr, seed, workers_).run(depth - 1, as_message(std::move(arguments))));
    } else if (how < 6) {
      results = session_->rpc_sync<compute>(to, seed, depth - 1, workers_, arguments);
    } else {
      results = session_->rpc_async<compute>(to, seed, depth - 1, workers_, arguments).wait();
    }
    if (how == 2) return;  // nobody wants it
    for (const auto& each : results) {
      pool_.push_back(each);
      called_.push_back(each);
    }
  }

  // In one process a message is an operation on each of its tensors: what the callee adds up is
  // added to the rest as one.
  static Tensors as_message(Tensors tensors) {
    for (auto each = tensors.rbegin(); each != tensors.rend(); ++each) {
      if (each->requires_grad()) *each = each->clone();
    }
    return tensors;
  }

  const int rank_;
  const Session* const session_;
  Random random_;
  const int workers_;
  bool reuses_ = false;
  Tensors pool_;
  Tensors called_;  // those of them that calls gave
};

Tensors compute(std::uint64_t seed, int depth, int workers, const Tensors& inputs) {
  const auto session = rpc::current().session();
  return Part(session.worker_info().rank, &session, seed, workers).run(depth, inputs);
}
CONVOY_RPC(compute);

namespace {

// Two losses of a program, with a session or in one process.
struct Roots {
  at::Tensor first;
  at::Tensor second;
};
Roots run_program(const Session* session, std::uint64_t seed, int workers) {
  const Tensors results = Part(0, session, seed, workers).run(3, {});
  Roots losses{results.front().sum(), results.back().cos().sum()};
  // Perhaps neither needs a gradient.
  losses.first = losses.first + parameters_of(0)[1].sum() * 0.5;
  losses.second = losses.second + parameters_of(0)[2].sum() * 0.5;
  return losses;
}

void forget_gradients(int workers) {
  for (int rank = 0; rank < workers; ++rank) {
    for (const auto& leaf : parameters_of(rank)) leaf.mutable_grad() = at::Tensor();
  }
}
Tensors all_grads(int workers) {
  Tensors all;
  for (int rank = 0; rank < workers; ++rank) {
    for (const auto& leaf : parameters_of(rank)) {
      all.push_back(leaf.grad().defined() ? leaf.grad().clone() : at::Tensor());
    }
  }
  return all;
}

bool is_same(const at::Tensor& got, const at::Tensor& wanted, bool to_the_bit) {
  if (got.defined() != wanted.defined()) return false;
  if (!wanted.defined()) return true;
  return to_the_bit ? at::equal(got, wanted) : (got - wanted).abs().max().item<double>() < 1e-6;
}

// Of all workers that are there.
void expect_gradients(const Session& session, ContextId id, const Tensors& wanted, int workers,
                      bool to_the_bit, int without = -1) {
  for (int rank = 0; rank < workers; ++rank) {
    if (rank == without) continue;
    Tensors got(kParameters);
    try {
      got = session.rpc_sync<gradients_of>(rank, id);
    } catch (const rpc::RemoteError& error) {
      // No call went there: it has no such context.
      EXPECT_NE(std::string(error.what()).find("Could not find autograd context"),
                std::string::npos)
          << error.what();
    }
    for (std::size_t i = 0; i < kParameters; ++i) {
      const at::Tensor& want = wanted[static_cast<std::size_t>(rank) * kParameters + i];
      EXPECT_TRUE(is_same(got[i], want, to_the_bit))
          << "worker " << rank << ", parameter " << i << ":\n"
          << got[i] << "\n instead of\n"
          << want;
    }
  }
}

int hook_calls() {
  auto& all = parameters();
  const std::lock_guard lock(all.mutex);
  return std::exchange(all.hook_calls, 0);
}

}  // namespace

void run_as_root(const Session& session, std::uint64_t first_seed, std::uint64_t count) {
  const int workers = session.size();
  for (std::uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    SCOPED_TRACE(concat("seed ", seed));
    prepare(seed);
    for (int rank = 1; rank < workers; ++rank) session.rpc_sync<prepare>(rank, seed);
    const Context context(session);
    const Roots losses = run_program(&session, seed, workers);
    const bool deterministic = is_deterministic(seed);
    context.backward({losses.first}, {.retain_graph = true, .deterministic = deterministic});
    const Roots reference = run_program(nullptr, seed, workers);
    forget_gradients(workers);
    reference.first.backward({}, /*retain_graph=*/true);
    expect_gradients(session, context.id(), all_grads(workers), workers, deterministic);
    context.backward({losses.second}, {.deterministic = deterministic});
    reference.second.backward();
    expect_gradients(session, context.id(), all_grads(workers), workers, deterministic);
    if (testing::Test::HasFailure()) return;
  }
}

namespace {

// --- A simulated world ------------------------------------------------------------------------

constexpr std::string_view kOwnFunctions = "convoy::autograd::detail::";

// "expand"; empty: it is not one of ours.
std::string_view own_name(std::string_view function) {
  if (!function.starts_with(kOwnFunctions)) return {};
  return function.substr(kOwnFunctions.size());
}

std::string name_of_letter(std::string_view function, bool answer) {
  return concat(answer ? "answer to " : "", function);
}

// All that contexts and passes send, but for report_context, which is dump()'s: it is asked once,
// and who does not answer is listed. (backward_of_reference is a call like any other.)
const std::vector<std::string>& kinds_of_letters() {
  static const auto* const kinds = [] {
    auto* const all = new std::vector<std::string>();
    for (const char* const name :
         {"expand", "take_plan", "take_gradient", "pass_done", "pass_failed", "participant_lost",
          "commit", "abort_pass", "release_context", "context_lives"}) {
      for (const bool answer : {false, true}) all->push_back(name_of_letter(name, answer));
    }
    return all;
  }();
  return *kinds;
}

void set_failing(std::optional<int> rank) {
  const std::lock_guard lock(parameters().mutex);
  parameters().fails = rank;
}

class Simulated {
 public:
  Simulated(std::uint64_t seed, bool faulty)
      : seed_(seed), faulty_(faulty), random_(seed), world_({.seed = seed}) {
    workers_ = 2 + static_cast<int>(random_.below(3));
    if (faulty) {
      drop_ = chance(60'000);
      duplicate_ = chance(200'000);
      delay_ = chance(200'000);
      if (random_.below(3) == 0) crashes_ = 1 + static_cast<int>(random_.below(workers_ - 1));
      if (random_.below(4) == 0) fails_ = static_cast<int>(random_.below(workers_));
      // By chance alone hardly any of the rare ones would be.
      const auto& kinds = kinds_of_letters();
      loses_ = kinds[seed % kinds.size()];
      losses_left_ = 1 + random_.below(2);
    }
  }

  void run() {
    SCOPED_TRACE(concat("seed ", seed_, faulty_ ? ", faulty" : ""));
    prepare(UINT64_MAX);
    prepare(seed_);
    make_workers();
    bool finished = false;
    world_.start([&] {
      use((*sessions_)[0]);
      finished = true;
    });
    world_.run([&] { return finished; }, 5'000'000);
    EXPECT_TRUE(finished) << "the root waits for ever";
    // What is left is told, and tried again: these letters are lost, too.
    const auto ended = [this] { return world_.running() == 0 && sessions_->is_empty(); };
    world_.run(ended, 2'000'000);
    armed_ = false;
    EXPECT_EQ(world_.running(), 0U) << "somebody waits for ever";
    EXPECT_TRUE(sessions_->is_empty()) << "contexts or passes are left";
  }

  const SentLetters& letters() const { return letters_; }

 private:
  using Sending = test::SimulatedWorkers::Sending;

  std::uint32_t chance(std::uint32_t most) {
    return random_.below(2) == 0 ? 0 : static_cast<std::uint32_t>(random_.below(most));
  }

  void make_workers() {
    std::vector<int> threads;
    for (int rank = 0; rank < workers_; ++rank) {
      threads.push_back(1 + static_cast<int>(random_.below(3)));
    }
    sessions_.emplace(world_, threads, [this](const Sending& sending) { return disturb(sending); });
  }

  // Faults, while they are armed.
  std::optional<transport::SendResult> disturb(const Sending& sending) {
    if (!armed_) return std::nullopt;
    if (is_lost(sending)) return transport::SendResult::kSent;
    const bool twice = random_.chance(duplicate_);
    const bool later = random_.chance(delay_);
    if (!twice && !later) return std::nullopt;
    sessions_->send_after(std::chrono::microseconds(random_.below(5000)), sending);
    if (later) return transport::SendResult::kSent;
    return std::nullopt;
  }

  bool is_lost(const Sending& sending) {
    const bool by_chance = random_.chance(drop_);
    const auto function = own_name(sending.function);
    if (function.empty()) return by_chance;
    const std::string name = name_of_letter(function, sending.answer);
    const bool chosen = name == loses_ && losses_left_ > 0;
    if (chosen) --losses_left_;
    Sent& count = letters_[name];
    ++count.all;
    if (by_chance || chosen) ++count.lost;
    return by_chance || chosen;
  }

  void crash_later() {
    if (crashes_ < 0) return;
    world_.call_after(std::chrono::microseconds(random_.below(1000)),
                      [this] { sessions_->crash(crashes_); });
  }

  void use(const Session& session) {
    const Context context(session);
    use(session, context);
    armed_ = faulty_;  // through the end of the context
  }

  void use(const Session& session, const Context& context) {
    const Roots losses = run_program(&session, seed_, workers_);
    const Roots reference = run_program(nullptr, seed_, workers_);
    forget_gradients(workers_);
    const Tensors nothing(static_cast<std::size_t>(workers_) * kParameters);
    hook_calls();
    bool good = true;
    if (faulty_) {
      armed_ = true;
      crash_later();
      set_failing(fails_);
      good = try_backward(context, losses.first);
      set_failing(std::nullopt);
      if (!good) expect_no_passes(session);
      // Answers of the test itself are not disturbed.
      armed_ = false;
      if (!good) expect_gradients(session, context.id(), nothing, workers_, true, crashes_);
      if (!good && crashes_ >= 0) return;
    }
    if (!faulty_ || !good) {
      context.backward({losses.first}, {.retain_graph = true, .deterministic = deterministic_});
    }
    const int called = hook_calls();
    reference.first.backward({}, /*retain_graph=*/true);
    const int wanted = hook_calls();
    EXPECT_TRUE(!good || called == wanted) << "each hook is called once per pass";
    expect_gradients(session, context.id(), all_grads(workers_), workers_, deterministic_,
                     crashes_);
    if (crashes_ >= 0) return;
    second_pass(session, context, losses, reference);
  }

  // The context lives on. What is lost comes again after a second, and is late then.
  void expect_no_passes(const Session& session) {
    auto& agent = session.impl()->agent();
    agent.wait(Deadline::after(3s, agent.now()), [] { return false; });
    agent.wait(Deadline::after(60s, agent.now()), [&] { return sessions_->passes() == 0; });
    EXPECT_EQ(sessions_->passes(), 0U) << "passes are left that failed";
  }

  // One more pass, or two at once.
  void second_pass(const Session& session, const Context& context, const Roots& losses,
                   const Roots& reference) {
    const bool both = random_.below(3) == 0;
    bool other_ended = !both;
    if (both) {
      world_.start([&] {
        context.backward({losses.first}, {.retain_graph = true, .deterministic = deterministic_});
        other_ended = true;
      });
    }
    context.backward({losses.second}, {.retain_graph = true, .deterministic = deterministic_});
    auto& agent = session.impl()->agent();
    EXPECT_TRUE(agent.wait(Deadline::after(60s, agent.now()), [&] { return other_ended; }));
    if (both) reference.first.backward({}, /*retain_graph=*/true);
    reference.second.backward();
    // Passes that end at once add their gradients in any order.
    expect_gradients(session, context.id(), all_grads(workers_), workers_, deterministic_ && !both);
  }

  // False: it failed, as it may.
  bool try_backward(const Context& context, const at::Tensor& loss) {
    try {
      context.backward({loss},
                       {.retain_graph = true, .deterministic = deterministic_, .timeout = 20s});
      return true;
    } catch (const rpc::RemoteError& error) {
      EXPECT_TRUE(error.worker().starts_with("worker")) << error.what();
      switch (error.kind()) {
        case ErrorKind::kTimeout: break;
        case ErrorKind::kPeerLost: EXPECT_EQ(error.worker(), concat("worker", crashes_)); break;
        default:
          EXPECT_EQ(error.kind(), ErrorKind::kRemote) << error.what();
          EXPECT_TRUE(fails_ && error.worker() == concat("worker", *fails_)) << error.what();
      }
      return false;
    }
  }

  const std::uint64_t seed_;
  const bool faulty_;
  const bool deterministic_ = is_deterministic(seed_);
  Random random_;
  transport::World world_;
  int workers_ = 0;
  std::uint32_t drop_ = 0, duplicate_ = 0, delay_ = 0;
  int crashes_ = -1;
  std::optional<int> fails_;  // whose hook throws in the first pass
  std::string loses_;         // the kind of letter that is lost at first
  std::uint64_t losses_left_ = 0;
  bool armed_ = false;
  SentLetters letters_;
  std::optional<test::SimulatedWorkers> sessions_;
};

}  // namespace

SentLetters run_simulated(std::uint64_t first_seed, std::uint64_t count, bool faulty) {
  SentLetters letters;
  for (std::uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    auto* const world = new Simulated(seed, faulty);
    world->run();
    for (const auto& [name, sent] : world->letters()) {
      letters[name].all += sent.all;
      letters[name].lost += sent.lost;
    }
    // Of one that went wrong threads may be left, which its end would wait for.
    if (testing::Test::HasFailure()) break;
    delete world;
  }
  return letters;
}

std::vector<std::string> never_lost(const SentLetters& letters) {
  std::vector<std::string> names;
  for (const std::string& each : kinds_of_letters()) {
    const auto sent = letters.find(each);
    if (sent == letters.end() || sent->second.lost == 0) names.push_back(each);
  }
  return names;
}

}  // namespace convoy::autograd::programs
