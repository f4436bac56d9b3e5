// Agents: calls of ours, with their answers, errors, time and limits.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "agent/gate.h"
#include "agent/support.h"
#include "base/concat.h"

namespace convoy::agent::test {
namespace {

using namespace std::chrono_literals;

using testing::AllOf;
using testing::HasSubstr;

TEST(AgentTest, WhatAFunctionThrowsComesBackAndTheWorkerLivesOn) {
  Session session(2, {echo(), function("bad", [](Request&, const std::string&) -> std::string {
                        throw std::runtime_error("Expected error\nin two lines");
                      })});
  for (int i = 0; i < 3; ++i) {
    try {
      sync(session[0], 1, "bad");
      FAIL();
    } catch (const rpc::RemoteError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kRemote);
      EXPECT_EQ(error.worker(), "worker1");
      EXPECT_EQ(error.remote_type(), "std::runtime_error");
      EXPECT_THAT(error.what(), AllOf(HasSubstr("bad"), HasSubstr("worker1"),
                                      HasSubstr("Expected error\nin two lines")));
    }
    EXPECT_EQ(sync(session[0], 1, "echo", "alive"), "alive");
  }
}

TEST(AgentTest, LongTextsSurvive) {
  const std::string text(100'000, 'x');
  Session session(2, {function("bad", [&](Request&, const std::string&) -> std::string {
                    throw std::runtime_error(text);
                  })});
  EXPECT_THAT(error_text(ErrorKind::kRemote, [&] { sync(session[0], 1, "bad"); }), HasSubstr(text));
}

TEST(AgentTest, UnknownFunctionsAreNamed) {
  Session session(2, {echo()});
  EXPECT_THAT(error_text(ErrorKind::kInvalidArgument, [&] { sync(session[0], 1, "nothing"); }),
              AllOf(HasSubstr("nothing"), HasSubstr("not registered on worker1")));
  TextCall call;
  const FunctionId other = id_of("echo", "number");
  session[0].start(call, 1, other, {});
  session[0].wait(call);
  ASSERT_TRUE(call.failure.has_value());
  EXPECT_EQ(call.failure->kind, ErrorKind::kInvalidArgument);
  EXPECT_THAT(call.failure->text, AllOf(HasSubstr("'text' there"), HasSubstr("'number' here")));
  EXPECT_EQ(sync(session[0], 1, "echo", "alive"), "alive");
}

TEST(AgentTest, FunctionsMayBeAddedLater) {
  Session session(2, {echo()});
  EXPECT_EQ(sync(session[0], 1, "echo", "x"), "x");
  TestFunction late = function("late", [](Request&, const std::string&) { return "here"; });
  const Handler handlers[] = {TestAgent::handler_of(late)};
  session[1].add_handlers(handlers);
  // The table is on its way: a call behind it finds it.
  EXPECT_EQ(sync(session[1], 0, "echo", "x"), "x");
  const Deadline deadline = Deadline::after(20s);
  std::string result;
  while (result.empty() && !deadline.expired()) {
    try {
      result = sync(session[0], 1, "late");
    } catch (const Error&) {
      std::this_thread::yield();
    }
  }
  EXPECT_EQ(result, "here");
  session.end(1);  // before `late` goes
}

TEST(AgentTest, CallsTimeOut) {
  Gate gate;
  std::atomic<bool> was_cancelled{false};
  std::latch seen(1);
  Session session(2, {gate.function_of("gate"), echo(),
                      function("watch", [&](Request& request, const std::string&) {
                        const Deadline limit = Deadline::after(20s);
                        while (!request.cancelled() && !limit.expired()) std::this_thread::yield();
                        was_cancelled = request.cancelled();
                        seen.count_down();
                        return "";
                      })});
  const auto text =
      error_text(ErrorKind::kTimeout, [&] { sync(session[0], 1, "gate", "", {.timeout = 20ms}); });
  EXPECT_THAT(text, AllOf(HasSubstr("ran for more than 0.02 s"), HasSubstr("worker1")));
  // Nobody waits for this one: time passes all the same.
  TextCall call;
  std::latch over(1);
  call.then = [&](TextCall&) { over.count_down(); };
  start(session[0], call, 1, "watch", "", {.timeout = 20ms});
  over.wait();
  EXPECT_EQ(call.failure->kind, ErrorKind::kTimeout);
  seen.wait();
  EXPECT_TRUE(was_cancelled) << "the callee knows that nobody waits";
  session[0].set_call_timeout(1ms);
  error_text(ErrorKind::kTimeout, [&] { sync(session[0], 1, "gate"); });
  EXPECT_EQ(sync(session[0], 1, "echo", "x", {.timeout = 20s}), "x");
  EXPECT_EQ(sync(session[0], 1, "echo", "x", {.timeout = 0s}), "x");
  error_text(ErrorKind::kInvalidArgument,
             [&] { sync(session[0], 1, "echo", "x", {.timeout = -1s}); });
}

TEST(AgentTest, DeadlinesTravel) {
  Session session(2, {function("left", [](Request& request, const std::string&) {
                    if (request.deadline().is_never()) return std::string("never");
                    return std::to_string(request.deadline().remaining().count());
                  })});
  EXPECT_EQ(sync(session[0], 1, "left", "", {.timeout = 0s}), "never");
  const auto left = std::stoll(sync(session[0], 1, "left", "", {.timeout = 60s}));
  EXPECT_LE(left, 60'000'000'000);
  EXPECT_GT(left, 30'000'000'000);
}

TEST(AgentTest, CallsCanBeCancelled) {
  Gate gate;
  Session session(2, {gate.function_of("gate"), echo()});
  TextCall call;
  start(session[0], call, 1, "gate");
  while (gate.inside == 0) std::this_thread::yield();
  EXPECT_TRUE(session[0].cancel(call));
  EXPECT_FALSE(session[0].cancel(call));
  EXPECT_TRUE(call.over());
  EXPECT_EQ(call.failure->kind, ErrorKind::kCancelled);
  const Deadline limit = Deadline::after(20s);
  while (gate.inside != 0 && !limit.expired()) std::this_thread::yield();
  EXPECT_EQ(gate.inside, 0) << "the handler was told";
  EXPECT_EQ(sync(session[0], 1, "echo", "x"), "x");
}

TEST(AgentTest, WhatIsCancelledBeforeItsTurnIsNotRun) {
  Gate gate;
  std::atomic<int> runs{0};
  Session session(2,
                  {gate.function_of("gate"), function("count",
                                                      [&](Request&, const std::string&) {
                                                        ++runs;
                                                        return "";
                                                      })},
                  [](AgentOptions& options) { options.threads = 1; });
  TextCall first;
  start(session[0], first, 1, "gate");
  while (gate.inside == 0) std::this_thread::yield();
  TextCall second;
  start(session[0], second, 1, "count");
  EXPECT_TRUE(session[0].cancel(second));
  const Deadline limit = Deadline::after(20s);
  // The letter that cancels is behind the call.
  while (session[1].stats().executor.queued == 0 && !limit.expired()) std::this_thread::yield();
  TextCall third;
  start(session[0], third, 1, "count");
  while (session[1].stats().executor.queued < 2 && !limit.expired()) std::this_thread::yield();
  gate.open = true;
  session[0].wait(third);
  session[0].wait(first);
  EXPECT_EQ(runs, 1);
}

TEST(AgentTest, LargePiecesArriveInMemoryOfTheirOwn) {
  TestFunction sums{"sum", [](const RequestRef& request) {
                      std::vector<std::byte> sum;
                      for (const Part& part : request->parts()) {
                        EXPECT_TRUE(part.hold || part.bytes.empty());
                        sum.resize(std::max(sum.size(), part.bytes.size()));
                        for (std::size_t i = 0; i < part.bytes.size(); ++i) {
                          sum[i] = static_cast<std::byte>(std::to_integer<int>(sum[i]) +
                                                          std::to_integer<int>(part.bytes[i]));
                        }
                      }
                      auto kept = std::make_shared<std::vector<std::byte>>(std::move(sum));
                      const Piece piece{*kept, true};
                      request->reply({.pieces = {&piece, 1}, .on_sent = [kept](const Error*) {}});
                    }};
  Session session(2, {sums});
  for (const std::size_t bytes : {0, 1, 1000, 1025, 5000, 100'000, 3'000'000}) {
    const std::vector<std::byte> a(bytes, std::byte{3});
    const std::vector<std::byte> b(bytes, std::byte{4});
    const Piece pieces[] = {{a, true}, {b, false}};
    TextCall call;
    session[0].start(call, 1, id_of("sum"), {.pieces = pieces});
    session[0].wait(call);
    ASSERT_EQ(call.result(), "");
    ASSERT_EQ(call.parts.size(), 1u);
    EXPECT_EQ(call.parts[0].bytes.size(), bytes);
    EXPECT_TRUE(std::all_of(call.parts[0].bytes.begin(), call.parts[0].bytes.end(),
                            [](std::byte byte) { return byte == std::byte{7}; }));
  }
}

TEST(AgentTest, ManyCallsAtOnceAllEnd) {
  Session session(2, {echo()});
  std::deque<TextCall> calls;
  const std::string argument(300, 'a');
  for (int i = 0; i < 3000; ++i) {
    start(session[0], calls.emplace_back(), 1, "echo", concat(argument, i));
  }
  for (int i = 0; i < 3000; ++i) {
    TextCall& call = calls[static_cast<std::size_t>(i)];
    session[0].wait(call);
    ASSERT_EQ(call.result(), concat(argument, i));
  }
  EXPECT_EQ(session[0].stats().outstanding, 0u);
}

TEST(AgentTest, LimitsMakeCallersWait) {
  Gate gate;
  Session session(2, {gate.function_of("gate")}, [](AgentOptions& options) {
    options.most_calls = 4;
    options.threads = 16;
  });
  std::deque<TextCall> calls;
  for (int i = 0; i < 4; ++i) start(session[0], calls.emplace_back(), 1, "gate");
  EXPECT_THAT(
      error_text(ErrorKind::kTimeout, [&] { sync(session[0], 1, "gate", "", {.timeout = 10ms}); }),
      HasSubstr("no room"));
  std::atomic<int> started{0};
  std::thread other([&] {
    for (int i = 0; i < 20; ++i) {
      start(session[0], calls.emplace_back(), 1, "gate", concat(i));
      ++started;
    }
    for (auto& call : calls) session[0].wait(call);
  });
  while (gate.inside < 4) std::this_thread::yield();
  EXPECT_EQ(started, 0);
  gate.open = true;
  other.join();
  EXPECT_LE(gate.most, 4);
}

TEST(AgentTest, LimitsThrowIfWanted) {
  Gate gate;
  Session session(2, {gate.function_of("gate")}, [](AgentOptions& options) {
    options.most_bytes = 1000;
    options.when_full = WhenFull::kThrow;
  });
  TextCall large;
  start(session[0], large, 1, "gate", std::string(2000, 'x'));
  TextCall more;
  EXPECT_THAT(error_text(ErrorKind::kResource, [&] { start(session[0], more, 1, "gate", "x"); }),
              HasSubstr("worker1"));
  EXPECT_TRUE(more.over());
  gate.open = true;
  session[0].wait(large);
  EXPECT_EQ(sync(session[0], 1, "gate", "x"), "x");
}

TEST(AgentTest, StatsCountCallsByWorkerAndFunction) {
  Session session(2, {echo(), function("bad", [](Request&, const std::string&) -> std::string {
                        throw std::runtime_error("no");
                      })});
  for (int i = 0; i < 10; ++i) sync(session[0], 1, "echo", "12345678");
  error_text(ErrorKind::kRemote, [&] { sync(session[0], 1, "bad"); });
  const AgentStats caller = session[0].stats();
  ASSERT_EQ(caller.functions.size(), 2u);
  for (const FunctionStats& entry : caller.functions) {
    EXPECT_EQ(entry.worker, "worker1");
    EXPECT_EQ(entry.calls, entry.function == "echo" ? 10u : 1u);
    EXPECT_EQ(entry.errors, entry.function == "echo" ? 0u : 1u);
    EXPECT_EQ(entry.bytes_sent, entry.function == "echo" ? 80u : 0u);
    EXPECT_EQ(entry.latency.total(), entry.calls);
    EXPECT_GT(entry.latency.quantile(0.5).count(), 0);
  }
  const AgentStats callee = session[1].stats();
  ASSERT_EQ(callee.functions.size(), 2u);
  EXPECT_EQ(callee.functions[0].worker, "worker0");
  EXPECT_EQ(callee.functions[0].served + callee.functions[1].served, 11u);
  EXPECT_EQ(callee.executor.size, 16);
}

}  // namespace
}  // namespace convoy::agent::test
