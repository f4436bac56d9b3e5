// Agents: what all do together, and how a session ends.
#include <gmock/gmock.h>

#include <atomic>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "agent/gate.h"
#include "agent/support.h"

namespace convoy::agent::test {
namespace {

using namespace std::chrono_literals;

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(AgentTest, AllGatherAndBarrier) {
  Session session(4, {echo()});
  std::atomic<int> came{0};
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      Agent& agent = session[rank];
      const WorkerId all[] = {0, 1, 2, 3};
      const std::string mine(rank == 2 ? 100'000 : 1, static_cast<char>('a' + rank));
      for (int i = 0; i < 20; ++i) {
        const auto values = agent.all_gather(mine, all, Deadline::after(20s));
        ASSERT_EQ(values.size(), 4u);
        EXPECT_EQ(values[rank], mine);
        EXPECT_EQ(values[2].size(), 100'000u);
        EXPECT_EQ(values[3], "d");
      }
      ++came;
      agent.barrier(all, Deadline::after(20s));
      EXPECT_EQ(came, 4);
      if (rank < 2) {
        const WorkerId some[] = {1, 0};
        EXPECT_THAT(agent.all_gather(std::to_string(rank), some, Deadline::after(20s)),
                    ElementsAre("1", "0"));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  const WorkerId pair[] = {0, 3};
  EXPECT_THAT(
      error_text(ErrorKind::kTimeout, [&] { session[0].barrier(pair, Deadline::after(20ms)); }),
      HasSubstr("worker3"));
  error_text(ErrorKind::kInvalidArgument, [&] { session[1].barrier(pair, Deadline::after(20ms)); });
}

TEST(AgentTest, ShutdownWaitsForCallsEverywhere) {
  std::atomic<int> done{0};
  TestFunction chain = function("chain", [&](Request& request, const std::string& text) {
    const int left = std::stoi(text);
    if (left == 0) return std::string("end");
    const auto next = (request.agent().self().id + 1) % 3;
    auto result = sync(request.agent(), next, "chain", std::to_string(left - 1));
    ++done;
    return result;
  });
  Session session(3, {chain});
  std::deque<TextCall> calls;
  for (int i = 0; i < 20; ++i) start(session[0], calls.emplace_back(), 1, "chain", "30");
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] { session[rank].shutdown(Deadline::after(40s)); });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(done, 20 * 30);
  for (auto& call : calls) EXPECT_EQ(call.result(), "end");
  EXPECT_THAT(error_text(ErrorKind::kInvalidArgument, [&] { sync(session[0], 1, "chain", "0"); }),
              HasSubstr("RPC has not been initialized"));
}

TEST(AgentTest, ShutdownSaysWhoBlocks) {
  Gate gate;
  Session session(3, {gate.function_of("gate")});
  TextCall call;
  start(session[0], call, 1, "gate");
  while (gate.inside == 0) std::this_thread::yield();
  EXPECT_THAT(error_text(ErrorKind::kTimeout, [&] { session[0].shutdown(Deadline::after(10ms)); }),
              HasSubstr("call of gate to worker1"));
  EXPECT_THAT(error_text(ErrorKind::kTimeout, [&] { session[1].shutdown(Deadline::after(10ms)); }),
              HasSubstr("gate for worker0"));
  EXPECT_THAT(error_text(ErrorKind::kTimeout, [&] { session[2].shutdown(Deadline::after(10ms)); }),
              AllOf(HasSubstr("worker0"), HasSubstr("worker1")));
  session[0].abort();
  EXPECT_EQ(call.failure->kind, ErrorKind::kCancelled);
}

}  // namespace
}  // namespace convoy::agent::test
