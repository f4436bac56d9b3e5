#include "agent/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"

namespace convoy::agent {
namespace {

struct Job final : Task {
  std::function<void()> body;
  std::atomic<int> runs{0};
  std::atomic<int> discards{0};
  std::string refusal;

 private:
  void run_task() noexcept override {
    if (body) body();
    ++runs;
  }
  void discard() noexcept override { ++discards; }
  void refuse(const Error& error) noexcept override { refusal = error.what(); }
};

// Threads that cannot be made, as often as it says.
struct Starter {
  int failures = 0;
  std::vector<std::thread> threads = {};

  Executor::Starter function() {
    return [this](std::function<void()> run) {
      if (failures > 0) {
        --failures;
        fail(ErrorKind::kResource, "no more threads");
      }
      threads.emplace_back(std::move(run));
    };
  }
  void join() {
    for (auto& thread : std::exchange(threads, {})) thread.join();
  }
};

// Nobody would ever come by to run it.
TEST(ExecutorTest, ATaskIsRefusedIfNotEvenOneThreadCanBeMade) {
  Starter starter{.failures = 1};
  Job first;
  Job second;
  {
    Executor executor(2, starter.function());
    executor.submit(first);
    EXPECT_NE(first.refusal.find("no more threads"), std::string::npos) << first.refusal;
    EXPECT_EQ(executor.stats().queued, 0u);
    executor.submit(second);  // it goes on
    starter.join();
    EXPECT_EQ(second.runs, 1);
  }
  EXPECT_EQ(first.runs + first.discards, 0);
}

// A task that waits for one which cannot be run would wait for ever.
TEST(ExecutorTest, ATaskIsRefusedIfAllOthersWaitAndNoThreadCanBeMade) {
  Starter starter;
  Job nested;
  Job outer;
  std::atomic<bool> ready{false};
  {
    Executor executor(1, starter.function());
    outer.body = [&] {
      starter.failures = 1;
      executor.submit(nested);  // queued: there is one thread, and it is busy
      EXPECT_EQ(executor.stats().queued, 1u);
      const Executor::Waiting waiting;
      ready = !nested.refusal.empty();
    };
    executor.submit(outer);
    starter.join();
  }
  EXPECT_EQ(outer.runs, 1);
  EXPECT_TRUE(ready) << "refused when the other began to wait";
  EXPECT_EQ(nested.runs, 0);
}

// One that runs comes back for it.
TEST(ExecutorTest, ATaskWaitsForAThreadThatIsThereIfNoMoreCanBeMade) {
  Starter starter;
  Job first;
  Job second;
  std::latch begun(1);
  std::latch go_on(1);
  {
    Executor executor(2, starter.function());
    first.body = [&] {
      begun.count_down();
      go_on.wait();
    };
    executor.submit(first);
    begun.wait();
    starter.failures = 1;
    executor.submit(second);
    EXPECT_EQ(executor.stats().queued, 1u);
    go_on.count_down();
    starter.join();
  }
  EXPECT_EQ(second.refusal, "");
  EXPECT_EQ(second.runs, 1);
}

}  // namespace
}  // namespace convoy::agent
