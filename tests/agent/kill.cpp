#include "kill.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <thread>

#include "base/concat.h"
#include "base/random.h"
#include "support.h"
#include "support/rank_group.h"
#include "transport/shm/fabric.h"

namespace convoy::agent::test {
namespace {

using namespace std::chrono_literals;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;

constexpr int kWorkers = 3;

enum class Point { kInWriter, kInHandler, kInEnded, kAfterCall, kOutside };

struct Plan {
  int victim;
  Point point;
  std::uint64_t count;  // of such points before it

  explicit Plan(std::uint64_t seed) {
    Random random(seed);
    victim = static_cast<int>(random.below(kWorkers));
    point = static_cast<Point>(random.below(5));
    count = random.below(100);
  }
};

class Worker {
 public:
  Worker(Rank& rank, const Plan& plan, std::uint64_t seed)
      : rank_(rank),
        plan_(plan),
        random_(seed * 100 + static_cast<std::uint64_t>(rank.id())),
        agent_({.name = concat("worker", rank.id()),
                .rank = static_cast<WorkerId>(rank.id()),
                .call_timeout = 60s,
                .threads = 2},
               {function("work", [this](Request& request, const std::string& text) {
                 reach(Point::kInHandler);
                 if (text == "nested") {
                   // The third worker may be the one that is dead.
                   const auto other = static_cast<WorkerId>(0 + 1 + 2) - request.agent().self().id -
                                      request.caller().id;
                   sync(request.agent(), other, "work", "plain");
                 }
                 return text;
               })}) {}

  void run() {
    agent_->meet(*rank_.store(), kWorkers, rank_.deadline());
    rank_.barrier();
    rank_.mark("going");
    const auto victim = static_cast<WorkerId>(plan_.victim);
    while (!agent_->is_lost(victim) && !rank_.deadline().expired()) round();
    ASSERT_TRUE(agent_->is_lost(victim)) << "not told in time";
    // What is dead fails at once, the others go on.
    EXPECT_THAT(error_text(ErrorKind::kPeerLost, [&] { sync(*agent_, victim, "work"); }),
                testing::HasSubstr(concat("worker", plan_.victim)));
    for (WorkerId other = 0; other < kWorkers; ++other) {
      if (other == victim) continue;
      EXPECT_EQ(sync(*agent_, other, "work", "plain"), "plain");
    }
    // Calls of handlers may still be under way.
    while (agent_->stats().outstanding != 0 && !rank_.deadline().expired()) {
      std::this_thread::yield();
    }
    EXPECT_EQ(agent_->stats().outstanding, 0u);
    rank_.store()->set(concat("done/", rank_.id()), "");
    for (int other = 0; other < kWorkers; ++other) {
      if (other != plan_.victim) rank_.store()->get(concat("done/", other), rank_.deadline());
    }
    agent_.reset();
    shm::Fabric::instance().close_door(Id{});
  }

 private:
  void reach(Point point) {
    if (rank_.id() == plan_.victim && plan_.point == point && points_.fetch_add(1) == plan_.count) {
      ::kill(::getpid(), SIGKILL);
    }
  }

  void round() {
    struct Sent {
      TextCall call;
      WorkerId to;
      std::string text;
    };
    std::deque<Sent> calls;
    std::vector<std::byte> large(random_.below(5) == 0 ? random_.below(300'000) : 0);
    for (int i = 0; i < 8; ++i) {
      Sent& sent = calls.emplace_back();
      sent.to = static_cast<WorkerId>(random_.below(kWorkers));
      const bool nested = sent.to != static_cast<WorkerId>(rank_.id()) && random_.below(3) == 0;
      sent.text = nested ? "nested" : "plain";
      sent.call.then = [this](TextCall&) { reach(Point::kInEnded); };
      auto write = [&](std::span<std::byte> to) {
        std::memcpy(to.data(), sent.text.data(), to.size());
        reach(Point::kInWriter);
      };
      const Piece piece{large};
      agent_->start(sent.call, sent.to, id_of("work"),
                    {.body = transport::Head(sent.text.size(), write),
                     .pieces = std::span(&piece, large.empty() ? 0 : 1)});
      reach(Point::kAfterCall);
    }
    for (Sent& sent : calls) {
      agent_->wait(sent.call);
      if (!sent.call.failure) {
        EXPECT_EQ(sent.call.text, sent.text);
        continue;
      }
      const Failure& failure = *sent.call.failure;
      if (failure.kind == ErrorKind::kRemote) {
        // A nested call: its own error is in the text.
        EXPECT_EQ(sent.text, "nested");
        EXPECT_THAT(failure.text, testing::HasSubstr(concat("worker", plan_.victim)));
      } else {
        EXPECT_EQ(to_string(failure.kind), to_string(ErrorKind::kPeerLost)) << failure.text;
        EXPECT_EQ(failure.worker, concat("worker", plan_.victim)) << failure.text;
      }
    }
  }

  Rank& rank_;
  const Plan& plan_;
  Random random_;
  std::atomic<std::uint64_t> points_{0};
  TestAgent agent_;
};

}  // namespace

void run_kill(std::uint64_t seed) {
  const Plan plan(seed);
  RankGroup group(kWorkers, RankMode::kProcesses, {.limit = 100s});
  group.start([&](Rank& rank) { Worker(rank, plan, seed).run(); });
  if (plan.point == Point::kOutside) {
    group.wait_mark("going", plan.victim);
    group.kill(plan.victim, SIGKILL);
  }
  auto results = group.collect();
  if (results.empty()) return;
  const auto at = static_cast<std::size_t>(plan.victim);
  if (!convoy::test::in_rank()) {
    EXPECT_EQ(results[at].status.signal, SIGKILL) << "seed " << seed;
  }
  results.erase(results.begin() + plan.victim);
  convoy::test::report(results);
}

}  // namespace convoy::agent::test
