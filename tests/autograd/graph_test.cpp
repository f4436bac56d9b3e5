// One worker's part of a graph across workers, without a session: lineages, plans, gates, order.
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/types.h>

#include <deque>
#include <unordered_map>

#include "autograd/frames.h"
#include "autograd/gated.h"
#include "autograd/lineage.h"
#include "autograd/nodes.h"
#include "support/expect_error.h"

namespace convoy::autograd::detail {
namespace {

namespace ag = torch::autograd;
using convoy::test::expect_error;

constexpr WorkerId kHere = 7;
constexpr std::uint64_t kOtherThread = 1'000'000;

ag::Edge edge_of(const at::Tensor& tensor) { return ag::impl::gradient_edge(tensor); }

// Tensors that came with a message of worker 3.
std::vector<at::Tensor> receive(std::uint64_t message, std::size_t count, Lineage lineage = {},
                                const Origin& origin = {}) {
  const auto node = c10::make_intrusive<RecvNode>(Received{message, 3, std::move(lineage), origin});
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < count; ++i) {
    at::Tensor& tensor = tensors.emplace_back(torch::rand({2}));
    ag::create_gradient_edge(tensor, node);
  }
  return tensors;
}

Lineage lineage_with(std::initializer_list<Upstream> all) {
  Lineage lineage;
  for (const Upstream& each : all) EXPECT_TRUE(lineage.add(each));
  return lineage;
}

bool has(const Lineage& lineage, std::uint64_t message, std::uint32_t tensors, std::uint32_t of) {
  for (const Upstream& each : lineage.all) {
    if (each.message == message && each.tensors == tensors && each.of == of) return true;
  }
  return false;
}

// --- Lineages ---------------------------------------------------------------------------------

TEST(AutogradGraphTest, LineageIsExact) {
  const Lineage before = lineage_with({{50, 1, 3, 0b1, 0b01}, {51, 1, 3, 0b1, 0b10}});
  const auto came = receive(60, 2, before);
  const auto leaf = torch::rand({2}, torch::requires_grad());
  // The first depends on tensor 0 alone, the second on both, the third on none.
  const Lineage lineage = lineage_of(
      {edge_of(came[0] * leaf), edge_of(came[0] + came[1]), edge_of(leaf * 2), edge_of(leaf)},
      kHere);
  EXPECT_TRUE(lineage.complete);
  EXPECT_EQ(lineage.all.size(), 4U);
  EXPECT_TRUE(has(lineage, 60, 0b01, 0b01));
  EXPECT_TRUE(has(lineage, 60, 0b11, 0b10));
  EXPECT_TRUE(has(lineage, 50, 0b1, 0b11));
  EXPECT_TRUE(has(lineage, 51, 0b1, 0b10));
  EXPECT_EQ(lineage.all[0].receiver, kHere);
  EXPECT_EQ(lineage.all[0].sender, 3U);
}

TEST(AutogradGraphTest, LineagesAreBounded) {
  // A long history.
  at::Tensor y = receive(60, 1)[0];
  for (int i = 0; i < Lineage::kMostNodes; ++i) y = y + 1;
  EXPECT_TRUE(lineage_of({edge_of(y)}, kHere).complete);
  EXPECT_FALSE(lineage_of({edge_of(y + 1)}, kHere).complete);
  // Many messages.
  at::Tensor sum = receive(100, 1)[0];
  for (std::size_t i = 1; i < Lineage::kMost; ++i) sum = sum + receive(100 + i, 1)[0];
  EXPECT_EQ(lineage_of({edge_of(sum)}, kHere).all.size(), Lineage::kMost);
  EXPECT_FALSE(lineage_of({edge_of(sum + receive(200, 1)[0])}, kHere).complete);
  // Many tensors.
  const auto many = receive(300, Lineage::kMostTensors + 1);
  EXPECT_TRUE(lineage_of({edge_of(many[Lineage::kMostTensors - 1])}, kHere).complete);
  EXPECT_FALSE(lineage_of({edge_of(many[Lineage::kMostTensors])}, kHere).complete);
  // What does not say all makes others so.
  Lineage unknown;
  unknown.complete = false;
  EXPECT_FALSE(lineage_of({edge_of(receive(400, 1, unknown)[0] * 2)}, kHere).complete);
}

TEST(AutogradGraphTest, PlanOfAWalk) {
  const Lineage before =
      lineage_with({{50, 1, 3, 0b1, 0b01}, {51, kHere, 1, 0b10, 0b01}, {52, 1, 3, 0b1, 0b10}});
  const auto came = receive(60, 2, before);
  Walk walk;
  walk.follow({edge_of(came[0] * 2)});
  const auto plan = walk.plan(kHere);
  ASSERT_TRUE(plan.has_value());
  // 52 is not: tensor 1 of message 60 was not reached.
  ASSERT_EQ(plan->size(), 3U);
  ASSERT_EQ(plan->at(1).sends.size(), 1U);
  EXPECT_EQ(plan->at(1).sends[0].message, 50U);
  EXPECT_EQ(plan->at(1).ports, 1U);
  EXPECT_FALSE(plan->at(1).from_root);
  EXPECT_EQ(plan->at(3).sends[0].message, 60U);
  EXPECT_EQ(plan->at(3).sends[0].tensors, 0b01U);
  EXPECT_TRUE(plan->at(3).from_root);
  EXPECT_EQ(plan->at(kHere).sends[0].tensors, 0b10U);
  EXPECT_EQ(plan->at(kHere).ports, 1U);
  Lineage unknown;
  unknown.complete = false;
  walk.follow({edge_of(receive(61, 1, unknown)[0])});
  EXPECT_FALSE(walk.plan(kHere).has_value());
}

// Numbers of messages are those of one context: another one may have the same.
TEST(AutogradGraphTest, OtherContexts) {
  const Origin here{1, 1};
  const auto came = receive(60, 1, {}, here)[0];
  EXPECT_TRUE(lineage_of({edge_of(came * 2)}, kHere, here).complete);
  Walk walk(own_received_nodes(), here);
  walk.follow({edge_of(came * 2)});
  EXPECT_EQ(walk.ports(), 1U);
  const auto expect_refused = [&](const Origin& origin, const char* text) {
    const auto other = receive(60, 1, {}, origin)[0] * 2;
    EXPECT_FALSE(lineage_of({edge_of(other)}, kHere, here).complete);
    Walk refuses(own_received_nodes(), here);
    expect_error(ErrorKind::kInvalidArgument, text, [&] { refuses.follow({edge_of(other)}); });
  };
  expect_refused({1, 2}, "received in context 2, and the backward pass is of context 1");
  expect_refused({2, 1}, "received in a context of another session");
}

// --- Runs -------------------------------------------------------------------------------------

struct TestHost final : GatedRun::Host {
  Arrived next_gradient(std::uint64_t message) override {
    asked.push_back(message);
    auto found = arrived.begin();
    while (message != 0 && found->send->sent->message != message) ++found;
    Arrived next = std::move(*found);
    arrived.erase(found);
    return next;
  }
  void send_back(const Received& received, std::vector<at::Tensor>&& gradients) override {
    sent[received.message] = std::move(gradients);
  }
  void arrived_at(ag::AccumulateGrad& leaf, const at::Tensor& gradient) override {
    leaves[leaf.variable.unsafeGetTensorImpl()] = gradient;
  }
  bool engine_accumulates(ag::AccumulateGrad& leaf) override {
    return leaf.variable.is_same(accumulated);
  }
  bool sends_zeros() const override { return false; }
  void before_node(const char*) override {}
  bool after_node() override { return true; }

  std::deque<Arrived> arrived;
  std::vector<std::uint64_t> asked;
  std::unordered_map<std::uint64_t, std::vector<at::Tensor>> sent;
  std::unordered_map<const void*, at::Tensor> leaves;
  at::Tensor accumulated;
};

// A node that stands for a message of somebody else's: PyTorch's, say. It must not be run.
struct ForeignNode final : ag::Node {
  ag::variable_list apply(ag::variable_list&&) override {
    ADD_FAILURE() << "it was run";
    return {};
  }
};
struct ForeignNodes final : ReceivedNodes {
  const Received* find(const ag::Node& node) const override {
    const auto found = all.find(&node);
    return found == all.end() ? nullptr : &found->second;
  }
  std::unordered_map<const ag::Node*, Received> all;
};

TEST(AutogradGraphTest, RunsOnNodesOfOthers) {
  const auto node = c10::make_intrusive<ForeignNode>();
  std::vector<at::Tensor> came{torch::rand({2}), torch::rand({2}), torch::rand({2})};
  for (auto& tensor : came) ag::create_gradient_edge(tensor, node);
  ForeignNodes nodes;
  nodes.all[node.get()] = {60, 3, {}};
  const auto leaf = torch::rand({2}, torch::requires_grad());
  const auto engines = torch::rand({2}, torch::requires_grad());

  Walk walk(nodes);
  const auto loss = (came[0] * leaf + came[2] * engines).sum();
  walk.follow({edge_of(loss)});
  const auto sent = std::make_shared<SentMessage>();
  sent->message = 9;
  sent->edges = {edge_of(leaf * 3)};
  walk.follow_all(sent);
  EXPECT_EQ(walk.ports(), 2U);

  TestHost host;
  host.accumulated = engines;
  host.arrived.push_back({&walk.sends().at(9), {torch::full({2}, 10.0)}});
  GatedRun run(host, walk);
  run.add_gates(walk);
  run.run({edge_of(loss)}, {torch::ones({})}, /*retain=*/false);
  const auto& back = host.sent.at(60);
  ASSERT_EQ(back.size(), 3U);
  EXPECT_TRUE(back[0].allclose(leaf));
  EXPECT_FALSE(back[1].defined());  // it was not used
  EXPECT_TRUE(back[2].allclose(engines));
  EXPECT_TRUE(host.leaves.at(leaf.unsafeGetTensorImpl()).allclose(came[0] + 30));
  EXPECT_TRUE(engines.grad().allclose(came[2]));
  EXPECT_EQ(host.leaves.size(), 1U);
}

TEST(AutogradGraphTest, AnOrdinaryPassDoesNotLeaveTheWorker) {
  const auto y = receive(60, 1)[0] * 2;
  expect_error(ErrorKind::kInvalidArgument, "leads to another worker", [&] { y.sum().backward(); });
}

TEST(AutogradGraphTest, WhatIsApart) {
  const auto shared = torch::rand({2}, torch::requires_grad());
  const auto own = torch::rand({2}, torch::requires_grad());
  const auto message_with = [](const at::Tensor& tensor) {
    const auto sent = std::make_shared<SentMessage>();
    sent->message = 9;
    sent->edges = {edge_of(tensor * 2)};
    return std::vector<std::shared_ptr<const SentMessage>>{sent};
  };
  Walk walk;
  walk.follow({edge_of(receive(60, 1)[0] * shared)});
  EXPECT_TRUE(walk.is_apart_from(message_with(own)));
  EXPECT_FALSE(walk.is_apart_from(message_with(shared)));
}

// --- The order of a program -------------------------------------------------------------------

// Three calls with one tensor each; their gradients come in any order, and are added in that of the
// program: the last one first, between what was computed after the calls and before them.
TEST(AutogradGraphTest, GatesInTheOrderOfTheProgram) {
  const auto place = std::make_shared<FramePlace>(std::vector<std::uint32_t>{});
  FrameOrder order;
  order.add(mark_here(place, FramePlace::kFirst));
  const auto leaf = torch::full({1}, 1.0F, torch::requires_grad());
  const auto x = leaf * 1;
  Walk walk;
  for (std::uint64_t call = 1; call <= 3; ++call) {
    const auto sent = std::make_shared<SentMessage>();
    sent->message = call;
    sent->edges = {edge_of(x)};
    sent->place = place;
    sent->element = static_cast<std::uint32_t>(2 * call);
    order.add(mark_here(place, sent->element + 1));
    walk.follow_all(sent);
  }
  const auto loss = x * 1;
  walk.follow({edge_of(loss)});
  order.number(walk, FrameOrder::Others::kNone);

  // Only in one order do these add up to this: 1 + 2^-24 is 1.
  const float tiny = 1.0F / (1 << 24);
  TestHost host;
  const float gradients[] = {tiny, tiny, 1};
  for (const std::uint64_t call : {2, 1, 3}) {
    host.arrived.push_back({&walk.sends().at(call), {torch::full({1}, gradients[call - 1])}});
  }
  GatedRun run(host, walk);
  run.add_gates(walk, [&](const SentMessage& sent) { return order.number_of(sent); });
  run.run({edge_of(loss)}, {torch::full({1}, tiny)}, /*retain=*/true);
  EXPECT_EQ(host.asked, (std::vector<std::uint64_t>{3, 2, 1}));
  const at::Tensor got = host.leaves.at(leaf.unsafeGetTensorImpl());
  EXPECT_EQ(got.item<float>(), ((tiny + 1) + tiny) + tiny);

  // Numbers stay, whatever comes later.
  const std::uint64_t before = order.number_of(*walk.sends().at(2).sent);
  order.add(mark_here(place, 9));
  order.number(walk, FrameOrder::Others::kNone);
  EXPECT_EQ(order.number_of(*walk.sends().at(2).sent), before);
}

std::shared_ptr<SentMessage> reply_of(const std::shared_ptr<FramePlace>& place,
                                      std::uint32_t element) {
  const auto sent = std::make_shared<SentMessage>();
  sent->place = place;
  sent->element = element;
  sent->reply = true;
  return sent;
}

// Handlers go on while passes run: many calls come between others that have their numbers.
TEST(AutogradGraphTest, RoomForCallsInBetween) {
  const auto place = std::make_shared<FramePlace>(std::vector<std::uint32_t>{});
  FrameOrder order;
  std::uint64_t sequence_nr = 1;
  const auto add = [&](std::uint32_t element) {
    order.add({place, element, 1, ++sequence_nr});
    return reply_of(place, element);
  };
  const auto first = add(2), last = add(1'000'000);
  order.number(Walk(), FrameOrder::Others::kRun);
  const std::uint64_t before = order.number_of(*first);
  std::vector<std::shared_ptr<SentMessage>> all{first};
  for (std::uint32_t i = 3; i < 1000; ++i) all.push_back(add(i));  // at once
  order.number(Walk(), FrameOrder::Others::kRun);
  for (std::uint32_t i = 1000; i < 3000; ++i) {  // one after the other
    all.push_back(add(i));
    order.number(Walk(), FrameOrder::Others::kRun);
  }
  EXPECT_EQ(order.number_of(*first), before);
  // When no pass has numbers, there is always room.
  for (std::uint32_t i = 3000; i < 6000; ++i) {
    all.push_back(add(i));
    order.number(Walk(), FrameOrder::Others::kNone);
  }
  all.push_back(last);
  for (std::size_t i = 1; i < all.size(); ++i) {
    ASSERT_LT(order.number_of(*all[i - 1]), order.number_of(*all[i])) << i;
  }
  expect_error(ErrorKind::kUnsupported, "other passes run", [&] {
    for (std::uint32_t i = 6000; i < 20'000; ++i) {
      add(i);
      order.number(Walk(), FrameOrder::Others::kRun);
    }
  });
}

// Calls in calls, and a pass in each: all that is new lies between two that have numbers.
TEST(AutogradGraphTest, RoomForCallsInCalls) {
  FrameOrder order;
  at::Tensor t = torch::rand({2}, torch::requires_grad());
  std::vector<std::shared_ptr<FramePlace>> places;
  std::vector<at::Tensor> made;
  const auto make_more = [&](const std::shared_ptr<FramePlace>& place, std::uint32_t element) {
    order.add(mark_here(place, element));
    made.push_back(t = t * 1.5);
    Walk walk;
    walk.follow({edge_of(t)});
    order.number(walk, FrameOrder::Others::kNone);
  };
  std::vector<std::uint32_t> path;
  for (std::size_t depth = 0; depth < FramePlace::kMostDepth; ++depth) {
    places.push_back(std::make_shared<FramePlace>(path));
    // What comes behind its call has a number before the call does anything.
    order.add({places.back(), 3, kOtherThread, 1});
    make_more(places.back(), FramePlace::kFirst);
    path.push_back(2);
  }
  for (std::size_t depth = places.size(); depth-- > 0;) make_more(places[depth], 3);
  std::uint64_t last = 0;
  const auto expect_behind = [&](std::uint64_t number) {
    EXPECT_GT(number, last);
    last = number;
  };
  for (std::size_t depth = 0; depth < places.size(); ++depth) {
    expect_behind(order.number_of(*reply_of(places[depth], FramePlace::kFirst)));
    expect_behind(made[depth].grad_fn()->sequence_nr());
  }
  for (std::size_t i = places.size(); i < made.size(); ++i) {
    expect_behind(order.number_of(*reply_of(places[made.size() - 1 - i], 3)));
    expect_behind(made[i].grad_fn()->sequence_nr());
  }
}

// What a place has made lies before the calls behind it, however much that is.
TEST(AutogradGraphTest, PlacesWithManyNodes) {
  const auto place = std::make_shared<FramePlace>(std::vector<std::uint32_t>{});
  const auto called = std::make_shared<FramePlace>(std::vector<std::uint32_t>{2});
  FrameOrder order;
  order.add({place, FramePlace::kFirst, at::RecordFunction::currentThreadId(), 1});
  order.add({place, 3, kOtherThread, 1});
  // Nodes, as if this thread had made so many before them.
  const auto number = [&](std::uint64_t sequence_nr) {
    const auto y = torch::rand({2}, torch::requires_grad()) * 2;
    y.grad_fn()->set_sequence_nr(sequence_nr);
    Walk walk;
    walk.follow({edge_of(y)});
    order.number(walk, FrameOrder::Others::kRun);
    return y.grad_fn()->sequence_nr();
  };
  const std::uint64_t last = number(std::uint64_t{1} << 38);
  order.add({called, FramePlace::kFirst, kOtherThread, 2});
  EXPECT_LT(number(2), last);
  EXPECT_GT(order.number_of(*reply_of(called, FramePlace::kFirst)), last);
  EXPECT_GT(order.number_of(*reply_of(place, 3)),
            order.number_of(*reply_of(called, FramePlace::kFirst)));
  expect_error(ErrorKind::kUnsupported, "too many operations",
               [&] { number((std::uint64_t{1} << 40) - 1); });
}

TEST(AutogradGraphTest, ProgramsWithoutAnOrder) {
  const auto later = std::make_shared<FramePlace>(std::vector<std::uint32_t>{4});
  const auto earlier = std::make_shared<FramePlace>(std::vector<std::uint32_t>{2});
  FrameOrder order;
  order.add(mark_here(later, FramePlace::kFirst));
  const auto y = receive(60, 1)[0] * 2;
  // A handler of an earlier call sends what a later one has computed.
  const auto sent = std::make_shared<SentMessage>();
  sent->message = 9;
  sent->reply = true;
  sent->edges = {edge_of(y)};
  sent->place = earlier;
  sent->element = FramePlace::kReply;
  Walk walk;
  walk.follow_all(sent);
  expect_error(ErrorKind::kUnsupported, "later call",
               [&] { order.number(walk, FrameOrder::Others::kNone); });
  const auto deep = std::make_shared<FramePlace>(std::vector<std::uint32_t>{});
  deep->too_deep = true;
  order.add(mark_here(deep, FramePlace::kFirst));
  expect_error(ErrorKind::kUnsupported, "nested too deep",
               [&] { order.number(walk, FrameOrder::Others::kNone); });
}

}  // namespace
}  // namespace convoy::autograd::detail
