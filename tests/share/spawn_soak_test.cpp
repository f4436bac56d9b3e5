// More processes than cores, some of which are killed all the time.
#include <signal.h>
#include <torch/types.h>

#include <random>

#include "convoy/published.h"
#include "convoy/slots.h"
#include "convoy/spawn.h"
#include "support.h"

namespace convoy::share::test {
namespace {

using Weights = share::Published<std::vector<at::Tensor>>;

std::vector<at::Tensor> filled(std::uint64_t version) {
  const auto value = static_cast<double>(version);
  return {at::full({10'000}, value), at::full({3}, value)};
}

void act(int, const share::Slots& slots, const Weights& weights) {
  while (auto slot = slots.fill(Deadline::after(std::chrono::minutes(2)))) {
    const auto now = weights.read();
    if (!now[0].eq(now[1][0]).all().item<bool>()) throw std::runtime_error("torn weights");
    slot["values"].fill_(now[1][0].item<double>());
    slot.commit();
  }
}

class SpawnSoakTest : public ShareTest {};

// 24 actors on whatever cores there are; 40 of them are killed, one after another.
TEST_F(SpawnSoakTest, TwentyFourActors) {
  constexpr int kActors = 24, kKills = 40;
  std::mt19937 random(5);
  const auto limit = Deadline::after(std::chrono::minutes(8));
  const Weights weights(filled(1), {.buffers = 16});
  const share::Slots slots(2 * kActors, {{"values", {5'000}}});
  auto actors = spawn<act>(kActors, slots, weights);
  int killed = 0, restarted = 0;
  while (restarted < kKills) {
    ASSERT_FALSE(limit.expired());
    for (int i = 0; i < 50; ++i) {
      const auto slot = slots.next(Deadline::after(std::chrono::minutes(2)));
      const auto values = slot["values"];
      ASSERT_TRUE(values.eq(values[0]).all().item<bool>());
    }
    try {
      weights.publish(filled(weights.version() + 1));
    } catch (const Error& error) {  // more readers than buffers: it may not find one
      ASSERT_EQ(error.kind(), ErrorKind::kResource) << error.what();
    }
    if (killed == restarted && killed < kKills) {
      ::kill(actors.pids()[random() % kActors], SIGKILL);
      ++killed;
    }
    for (const auto& failure : actors.restart_failed()) {
      ASSERT_EQ(failure.signal, SIGKILL) << failure.to_string();
      ++restarted;
    }
  }
  slots.close();
  EXPECT_TRUE(actors.join(Deadline::after(std::chrono::minutes(2))));
  while (slots.next(soon())) {
  }
  slots.reclaim();
  EXPECT_EQ(slots.counts().free, slots.size());
}

}  // namespace
}  // namespace convoy::share::test
