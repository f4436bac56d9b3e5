// Deaths while a group is being made: the others hear of it by name, long before their deadline.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <fstream>

#include "base/concat.h"
#include "support.h"

namespace convoy::coll::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

// Ends the process at the n-th call.
class DeadlyStore final : public Store {
 public:
  DeadlyStore(std::shared_ptr<Store> inner, int calls) : inner_(std::move(inner)), left_(calls) {}

  void set(const std::string& key, std::string_view value) override {
    count();
    inner_->set(key, value);
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    count();
    return inner_->get(key, deadline);
  }
  std::optional<std::string> try_get(const std::string& key) override {
    return inner_->try_get(key);
  }
  void wait(std::span<const std::string> keys, const Deadline& deadline) override {
    count();
    inner_->wait(keys, deadline);
  }
  bool check(std::span<const std::string> keys) override { return inner_->check(keys); }
  std::int64_t add(const std::string& key, std::int64_t delta) override {
    count();
    return inner_->add(key, delta);
  }
  void append(const std::string& key, std::string_view value) override {
    inner_->append(key, value);
  }
  std::string compare_set(const std::string& key, std::string_view expected,
                          std::string_view desired) override {
    return inner_->compare_set(key, expected, desired);
  }
  bool erase(const std::string& key) override { return inner_->erase(key); }
  std::vector<std::string> keys(const std::string& prefix) override { return inner_->keys(prefix); }
  Versioned watch(const std::string& key, std::uint64_t since, const Deadline& deadline) override {
    return inner_->watch(key, since, deadline);
  }
  std::chrono::milliseconds timeout() const override { return inner_->timeout(); }

 private:
  void count() {
    if (left_-- > 0) return;
    inner_->set("killed", std::to_string(Clock::now().time_since_epoch().count()));
    raise(SIGKILL);
  }

  std::shared_ptr<Store> inner_;
  int left_;
};

// How many calls of the store the victim lives for. It tells of itself in the first, and is then
// waited for at every later step.
class FormationTest : public testing::TestWithParam<std::tuple<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Points, FormationTest,
                         testing::Combine(testing::Values(0, 2), testing::Range(1, 9)),
                         [](const auto& test) {
                           return concat("Rank", std::get<0>(test.param), "Call",
                                         std::get<1>(test.param));
                         });

TEST_P(FormationTest, ADeathIsToldByName) {
  const auto [victim, calls] = GetParam();
  RankGroup ranks(4, RankMode::kProcesses);
  ranks.start([victim = victim, calls = calls](Rank& r) {
    std::shared_ptr<Store> store = r.store();
    if (r.id() == victim) store = std::make_shared<DeadlyStore>(store, calls);
    r.barrier();
    const std::string text = error_of([&] {
      const auto group = Group::create(with_prefix(store, "world"), r.id(), r.size(),
                                       {.name = "world", .timeout = kFar});
      if (r.id() == victim) raise(SIGKILL);
      group->barrier();  // some may have got that far
    });
    const auto told = Clock::now().time_since_epoch().count();
    EXPECT_THAT(text, AllOf(HasSubstr("peer lost"), HasSubstr("group \"world\""),
                            HasSubstr(concat("rank ", victim, " (pid ")), HasSubstr("SIGKILL")));
    r.store()->set(concat("told/", r.id()), std::to_string(told));
  });
  const auto begin = Clock::now().time_since_epoch().count();
  for (int r = 0; r < 4; ++r) {
    if (r == victim) continue;
    const auto told = std::stoll(ranks.store()->get(concat("told/", r), Deadline::after(30s)));
    // From the death, or, if it died after the last call, from the start of all.
    const auto killed = ranks.store()->try_get("world/killed");
    EXPECT_LT(std::chrono::nanoseconds(told - (killed ? std::stoll(*killed) : begin)),
              killed ? kEventLimit : kEventLimit + 20s);
  }
  const auto results = ranks.collect();
  for (int r = 0; r < 4; ++r) {
    const auto& one = results[static_cast<std::size_t>(r)];
    if (r == victim) {
      EXPECT_EQ(one.status.signal, SIGKILL);
    } else {
      EXPECT_FALSE(one.failed()) << one.output;
    }
  }
}

// A rank that never comes is no death: the others say who is missing, at their deadline.
TEST(FormationTest, WhoDoesNotComeIsNamed) {
  RankGroup(3, RankMode::kProcesses).run([](Rank& r) {
    if (r.id() == 1) {
      r.store()->get("over", r.deadline());
      return;
    }
    EXPECT_THAT(error_of([&] { make_group(r, "world", {.timeout = 300ms}); }),
                AllOf(HasSubstr("timeout"), HasSubstr("did not come by the deadline: 1")));
    if (r.store()->add("late", 1) == 2) r.store()->set("over", "");
  });
}

// A rank of the job ends before it comes to a group of some of them. Another group knows.
TEST(FormationTest, ADeathBeforeItIsToldByAnotherGroup) {
  RankGroup ranks(4, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto world = Group::create(with_prefix(r.store(), "world"), r.id(), r.size(),
                                     {.name = "world", .timeout = kFar, .job_ranks = {0, 1, 2, 3}});
    world->barrier();
    if (r.id() == 2) raise(SIGKILL);
    if (r.id() == 1) return;
    const auto begin = Clock::now();
    const std::string text = error_of([&] {
      Group::create(with_prefix(r.store(), "some"), r.id() == 0 ? 2 : 0, 3,
                    {.name = "some", .timeout = kFar, .job_ranks = {3, 2, 0}});
    });
    EXPECT_THAT(text, AllOf(HasSubstr("peer lost"), HasSubstr("group \"some\""),
                            HasSubstr("rank 1 (pid "), HasSubstr("SIGKILL")));
    EXPECT_LT(Clock::now() - begin, kEventLimit + 20s);
  });
  const auto results = ranks.collect();
  for (const std::size_t r : {0, 1, 3}) EXPECT_FALSE(results[r].failed()) << results[r].output;
}

std::size_t address_space() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

// No thread can be started while this lives: there are no addresses for its stack.
class NoThreads {
 public:
  NoThreads() {
    getrlimit(RLIMIT_AS, &before_);
    rlimit now = before_;
    now.rlim_cur = address_space() + (std::size_t{1} << 20);
    setrlimit(RLIMIT_AS, &now);
  }
  ~NoThreads() { setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_{};
};

// Neither the operation nor the message takes place on any rank, and the next ones do.
TEST(ThreadLimitTest, AnOperationWithoutAThreadIsRefusedAndTheNextOneWorks) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    const auto group = make_group(r);
    std::vector<float> data(1 << 16, 1.0F);
    if (r.id() == 1) {
      {
        const NoThreads none;
        EXPECT_THAT(
            error_of([&] {
              group->start(group->calls().all_reduce(data.data(), data.data(), 4, DataType::kF32))
                  .wait();
            }),
            AllOf(HasSubstr("resource"), HasSubstr("starting a thread")));
        EXPECT_THAT(error_of([&] {
                      group->recv_async(data.data(), data.size(), DataType::kF32, 0).wait();
                    }),
                    AllOf(HasSubstr("resource"), HasSubstr("starting a thread")));
      }
    }
    r.barrier();
    group->start(group->calls().all_reduce(data.data(), data.data(), 4, DataType::kF32)).wait();
    EXPECT_EQ(data[0], 2.0F);
    if (r.id() == 0) {
      data.assign(data.size(), 7.0F);
      group->send_async(data.data(), data.size(), DataType::kF32, 1).wait();
    } else {
      group->recv_async(data.data(), data.size(), DataType::kF32, 0).wait();
      EXPECT_EQ(data.back(), 7.0F);
    }
    group->barrier();
  });
}

}  // namespace
}  // namespace convoy::coll::test
