// Published weights and slots between processes, some of which are killed.
#include <signal.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "base/concat.h"
#include "convoy/published.h"
#include "convoy/slots.h"
#include "convoy/spawn.h"
#include "support.h"

namespace convoy::share::test {
namespace {

class PublishedTest : public ShareTest {};
class SlotsTest : public ShareTest {};

using Weights = std::vector<at::Tensor>;

// A few shapes, one of which is large enough to be torn, all filled with the version.
Weights weights_of(std::uint64_t version) {
  const auto value = static_cast<double>(version);
  return {at::full({300, 500}, value), at::full({7}, value, at::kLong), at::full({}, value)};
}

// The one version that all of it is; 0: it is torn.
std::uint64_t version_in(const share::Snapshot& snapshot) {
  const double first = snapshot[2].item<double>();
  for (const auto& tensor : snapshot.tensors()) {
    if (!tensor.eq(first).all().item<bool>()) return 0;
  }
  return static_cast<std::uint64_t>(first);
}

void wait_for_a_moment(std::mt19937& random, int most_us) {
  const auto until =
      Deadline::after(std::chrono::microseconds(random() % static_cast<unsigned>(most_us)));
  while (!until.expired()) std::this_thread::yield();
}

TEST_F(PublishedTest, AModulesParametersAndBuffers) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
  const share::Published<torch::nn::Sequential> weights(net);
  EXPECT_EQ(weights.version(), 1U);
  auto before = weights.read();
  EXPECT_EQ(before.size(), net->parameters().size() + net->buffers().size());
  EXPECT_TRUE(at::equal(before["0.weight"], net[0]->as<torch::nn::Linear>()->weight));
  EXPECT_FALSE(before["0.weight"].requires_grad());
  EXPECT_GE(before.age().count(), 0);

  {
    const torch::NoGradGuard no_gradients;
    for (auto& parameter : net->parameters()) parameter.add_(1);
    for (auto& buffer : net->buffers()) buffer.add_(1);
  }
  EXPECT_EQ(weights.publish(net), 2U);
  EXPECT_EQ(weights.behind(before), 1U);
  EXPECT_EQ(before.version(), 1U);
  torch::nn::Sequential other(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
  EXPECT_EQ(weights.load_into(other), 2U);
  for (std::size_t i = 0; i < net->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(net->parameters()[i], other->parameters()[i]));
    EXPECT_TRUE(other->parameters()[i].requires_grad());
  }
  EXPECT_TRUE(at::equal(net->buffers()[1], other->buffers()[1]));
  EXPECT_TRUE(at::equal(before["0.bias"] + 1, net->named_parameters()["0.bias"]));

  torch::nn::Sequential wider(torch::nn::Linear(5, 3), torch::nn::BatchNorm1d(3));
  expect_error(ErrorKind::kInvalidArgument, "'0.weight' is [3, 5] of Float, but [3, 4]",
               [&] { weights.publish(wider); });
  expect_error(ErrorKind::kInvalidArgument, "no tensor 'x'", [&] { (void)before["x"]; });
  EXPECT_EQ(weights.version(), 2U);
}

TEST_F(PublishedTest, StridedSourcesAndTensorsThatOutliveAll) {
  at::Tensor kept;
  {
    const share::Published<Weights> weights(Weights{at::arange(6).view({2, 3}).t()},
                                            {.buffers = 2, .patience = std::chrono::seconds(0)});
    kept = weights.read()[0];
    weights.publish({at::zeros({3, 2}, at::kLong)});
    expect_error(ErrorKind::kResource, "all 2 buffers are held by readers", [&] {
      const auto newest = weights.read();
      weights.publish({at::zeros({3, 2}, at::kLong)});
    });
  }
  EXPECT_TRUE(at::equal(kept, at::arange(6).view({2, 3}).t()));
}

TEST_F(PublishedTest, WrongHandlesAreRefused) {
  expect_error(ErrorKind::kInvalidArgument, "not a handle",
               [] { share::PublishedTensors::open(at::ones({3})); });
  const share::Slots slots(1, {{"x", {1}}});
  expect_error(ErrorKind::kInvalidArgument, "not a handle of published tensors",
               [&] { share::PublishedTensors::open(slots.handle()); });
  expect_error(ErrorKind::kInvalidArgument, "no tensors",
               [] { share::Published<Weights>(Weights{}); });
}

// Reads until it has seen the last version.
void read_versions(int, const share::Published<Weights>& weights, std::uint64_t last) {
  std::uint64_t seen = 0;
  spawned()->parent.send(Message{"reads"});
  while (seen < last) {
    const auto snapshot = weights.read();
    const std::uint64_t found = version_in(snapshot);
    if (found != snapshot.version()) throw std::runtime_error("torn");
    if (found < seen) throw std::runtime_error("older than the one before");
    seen = found;
  }
}

// Readers are killed while they hold versions; the writer is never stopped by them, and nothing
// that the others read is torn.
TEST_F(PublishedTest, KilledReaders) {
  constexpr std::uint64_t kLast = std::uint64_t{1} << 40;
  constexpr int kReaders = 3, kKills = 4;
  std::mt19937 random(7);
  const share::Published<Weights> weights(weights_of(1), {.buffers = kReaders + 2});
  auto readers = spawn<read_versions>(kReaders, weights, kLast);
  for (int i = 0; i < kReaders; ++i) readers.channel(i).receive_message(soon());
  const auto limit = soon();
  const auto publish_for_a_moment = [&] {
    const auto until = Deadline::after(std::chrono::milliseconds(20 + random() % 20));
    while (!until.expired()) weights.publish(weights_of(weights.version() + 1));
  };
  for (int kill = 0; kill < kKills; ++kill) {
    publish_for_a_moment();
    const int victim = static_cast<int>(random() % kReaders);
    ::kill(readers.pids()[static_cast<std::size_t>(victim)], SIGKILL);
    std::vector<ProcessFailure> failed;
    while (failed.empty() && !limit.expired()) {
      weights.publish(weights_of(weights.version() + 1));
      failed = readers.restart_failed();
    }
    ASSERT_EQ(failed.size(), 1U);
    EXPECT_EQ(failed[0].signal, SIGKILL) << failed[0].to_string();
    readers.channel(victim).receive_message(soon());
  }
  publish_for_a_moment();
  EXPECT_TRUE(readers.failures().empty()) << readers.failures()[0].to_string();
  readers.terminate(std::chrono::milliseconds(0));
  EXPECT_EQ(version_in(weights.read()), weights.version());
}

// Publishes without end: its own, or what another one began.
void write_versions(int, const std::optional<at::Tensor>& handle) {
  const auto weights =
      handle ? share::Published<Weights>::open(*handle) : share::Published<Weights>(weights_of(1));
  spawned()->parent.send(Message{weights.handle()});
  for (;;) weights.publish(weights_of(weights.version() + 1));
}

// A writer is killed in the middle: the newest whole version stays readable, and another process
// goes on from there.
TEST_F(PublishedTest, KilledWriters) {
  std::mt19937 random(3);
  auto writer = spawn<write_versions>(1, std::nullopt);
  auto handle = writer.channel(0).receive(soon());
  const auto weights = share::Published<Weights>::open(handle);
  expect_error(ErrorKind::kInvalidArgument, "there is one writer",
               [&] { weights.publish(weights_of(1)); });
  std::uint64_t last = 0;
  for (int kill = 0; kill < 3; ++kill) {
    const auto limit = soon();
    const std::uint64_t goal = last + 20;
    while (weights.version() < goal && !limit.expired()) {
      const auto snapshot = weights.read();
      EXPECT_EQ(version_in(snapshot), snapshot.version());
    }
    wait_for_a_moment(random, 3000);
    ::kill(writer.pids()[0], SIGKILL);
    expect_error(ErrorKind::kPeerLost, "SIGKILL", [&] { writer.join(soon()); });
    const auto snapshot = weights.read();
    EXPECT_EQ(version_in(snapshot), snapshot.version());
    EXPECT_GE(snapshot.version(), goal);
    last = snapshot.version();
    expect_error(ErrorKind::kPeerLost, "has ended",
                 [&] { (void)weights.read_newer(last, soon()); });
    writer = spawn<write_versions>(1, handle);
    writer.channel(0).receive(soon());
  }
  writer.terminate(std::chrono::milliseconds(0));
  weights.publish(weights_of(weights.version() + 1));  // nobody else does any more
  EXPECT_EQ(version_in(weights.read()), weights.version());
}

// --- Slots ------------------------------------------------------------------------------------

TEST_F(SlotsTest, FillAndRead) {
  const share::Slots slots(2, {{"states", {3, 2}}, {"actions", {3}, at::kLong}});
  EXPECT_EQ(slots.size(), 2U);
  {
    auto slot = slots.fill(soon());
    slot["states"].fill_(5);
    slot[1].copy_(at::arange(3));
    slot.commit();
    EXPECT_FALSE(slot);
    slots.fill(soon());  // given back unfilled
  }
  EXPECT_EQ(slots.counts().free, 1U);
  at::Tensor kept;
  {
    const auto slot = slots.next(soon());
    EXPECT_EQ(slot.number(), 1U);
    EXPECT_TRUE(at::equal(slot["states"], at::full({3, 2}, 5)));
    kept = slot["actions"];
  }
  EXPECT_EQ(slots.counts().reading, 1U);  // a tensor of it is in use
  EXPECT_TRUE(at::equal(kept, at::arange(3)));
  kept.reset();
  EXPECT_EQ(slots.counts().free, 2U);
  EXPECT_FALSE(slots.try_next());
  expect_error(ErrorKind::kInvalidArgument, "no tensor 'rewards'",
               [&] { (void)slots.try_fill()["rewards"]; });
  expect_error(ErrorKind::kInvalidArgument, "this Slot is empty", [] { (void)share::Slot()[0]; });
  expect_error(ErrorKind::kInvalidArgument, "sizes must be >= 0, got -1",
               [] { share::Slots(2, {{"x", {-1}}}); });
  slots.close();
  EXPECT_FALSE(slots.try_fill());
  EXPECT_FALSE(slots.next(soon()));
}

// Fills slots with its index and a count, until they are closed.
void act(int index, const share::Slots& slots) {
  for (int count = 0;; ++count) {
    auto slot = slots.fill(soon());
    if (!slot) return;
    slot["values"].fill_(count);
    slot["actor"].fill_(index);
    slot.commit();
  }
}

void fill_half(int, const share::Slots& slots) {
  const auto slot = slots.fill(soon());
  slot[0].narrow(0, 0, 5).fill_(1);
  spawned()->parent.send(Message{"half"});
  for (;;) ::pause();
}

// All slots are half weights_of by actors that are killed: they come back to who waits for one.
TEST_F(SlotsTest, HalfFilledSlotsComeBack) {
  const share::Slots slots(2, {{"x", {10}}});
  auto actors = spawn<fill_half>(2, slots);
  for (int i = 0; i < 2; ++i) actors.channel(i).receive_message(soon());
  EXPECT_EQ(slots.counts().filling, 2U);
  for (const int pid : actors.pids()) ::kill(pid, SIGKILL);
  const auto first = slots.fill(soon());
  const auto second = slots.fill(soon());
  EXPECT_TRUE(first);
  EXPECT_TRUE(second);
  EXPECT_FALSE(slots.try_next());
  EXPECT_EQ(slots.counts().abandoned, 2U);
}

// Actors are killed at random moments: every slot comes back, what is read is whole, and of each
// actor in order.
TEST_F(SlotsTest, KilledActors) {
  constexpr int kActors = 2, kKills = 4;
  std::mt19937 random(11);
  const share::Slots slots(3, {{"values", {20'000}}, {"actor", {}, at::kLong}});
  auto actors = spawn<act>(kActors, slots);
  std::vector<double> last(kActors, -1);
  const auto read_one = [&] {
    const auto slot = slots.next(soon());
    const auto values = slot["values"];
    const double first = values[0].item<double>();
    ASSERT_TRUE(values.eq(first).all().item<bool>());
    const auto actor = static_cast<std::size_t>(slot["actor"].item<std::int64_t>());
    // After a restart it counts from the beginning.
    ASSERT_TRUE(first == last[actor] + 1 || first == 0) << first << " after " << last[actor];
    last[actor] = first;
  };
  for (int kill = 0; kill < kKills; ++kill) {
    for (int i = 0; i < 50; ++i) read_one();
    wait_for_a_moment(random, 2000);
    const auto victim = static_cast<std::size_t>(kill % kActors);
    ::kill(actors.pids()[victim], SIGKILL);
    const auto limit = soon();
    while (actors.restart_failed().empty() && !limit.expired()) read_one();
    const auto seen_before = last[victim];
    while (last[victim] != 0 && last[victim] <= seen_before && !limit.expired()) read_one();
  }
  slots.close();
  EXPECT_TRUE(actors.join(soon()));
  while (slots.next(soon())) {
  }
  slots.reclaim();
  EXPECT_EQ(slots.counts().free, slots.size());
}

// The learner is killed with a slot in its hands: another one gets it.
void hold_one(int, const share::Slots& slots) {
  const auto slot = slots.next(soon());
  spawned()->parent.send(Message{static_cast<std::int64_t>(slot.number())});
  for (;;) ::pause();
}

TEST_F(SlotsTest, AKilledLearnersSlotIsReadAgain) {
  const share::Slots slots(2, {{"x", {1}}});
  auto slot = slots.fill(soon());
  slot[0].fill_(42);
  slot.commit();
  auto learner = spawn<hold_one>(1, slots);
  EXPECT_EQ(learner.channel(0).receive_message(soon()).integer(0), 1);
  EXPECT_FALSE(slots.try_next());
  learner.terminate(std::chrono::milliseconds(0));
  const auto again = slots.next(soon());
  EXPECT_EQ(again[0].item<float>(), 42);
  EXPECT_EQ(slots.counts().returned, 1U);
}

}  // namespace
}  // namespace convoy::share::test
