// What a reducer is made of, each part alone.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ddp/forwards.h"
#include "ddp/join_driver.h"
#include "ddp/parameter_state.h"
#include "ddp/round.h"
#include "ddp/round_observer.h"

namespace convoy::test {
namespace {

at::Tensor filled(double value) { return at::full({3}, value, at::kFloat); }

TEST(RoundTest, OutcomesOnlyGetWorse) {
  Round round;
  round.begin(false);
  round.worsen(Ending::kFailed, "first");
  round.worsen(Ending::kNotFinite, "second");
  round.worsen(Ending::kFailed, "third");
  EXPECT_EQ(round.outcome, Ending::kFailed);
  EXPECT_EQ(round.text, "first");
  round.begin(true);
  EXPECT_EQ(round.outcome, Ending::kGood);
  EXPECT_EQ(round.text, "");
  EXPECT_FALSE(round.met);
}

TEST(RoundTest, OnlyTheFirstOperationMayDisagree) {
  const auto disagree = [] { throw coll::Disagreement("they differ", {}); };
  int absorbed = 0;
  const auto absorb = [&](const coll::Disagreement&) { return ++absorbed > 0; };
  Round round;
  round.begin(false);
  EXPECT_FALSE(round.issue(disagree, absorb));
  EXPECT_EQ(absorbed, 1);
  EXPECT_THROW(round.issue(disagree, absorb), coll::Disagreement);
  EXPECT_EQ(absorbed, 1);
  EXPECT_TRUE(round.issue([] {}, absorb));
  // What cannot be gone on with is thrown.
  round.begin(false);
  EXPECT_THROW(round.issue(disagree, [](const auto&) { return false; }), coll::Disagreement);
}

// A rank that comes late has had its first operation elsewhere: it leaves out the round's.
TEST(RoundTest, WhoComesLateLeavesOutOne) {
  Round round;
  round.late = true;
  round.begin(false);
  int calls = 0;
  const auto count = [&] { ++calls; };
  const auto never = [](const auto&) { return false; };
  EXPECT_FALSE(round.issue(count, never));
  EXPECT_TRUE(round.issue(count, never));
  EXPECT_EQ(calls, 1);
}

TEST(GradientHistoryTest, WhatIsReducedIsSetAsideAndComesBack) {
  GradientHistory history;
  at::Tensor gradient = filled(4);
  history.added(gradient);
  EXPECT_TRUE(history.used);
  history.close(gradient, {.good = true, .has_all = true});
  EXPECT_TRUE(history.reduced);
  EXPECT_FALSE(history.used);
  history.set_aside(gradient, true);
  EXPECT_FALSE(history.reduced);
  EXPECT_TRUE(at::equal(gradient, filled(0)));
  gradient.add_(1);
  history.added(gradient);
  history.close(gradient, {.good = true, .has_all = true});
  EXPECT_TRUE(at::equal(gradient, filled(5)));
  EXPECT_FALSE(history.summed.defined());
}

TEST(GradientHistoryTest, WhoZeroesAGradientMeansAllOfIt) {
  GradientHistory history;
  at::Tensor gradient = filled(4);
  history.close(gradient, {.good = true, .has_all = true});
  history.set_aside(gradient, true);
  gradient.zero_();
  history.set_aside(gradient, true);
  EXPECT_FALSE(history.summed.defined());
}

TEST(GradientHistoryTest, AnAdditionFromElsewhereMixes) {
  GradientHistory history;
  at::Tensor gradient = filled(4);
  history.close(gradient, {.good = true, .has_all = true});
  gradient.add_(1);
  history.look_for_mixing(gradient, false);
  EXPECT_FALSE(history.mixed);
  history.look_for_mixing(gradient, true);
  EXPECT_TRUE(history.mixed);
  gradient.zero_();
  history.set_aside(gradient, true);
  EXPECT_FALSE(history.mixed);
}

TEST(GradientHistoryTest, WhatTheUserChangedIsTold) {
  GradientHistory history;
  at::Tensor gradient = filled(4);
  history.close(gradient, {.good = true, .has_all = true});
  EXPECT_FALSE(history.open(gradient));
  gradient.mul_(2);
  EXPECT_TRUE(history.open(gradient));
  at::Tensor other = filled(1);
  EXPECT_FALSE(history.open(other));  // not ours at all
  EXPECT_FALSE(history.reduced);
}

TEST(GradientHistoryTest, WhatIsDeferredIsNotReduced) {
  GradientHistory history;
  at::Tensor gradient = filled(4);
  history.close(gradient, {.good = true, .has_all = true, .deferred = true});
  EXPECT_FALSE(history.reduced);
  history.left_local = true;
  history.close(gradient, {.good = true, .has_all = true});
  EXPECT_FALSE(history.reduced);
  EXPECT_TRUE(history.used);  // of this rank, for the next round
  history.close(gradient, {.good = false, .has_all = true});
  EXPECT_FALSE(history.used);
}

TEST(GradientInRoundTest, RowsAreSaidBeforeARoundOpens) {
  GradientInRound round;
  round.rows = at::arange(3);
  round.fired = 2;
  round.kept = filled(1);
  round.open(true);
  EXPECT_TRUE(round.touched);
  EXPECT_EQ(round.fired, 0);
  EXPECT_FALSE(round.kept.defined());
  EXPECT_TRUE(round.rows.defined());
}

TEST(JoinDriverTest, AnnouncesEachRoundOnce) {
  JoinDriver join;
  join.announce();  // there is no Join
  EXPECT_FALSE(join.is_active());
  EXPECT_EQ(join.speaker(), 0);
  int announced = 0;
  auto port = std::make_unique<JoinPort>();
  port->announce = [&] {
    ++announced;
    return JoinStep{.live = {2, 3}};
  };
  port->divides_by_live = true;
  join.set(std::move(port));
  join.open_round();
  join.announce();
  join.announce();
  EXPECT_EQ(announced, 1);
  EXPECT_EQ(join.speaker(), 2);
  EXPECT_EQ(join.scale(GradReduce::kMean, 4), 2);
  EXPECT_EQ(join.scale(GradReduce::kSum, 4), 1);
  join.open_round();
  {
    const JoinDriver::Shadow shadow(join, {.live = {3}});
    EXPECT_TRUE(join.shadows());
    join.announce();
    EXPECT_EQ(join.speaker(), 3);
  }
  EXPECT_FALSE(join.shadows());
  EXPECT_EQ(announced, 1);
}

TEST(RoundObserverTest, TellsWhatRoundsWere) {
  RoundObserver observer;
  std::vector<ParameterState> parameters(2);
  const std::vector<at::Tensor> tensors{filled(0), filled(0)};
  parameters[0].active = parameters[1].active = true;
  const auto round = [&](bool good) {
    observer.open(RoundObserver::Clock::now());
    const auto now = RoundObserver::Clock::now();
    observer.close({.good = good, .entered = now, .last_gradient = now, .now = now, .stamps = {}},
                   parameters, tensors, {});
    DdpStats data;
    observer.fill(data);
    return data;
  };
  parameters[0].used = true;
  auto data = round(true);
  EXPECT_EQ(data.backwards, 1u);
  EXPECT_EQ(data.unused_parameter_size, 12);
  EXPECT_TRUE(data.can_set_static_graph);
  observer.failed("it went wrong");
  parameters[1].used = true;
  data = round(false);  // of a failed one it is not known what it used
  EXPECT_TRUE(data.can_set_static_graph);
  EXPECT_TRUE(data.has_error);
  data = round(true);
  EXPECT_FALSE(data.can_set_static_graph);
  EXPECT_FALSE(data.has_error);
  observer.skip();
  EXPECT_TRUE(observer.skipped());
  EXPECT_EQ(round(true).skipped, 1u);
  EXPECT_FALSE(observer.skipped());
}

TEST(ForwardsTest, CountsThoseOfTheRound) {
  Forwards forwards;
  auto counted = forwards.begin(true, false);
  auto aside = forwards.begin(false, false);
  auto paused = forwards.begin(true, true);
  EXPECT_EQ(forwards.count(), 1u);
  EXPECT_EQ(forwards.next(), 4u);
  const auto enter = [](Sink&) { return true; };
  const auto sink = c10::make_intrusive<Sink>(3, paused, enter);
  forwards.visit(*sink, true);  // its backward is one that reduces
  EXPECT_EQ(forwards.count(), 2u);
  forwards.visit(*sink, false);
  EXPECT_EQ(forwards.count(), 1u);
  counted->unwound = true;
  EXPECT_FALSE(forwards.unwound({}).has_value());  // another output of it lives
  counted.reset();
  EXPECT_EQ(forwards.unwound({}), 1u);
  EXPECT_FALSE(forwards.unwound({1}).has_value());
  forwards.drop_unvisited({1});
  EXPECT_EQ(forwards.count(), 1u);
  forwards.drop_unvisited({});
  EXPECT_EQ(forwards.count(), 0u);
}

}  // namespace
}  // namespace convoy::test
