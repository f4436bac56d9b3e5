#include "queue_kill.h"

#include <signal.h>
#include <torch/types.h>

#include <random>
#include <thread>

#include "base/concat.h"

namespace convoy::share::test {

void run_queue_kills(int victims, unsigned seed) {
  RankGroup group(1 + victims, RankMode::kProcesses, {.limit = std::chrono::seconds(100)});
  group.start([&](Rank& r) {
    {
      const Queue queue = meet_queue(r, {.capacity = 8});
      std::mt19937 random(seed * 100 + static_cast<unsigned>(r.id()));
      r.store()->set(concat("process", r.id()), std::to_string(own_process_word()));
      r.mark("running");
      std::vector<at::Tensor> kept;
      const auto step = [&] {
        auto tensor = at::full({static_cast<std::int64_t>(1 + random() % 3000)}, 7);
        if (!kept.empty() && random() % 4 == 0) tensor = kept.back();  // another's, passed on
        if (random() % 3 != 0 || r.id() == 0) queue.try_put({tensor});
        if (const auto message = queue.try_get()) {
          const auto& got = message->tensor(0);
          EXPECT_TRUE(at::equal(got, at::full_like(got, 7)));
          if (random() % 2 == 0) kept.push_back(got);
        }
        if (kept.size() > 10) kept.clear();
      };
      if (r.id() != 0) {
        for (;;) step();
      }
      for (bool over = false; !over;) {
        for (int i = 0; i < 50; ++i) step();
        over = r.store()->add("over", 0) != 0;
      }
      // A victim that still runs may pass on what is this process's when it has left the queue.
      for (int v = 1; v < r.size(); ++v) {
        const auto word = r.store()->get(concat("process", v), r.deadline());
        while (!is_dead(std::stoull(word), own_domain())) std::this_thread::yield();
      }
      const auto limit = soon();
      while (!limit.expired() && queue.try_get()) {
      }
      EXPECT_LE(queue.lost().items, static_cast<std::uint64_t>(victims));
    }
    expect_nothing_held();
  });
  group.wait_mark("running");
  std::mt19937 random(seed);
  for (int v = 1; v <= victims; ++v) {
    const auto until = Deadline::after(std::chrono::microseconds(random() % 20'000));
    while (!until.expired()) std::this_thread::yield();
    group.kill(v, SIGKILL);
  }
  group.store()->add("over", 1);
  group.join();
}

}  // namespace convoy::share::test
