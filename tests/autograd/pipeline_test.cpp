// Pipelines: schedules, gradients beside one process, failures, deaths.
#include <gmock/gmock.h>
#include <signal.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/concat.h"
#include "base/guarded.h"
#include "convoy/autograd.h"
#include "convoy/pipeline.h"
#include "pipeline/schedule.h"
#include "support/eventually.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::pipeline_test {

using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using rpc::Session;
using testing::HasSubstr;
using Kind = PipelineSpan::Kind;
using Tensors = std::vector<at::Tensor>;
using namespace std::chrono_literals;

// --- stages ---

constexpr int kWidth = 6;

// The same on whichever worker it is made.
torch::nn::Sequential make_net(int index) {
  torch::nn::Sequential net(torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh());
  const at::NoGradGuard no_grad;
  int number = 0;
  for (auto& parameter : net->parameters()) {
    const auto ramp = torch::arange(parameter.numel(), torch::kFloat).view(parameter.sizes());
    parameter.copy_((ramp * 0.37F + static_cast<float>(7 * index + number++)).sin() * 0.5F);
  }
  return net;
}
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

PipelineStage make_stage(int index, bool last) {
  return last ? PipelineStage(make_net(index), loss_of) : PipelineStage(make_net(index));
}
CONVOY_RPC(make_stage);
Tensors gradients_of(PipelineStage& stage) {
  Tensors all;
  for (const auto& parameter : stage.parameters()) {
    if (parameter.grad().defined()) all.push_back(parameter.grad());
  }
  return all;
}
CONVOY_RPC(gradients_of);
void clear_gradients_of(PipelineStage& stage) {
  for (const at::Tensor& parameter : stage.parameters()) parameter.mutable_grad().reset();
}
CONVOY_RPC(clear_gradients_of);
Tensors context_gradients_of(PipelineStage& stage) {
  Tensors all;
  const auto found = autograd::current().gradients();
  for (const auto& parameter : stage.parameters()) {
    if (found.contains(parameter)) all.push_back(found.at(parameter));
  }
  return all;
}
CONVOY_RPC(context_gradients_of);
std::string error_of(PipelineStage& stage) { return stage.last_error(); }
CONVOY_RPC(error_of);

// Throws where it is told to, once.
struct Trouble {
  std::atomic<int> forward{-1}, backward{-1};  // in so many calls
};
Trouble& trouble() {
  static Trouble one;
  return one;
}
struct Troubled : torch::autograd::Function<Troubled> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    if (trouble().forward-- == 0) throw std::runtime_error("forward is troubled");
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& g) {
    if (trouble().backward-- == 0) throw std::runtime_error("backward is troubled");
    return g;
  }
};
PipelineStage make_troubled(int index) {
  auto net = make_net(index);
  return PipelineStage(
      [net](const at::Tensor& x) mutable { return Troubled::apply(net->forward(x)); },
      net->parameters());
}
CONVOY_RPC(make_troubled);

// In processes that are killed: stops in the second forward, or backward, and
// says so.
std::function<void()>& on_stop() {
  static std::function<void()> one;
  return one;
}
Guarded<std::optional<PipelineStage>>& stage_here() {
  static Guarded<std::optional<PipelineStage>> one;
  return one;
}
// This worker's, once it knows of an error.
PipelineStage failed_stage() {
  const auto failed = [] {
    const auto stage = *stage_here().lock();
    return stage && !stage->last_error().empty();
  };
  EXPECT_TRUE(convoy::test::eventually(failed));
  return stage_here().lock()->value();
}
struct Stopping : torch::autograd::Function<Stopping> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            bool in_backward) {
    static int calls = 0;
    context->saved_data["stops"] = in_backward;
    if (!in_backward && ++calls == 2) on_stop()();
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& g) {
    static int calls = 0;
    if (context->saved_data["stops"].toBool() && ++calls == 2) on_stop()();
    return {g[0], at::Tensor()};
  }
};
PipelineStage make_stopping(int index, bool in_backward) {
  auto net = make_net(index);
  const PipelineStage stage(
      [net, in_backward](const at::Tensor& x) mutable {
        return Stopping::apply(net->forward(x), in_backward);
      },
      net->parameters());
  *stage_here().lock() = stage;
  return stage;
}
CONVOY_RPC(make_stopping);
PipelineStage make_known(int index, bool last) {
  const auto stage = make_stage(index, last);
  *stage_here().lock() = stage;
  return stage;
}
CONVOY_RPC(make_known);

namespace {

constexpr PipelineSchedule kBoth[] = {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B};

at::Tensor batch(int samples, double shift) {
  const auto ramp = torch::arange(samples * kWidth, torch::kFloat).view({samples, kWidth});
  return (ramp * 0.11 + shift).cos();
}

// One process that works on one micro-batch after the other.
struct Alone {
  explicit Alone(int stages) {
    for (int s = 0; s < stages; ++s) nets.push_back(make_net(s));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& net : nets) x = net->forward(x);
    return x;
  }
  at::Tensor step(const at::Tensor& input, const at::Tensor& target, int micro_batches) {
    const auto inputs = input.tensor_split(micro_batches);
    const auto targets = target.tensor_split(micro_batches);
    at::Tensor sum;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const auto loss = loss_of(forward(inputs[i]), targets[i]);
      const double weight =
          static_cast<double>(inputs[i].size(0)) / static_cast<double>(input.size(0));
      loss.backward(torch::full_like(loss, weight));
      const auto part = loss.detach() * weight;
      sum = sum.defined() ? sum + part : part;
    }
    return sum;
  }
  Tensors gradients(std::size_t stage) {
    Tensors all;
    for (const auto& parameter : nets[stage]->parameters()) all.push_back(parameter.grad());
    return all;
  }
  std::vector<torch::nn::Sequential> nets;
};

void expect_same(const Tensors& some, const Tensors& others) {
  ASSERT_EQ(some.size(), others.size());
  for (std::size_t i = 0; i < some.size(); ++i) EXPECT_TRUE(at::equal(some[i], others[i]));
}

using Stages = std::vector<RRef<PipelineStage>>;

Stages make_stages(const Session& session) {
  Stages stages;
  for (int s = 0; s < session.size(); ++s) {
    stages.push_back(session.remote<make_stage>(s, s, s + 1 == session.size()));
  }
  return stages;
}

void run_root(int n, const std::function<void(Session&)>& function,
              RankMode mode = RankMode::kThreads) {
  RankGroup(n, mode).run([&](Rank& r) {
    Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
    if (r.id() == 0) function(session);
    session.shutdown();
  });
}

std::vector<PipelineOp> ops_of(const std::string& text) {
  std::vector<PipelineOp> ops;
  for (const char c : text) {
    if (c == 'F' || c == 'B') {
      ops.push_back({c == 'F' ? Kind::kForward : Kind::kBackward, 0});
    } else if (c != ' ') {
      ops.back().micro_batch = c - '0';
    }
  }
  return ops;
}

// --- schedules ---

TEST(PipelineScheduleTest, ThreeStages) {
  const auto of = [](PipelineSchedule schedule, std::size_t stage) {
    return pipeline_ops(schedule, stage, 3, 5);
  };
  for (std::size_t stage = 0; stage < 3; ++stage) {
    EXPECT_EQ(of(PipelineSchedule::kGPipe, stage), ops_of("F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"));
  }
  EXPECT_EQ(of(PipelineSchedule::k1F1B, 0), ops_of("F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"));
  EXPECT_EQ(of(PipelineSchedule::k1F1B, 1), ops_of("F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"));
  EXPECT_EQ(of(PipelineSchedule::k1F1B, 2), ops_of("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"));
}

// Stages whose forward takes 1 and whose backward takes 2: all schedules take
// the ideal time, and none blocks.
TEST(PipelineScheduleTest, TakesTheIdealTime) {
  for (const auto schedule : kBoth) {
    for (std::size_t stages = 1; stages <= 5; ++stages) {
      for (int parts = 1; parts <= 9; ++parts) {
        const auto count = static_cast<std::size_t>(parts);
        std::vector<std::vector<int>> forwards(stages, std::vector<int>(count, -1));
        auto backwards = forwards;
        std::vector<std::size_t> next(stages, 0);
        std::vector<int> clock(stages, 0), kept(stages, 0);
        for (bool moved = true; moved;) {
          moved = false;
          for (std::size_t s = 0; s < stages; ++s) {
            const auto ops = pipeline_ops(schedule, s, stages, parts);
            if (next[s] == ops.size()) continue;
            const auto& op = ops[next[s]];
            const auto i = static_cast<std::size_t>(op.micro_batch);
            const bool forward = op.kind == Kind::kForward;
            const int ready = forward ? (s == 0 ? 0 : forwards[s - 1][i])
                                      : (s + 1 == stages ? forwards[s][i] : backwards[s + 1][i]);
            if (ready < 0) continue;
            clock[s] = std::max(clock[s], ready) + (forward ? 1 : 2);
            (forward ? forwards : backwards)[s][i] = clock[s];
            kept[s] += forward ? 1 : -1;
            if (schedule == PipelineSchedule::k1F1B) {
              EXPECT_LE(kept[s], static_cast<int>(stages - s));
            }
            ++next[s];
            moved = true;
          }
        }
        EXPECT_EQ(*std::max_element(clock.begin(), clock.end()),
                  3 * (parts + static_cast<int>(stages) - 1))
            << stages << " stages, " << parts << " micro-batches";
      }
    }
  }
}

// --- beside one process ---

void compare_with_one_process(Session& session) {
  const int n = session.size();
  const auto stages = make_stages(session);
  Alone alone(n);
  for (const auto schedule : kBoth) {
    for (const int parts : {1, 4, 7}) {
      const Pipeline pipeline(session, stages, {.micro_batches = parts, .schedule = schedule});
      const auto input = batch(10, parts), target = batch(10, -parts);
      const auto step = pipeline.step(input, target);
      EXPECT_TRUE(at::equal(step.loss, alone.step(input, target, parts)));
      for (int s = 0; s < n; ++s) {
        const auto place = static_cast<std::size_t>(s);
        expect_same(stages[place].rpc_sync<gradients_of>(), alone.gradients(place));
        stages[place].rpc_sync<clear_gradients_of>();
        alone.nets[place]->zero_grad();
      }
      EXPECT_EQ(step.timeline.spans.size(), static_cast<std::size_t>(2 * parts * n));
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::allclose(pipeline.forward(input), alone.forward(input)));
    }
  }
}

TEST(PipelineTest, AsOneProcess) {
  for (const int n : {1, 2, 3, 4}) run_root(n, compare_with_one_process);
}
TEST(PipelineTest, AsOneProcessInProcesses) {
  run_root(3, compare_with_one_process, RankMode::kProcesses);
}

// In a context gradients are there, and `.grad` is untouched.
TEST(PipelineTest, InAContext) {
  run_root(3, [](Session& session) {
    const auto stages = make_stages(session);
    const Pipeline pipeline(session, stages);
    const auto input = batch(8, 1), target = batch(8, 2);
    Alone alone(3);
    alone.step(input, target, 4);
    const autograd::Context context(session);
    pipeline.step(input, target);
    for (std::size_t s = 0; s < 3; ++s) {
      expect_same(stages[s].rpc_sync<context_gradients_of>(), alone.gradients(s));
      EXPECT_TRUE(stages[s].rpc_sync<gradients_of>().empty());
    }
    // Of several steps they add up.
    alone.step(target, input, 4);
    pipeline.step(target, input);
    const auto sums = stages[1].rpc_sync<context_gradients_of>();
    for (std::size_t i = 0; i < sums.size(); ++i) {
      EXPECT_TRUE(at::allclose(sums[i], alone.gradients(1)[i], 1e-5, 1e-6));
    }
    EXPECT_EQ(pipeline.parameters().size(), 6U);
  });
}

TEST(PipelineTest, Pictures) {
  run_root(2, [](Session& session) {
    const Pipeline pipeline(session, make_stages(session), {.micro_batches = 2});
    const auto timeline = pipeline.step(batch(4, 1), batch(4, 2)).timeline;
    EXPECT_EQ(timeline.workers, (std::vector<std::string>{"worker0", "worker1"}));
    std::vector<PipelineSpan::Time> ends(2);
    for (const auto& span : timeline.spans) {
      EXPECT_LE(ends[span.stage], span.begin);
      EXPECT_LE(span.begin, span.end);
      ends[span.stage] = span.end;
    }
    const auto svg = timeline.svg();
    EXPECT_THAT(svg, HasSubstr("0: worker0"));
    std::size_t boxes = 0;
    for (auto at = svg.find("<rect"); at != std::string::npos; at = svg.find("<rect", at + 1)) {
      ++boxes;
    }
    EXPECT_EQ(boxes, 8U);
    EXPECT_THAT(timeline.chrome_trace(), HasSubstr("\"B1\""));
  });
}

// --- what goes wrong ---

TEST(PipelineTest, AFailureIsToldToAll) {
  run_root(3, [](Session& session) {
    const Stages stages = {session.remote<make_stage>(0, 0, false),
                           session.remote<make_troubled>(1, 1),
                           session.remote<make_stage>(2, 2, true)};
    const auto input = batch(8, 1), target = batch(8, 2);
    for (const auto schedule : kBoth) {
      const Pipeline pipeline(session, stages, {.schedule = schedule});
      for (const bool forward : {true, false}) {
        (forward ? trouble().forward : trouble().backward) = 2;
        const std::string what = forward ? "forward" : "backward";
        try {
          pipeline.step(input, target);
          ADD_FAILURE() << "it did not fail";
        } catch (const rpc::RemoteError& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kRemote);
          EXPECT_EQ(error.worker(), "worker1");
          EXPECT_THAT(error.what(), HasSubstr("pipeline, stage 1 of 3 (worker1): "));
          EXPECT_THAT(error.what(),
                      HasSubstr(concat(what, " of micro-batch 2: ", what, " is troubled")));
        }
        for (const auto& stage : stages) {
          // A stage hears of it soon, but not before we do.
          const auto deadline = Deadline::after(20s);
          while (stage.rpc_sync<error_of>().find(what + " is troubled") == std::string::npos &&
                 !deadline.expired()) {
          }
          EXPECT_THAT(stage.rpc_sync<error_of>(), HasSubstr(what + " is troubled"));
          EXPECT_TRUE(stage.rpc_sync<gradients_of>().empty());
        }
      }
    }
    // The next step is as if nothing had been.
    Alone alone(3);
    const auto loss = Pipeline(session, stages).step(input, target).loss;
    EXPECT_TRUE(at::equal(loss, alone.step(input, target, 4)));
    expect_same(stages[0].rpc_sync<gradients_of>(), alone.gradients(0));
  });
}

TEST(PipelineTest, BadArguments) {
  run_root(2, [](Session& session) {
    const auto stages = make_stages(session);
    constexpr auto kInvalid = ErrorKind::kInvalidArgument;
    expect_error(kInvalid, "no stages", [&] { Pipeline(session, {}); });
    expect_error(kInvalid, "an empty reference", [&] { Pipeline(session, {stages[0], {}}); });
    expect_error(kInvalid, "got 0", [&] { Pipeline(session, stages, {.micro_batches = 0}); });
    const Pipeline pipeline(session, stages);
    expect_error(kInvalid, "the input cannot be cut", [&] { pipeline.step(batch(3, 0), {}); });
    expect_error(kInvalid, "8 samples and 9", [&] { pipeline.step(batch(8, 0), batch(9, 0)); });
    // Told by the stage: the order is wrong.
    expect_error(ErrorKind::kRemote, "needs a loss",
                 [&] { Pipeline(session, {stages[1], stages[0]}).step(batch(8, 0), batch(8, 0)); });
    expect_error(ErrorKind::kTimeout, " of 2 (worker", [&] {
      Pipeline(session, stages, {.timeout = Deadline::after(0s)}).step(batch(8, 0), batch(8, 0));
    });
    EXPECT_NO_THROW(pipeline.step(batch(8, 0), batch(8, 0)));
  });
}

// A stage dies in the middle of the schedule: everybody is told its name.
void kill_a_stage(PipelineSchedule schedule, bool in_backward) {
  RankGroup group(3, RankMode::kProcesses);
  group.start([&](Rank& r) {
    on_stop() = [&r] {
      r.mark("stopped");
      r.wait_for("never");
    };
    Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
    if (r.id() == 0) {
      const Stages stages = {session.remote<make_known>(0, 0, false),
                             session.remote<make_stopping>(1, 1, in_backward),
                             session.remote<make_known>(2, 2, true)};
      const Pipeline pipeline(session, stages, {.schedule = schedule, .timeout = 60s});
      try {
        pipeline.step(batch(8, 1), batch(8, 2));
        ADD_FAILURE() << "it did not fail";
      } catch (const rpc::RemoteError& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
        EXPECT_EQ(error.worker(), "worker1") << error.what();
        EXPECT_THAT(error.what(), HasSubstr("stage 1 of 3 (worker1)"));
      }
      r.mark("failed");
    }
    if (r.id() != 1) {
      r.wait_for("look");
      const PipelineStage stage = failed_stage();
      EXPECT_THAT(stage.last_error(), HasSubstr("worker1"));
      for (const auto& parameter : stage.parameters()) {
        EXPECT_FALSE(parameter.grad().defined());
      }
      r.mark("told");
    }
    r.wait_for("end");
    stage_here().lock()->reset();
    session.shutdown({.graceful = false, .ignore_leaks = true});
  });
  group.wait_mark("stopped", 1);
  group.kill(1, SIGKILL);
  group.wait_mark("failed", 0);
  group.post("look");
  group.wait_mark("told", 0);
  group.wait_mark("told", 2);
  group.post("end");
  group.join();
}
TEST(PipelineTest, AStageDiesInForward) { kill_a_stage(PipelineSchedule::kGPipe, false); }
TEST(PipelineTest, AStageDiesInBackward) { kill_a_stage(PipelineSchedule::k1F1B, true); }

// Whoever runs it dies: stages end the step by themselves.
TEST(PipelineTest, TheDriverDies) {
  RankGroup group(3, RankMode::kProcesses);
  group.start([](Rank& r) {
    on_stop() = [&r] {
      r.mark("stopped");
      r.wait_for("killed");
    };
    Session session({.rank = r.id(), .size = r.size(), .store = r.store()});
    if (r.id() == 0) {
      const Stages stages = {session.remote<make_stopping>(1, 0, false),
                             session.remote<make_known>(2, 1, true)};
      EXPECT_ANY_THROW(Pipeline(session, stages).step(batch(8, 1), batch(8, 2)));
    } else {
      r.wait_for("look");
      EXPECT_THAT(failed_stage().last_error(), HasSubstr("the worker that runs it is gone"));
      r.mark("told");
    }
    r.wait_for("end");
    stage_here().lock()->reset();
    session.shutdown({.graceful = false, .ignore_leaks = true});
  });
  group.wait_mark("stopped", 1);
  group.kill(0, SIGKILL);
  group.post("killed", 1);
  group.post("look");
  group.wait_mark("told", 1);
  group.wait_mark("told", 2);
  group.post("end");
  group.join();
}

}  // namespace
}  // namespace convoy::pipeline_test
