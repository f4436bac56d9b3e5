#include <gtest/gtest-spi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "base/error.h"
#include "base/loop.h"
#include "support/rank_runner.h"
#include "support/stack_dump.h"

namespace convoy::test {
namespace {

class ThreadRunner final : public RankGroup::Runner {
 public:
  ThreadRunner(int size, const RankGroupOptions& options)
      : deadline_(Deadline::after(options.limit)),
        rank_deadline_(Deadline::after(options.limit * 9 / 10)),
        store_(make_local_store()),
        progress_(static_cast<std::size_t>(size)),
        posted_(static_cast<std::size_t>(size)),
        results_(static_cast<std::size_t>(size)) {}

  // The function's captures are gone once the test leaves the scope of the group: wait.
  ~ThreadRunner() override { await_all(); }

  void start(const RankFunction& function) override {
    function_ = function;
    for (std::size_t i = 0; i < results_.size(); ++i) {
      threads_.emplace_back([this, i] { run_rank(i); });
    }
  }

  void wait_mark(const std::string& text, std::optional<int> rank) override {
    if (const auto gone = await_mark(progress_, text, rank, deadline_)) {
      fail(ErrorKind::kPeerLost, "rank ", *gone, " ended without the mark '", text, "'");
    }
  }

  void post(const std::string& text, std::optional<int> rank) override {
    auto posted = posted_.lock();
    for (std::size_t i = 0; i < posted->size(); ++i) {
      if (!rank || static_cast<std::size_t>(*rank) == i) posted->at(i).insert(text);
    }
    posted_.notify();
  }

  void kill(int, int) override {
    fail(ErrorKind::kUnsupported, "ranks that are threads get no signals");
  }
  pid_t pid(int) const override { return ::getpid(); }
  std::shared_ptr<Store> store() override { return store_; }

  std::vector<RankResult> collect() override {
    await_all();
    threads_.clear();
    return results_;
  }
  void abandon() override {}

 private:
  class Link final : public RankLink {
   public:
    Link(ThreadRunner& group, std::size_t rank) : group_(group), rank_(rank) {}

    void mark(const std::string& text) override {
      group_.progress_.lock()->at(rank_).marks.insert(text);
      group_.progress_.notify();
    }
    void wait_for(const std::string& text, const Deadline& deadline) override {
      auto posted = group_.posted_.lock();
      if (!posted.wait(deadline, [&] { return posted->at(rank_).contains(text); })) {
        fail(ErrorKind::kTimeout, "rank ", rank_, ": '", text, "' was not posted in time");
      }
    }
    std::shared_ptr<Store> store() override { return group_.store_; }

   private:
    ThreadRunner& group_;
    std::size_t rank_;
  };

  void run_rank(std::size_t i) {
    set_thread_name(concat("rank ", i));
    RankResult& result = results_[i];  // its only user until `ended`
    {
      testing::TestPartResultArray parts;
      std::optional<RankFailure> thrown;
      {
        testing::ScopedFakeTestPartResultReporter reporter(
            testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &parts);
        Link link(*this, i);
        Rank rank(static_cast<int>(i), static_cast<int>(results_.size()), RankMode::kThreads,
                  rank_deadline_, link);
        thrown = call_rank(function_, rank);
      }
      for (int part = 0; part < parts.size(); ++part) {
        result.failures.push_back(to_failure(parts.GetTestPartResult(part)));
      }
      result.returned = !thrown;
      if (thrown) result.failures.push_back(std::move(*thrown));
    }
    result.status.code = result.failed() ? 1 : 0;
    progress_.lock()->at(i).ended = true;
    progress_.notify();
  }

  void await_all() {
    auto progress = progress_.lock();
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      if (!progress.wait(deadline_, [&] { return progress->at(i).ended; })) {
        progress.unlock();
        give_up();
      }
    }
  }

  [[noreturn]] void give_up() {
    std::fprintf(stderr,
                 "RankGroup: ranks that are threads did not end within the time limit; a thread "
                 "cannot be killed, so the test program ends here.\n");
    auto progress = progress_.lock();
    for (std::size_t i = 0; i < results_.size(); ++i) {
      const bool ended = progress->at(i).ended;
      std::fprintf(stderr, "rank %zu: %s\n", i, ended ? "ended" : "still runs");
      if (!ended) continue;
      for (const auto& failure : results_[i].failures) {
        std::fprintf(stderr, "  %s:%d: %s\n", failure.file.c_str(), failure.line,
                     failure.text.c_str());
      }
    }
    std::fprintf(stderr, "%s", describe_process(::getpid()).c_str());
    request_stacks(::getpid());
    std::abort();
  }

  const Deadline deadline_;
  // A rank's own waits end before the group's, so that it can say what it waited for.
  const Deadline rank_deadline_;
  const std::shared_ptr<Store> store_;
  RankFunction function_;
  Guarded<std::vector<RankProgress>> progress_;
  Guarded<std::vector<std::set<std::string>>> posted_;
  std::vector<RankResult> results_;
  std::vector<std::jthread> threads_;
};

}  // namespace

std::unique_ptr<RankGroup::Runner> make_thread_runner(int size, const RankGroupOptions& options) {
  return std::make_unique<ThreadRunner>(size, options);
}

}  // namespace convoy::test
