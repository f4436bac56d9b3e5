// What takes too long for each run of the tests.
#include <torch/types.h>

#include "queue_kill.h"

namespace convoy::share::test {
namespace {

struct QueueSoakTest : ShareTest {};

// Far more processes than cores, all producing and consuming.
TEST_F(QueueSoakTest, TwentyFourProcesses) {
  RankGroup(24, RankMode::kProcesses, {.limit = std::chrono::seconds(100)}).run([](Rank& r) {
    constexpr int kItems = 20;
    {
      const Queue queue = meet_queue(r, {.capacity = 16});
      const Event go = meet_at<Event>(r, "go", [] { return Event::create(); });
      const Barrier barrier = meet_at<Barrier>(r, "barrier", [&] { return Barrier(24); });
      barrier.wait(r.deadline());
      if (r.id() == 0) go.set();
      ASSERT_TRUE(go.wait(r.deadline()));
      double sum = 0;
      if (r.id() % 2 == 0) {
        for (int i = 0; i < kItems; ++i) {
          queue.put({at::full({256}, r.id() + 1), r.id()}, r.deadline());
        }
      } else {
        for (int i = 0; i < kItems; ++i) {
          const Message message = queue.get(r.deadline());
          EXPECT_EQ(message.tensor(0)[255].item<int>(), message.integer(1) + 1);
          sum += message.tensor(0)[0].item<double>();
        }
      }
      const auto total = r.store()->add("sum", static_cast<std::int64_t>(sum));
      barrier.wait(r.deadline());
      if (r.id() == 0) {
        EXPECT_EQ(r.store()->add("sum", 0), kItems * 12 * 12);
      }
      EXPECT_GE(total, 0);
      barrier.wait(r.deadline());
    }
    expect_nothing_held();
    r.barrier();
  });
}

TEST_F(QueueSoakTest, KillsAtManyMoments) {
  for (unsigned seed = 2; seed < 32; ++seed) run_queue_kills(6, seed);
}

}  // namespace
}  // namespace convoy::share::test
