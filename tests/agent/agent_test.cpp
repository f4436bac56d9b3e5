// Calls between agents: answers, errors, time, ends.
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <latch>
#include <mutex>
#include <set>
#include <thread>

#include "agent/letters.h"
#include "base/concat.h"
#include "os/flight_calls.h"
#include "os/flight_recorder.h"
#include "support.h"
#include "transport/shm/shm_endpoint.h"

namespace convoy::agent::test {
namespace {

using namespace std::chrono_literals;

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;

// Answers when it is told to.
struct Gate {
  std::atomic<bool> open{false};
  std::atomic<int> inside{0};
  std::atomic<int> most{0};

  TestFunction function_of(const std::string& name) {
    return function(name, [this](Request& request, const std::string& text) {
      const int now = ++inside;
      int seen = most.load();
      while (seen < now && !most.compare_exchange_weak(seen, now)) {
      }
      while (!open.load() && !request.cancelled()) std::this_thread::yield();
      --inside;
      return text;
    });
  }
};

TEST(AgentTest, CallsGoToOthersAndToItself) {
  Session session(3, {echo(), function("who", [](Request& request, const std::string&) {
                        return concat(request.agent().self().name, " for ", request.caller().name);
                      })});
  for (std::size_t from = 0; from < 3; ++from) {
    for (WorkerId to = 0; to < 3; ++to) {
      EXPECT_EQ(sync(session[from], to, "echo", "hello"), "hello");
      EXPECT_EQ(sync(session[from], to, "who"), concat("worker", to, " for worker", from));
      EXPECT_EQ(sync(session[from], to, "echo", ""), "");
    }
  }
  EXPECT_EQ(session[0].worker("worker2").id, 2u);
  EXPECT_EQ(session[0].worker(1).name, "worker1");
  EXPECT_EQ(session[0].workers().size(), 3u);
  const auto error = error_text(ErrorKind::kInvalidArgument, [&] { session[0].worker("nobody"); });
  EXPECT_THAT(error, HasSubstr("could not find destination"));
  error_text(ErrorKind::kInvalidArgument, [&] { session[0].worker(-1); });
  error_text(ErrorKind::kInvalidArgument, [&] { session[0].worker(3); });
}

TEST(AgentTest, AWorldOfOne) {
  Session session(1, {echo()});
  EXPECT_EQ(sync(session[0], 0, "echo", "me"), "me");
  session[0].shutdown(Deadline::after(10s));
}

TEST(AgentTest, BadNamesAreRefused) {
  for (const std::string& name :
       {std::string("abc*"), std::string(" "), std::string(), std::string(500, 'a')}) {
    error_text(ErrorKind::kInvalidArgument, [&] { Agent agent({.name = name}); });
  }
  Agent agent({.name = "a-b:c_9"});
}

TEST(AgentTest, NamesAreUnique) {
  Agent first({.name = "same", .rank = 0});
  Agent second({.name = "same", .rank = 1});
  const Member members[] = {{"same", first.address()}, {"same", second.address()}};
  for (Agent* const agent : {&first, &second}) {
    EXPECT_THAT(
        error_text(ErrorKind::kInvalidArgument, [&] { agent->admit(Id::random(), members); }),
        HasSubstr("is not unique"));
  }
}

TEST(AgentTest, WorkersMeetByAStore) {
  const auto store = make_local_store();
  std::vector<std::thread> threads;
  for (WorkerId rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      TestAgent agent({.name = concat("w", rank), .rank = rank}, {echo()});
      agent->meet(*store, 3, Deadline::after(20s));
      EXPECT_EQ(sync(*agent, agent->worker("w1").id, "echo", "x"), "x");
      agent->shutdown(Deadline::after(20s));
    });
  }
  for (auto& thread : threads) thread.join();
}

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

TEST(AgentTest, APoolOfOneServesNestedCallsOfAnyDepth) {
  TestFunction nest = function("nest", [](Request& request, const std::string& text) {
    const int depth = std::stoi(text);
    if (depth == 0) return std::string("bottom");
    const WorkerId other = 1 - request.agent().self().id;
    return sync(request.agent(), other, "nest", std::to_string(depth - 1)) + "+";
  });
  Session session(2, {nest}, [](AgentOptions& options) { options.threads = 1; });
  const std::string result = sync(session[0], 1, "nest", "50");
  EXPECT_EQ(result, "bottom" + std::string(50, '+'));
  // And of one worker with itself.
  TestFunction self = function("self", [](Request& request, const std::string& text) {
    const int depth = std::stoi(text);
    if (depth == 0) return std::string("bottom");
    return sync(request.agent(), request.agent().self().id, "self", std::to_string(depth - 1));
  });
  Session alone(1, {self}, [](AgentOptions& options) { options.threads = 1; });
  EXPECT_EQ(sync(alone[0], 0, "self", "20"), "bottom");
}

TEST(AgentTest, CrossingCallsOfSmallPoolsEnd) {
  TestFunction cross = function("cross", [](Request& request, const std::string& text) {
    if (text == "0") return std::string("0");
    Agent& agent = request.agent();
    const auto size = static_cast<WorkerId>(agent.workers().size());
    int sum = 1;
    for (WorkerId to = 0; to < size; ++to) {
      if (to != agent.self().id) sum += std::stoi(sync(agent, to, "cross", "0"));
    }
    return std::to_string(sum);
  });
  Session session(4, {cross}, [](AgentOptions& options) { options.threads = 1; });
  std::vector<std::thread> threads;
  for (std::size_t from = 0; from < 4; ++from) {
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&, from] {
        for (WorkerId to = 0; to < 4; ++to) EXPECT_EQ(sync(session[from], to, "cross", "1"), "1");
      });
    }
  }
  for (auto& thread : threads) thread.join();
}

TEST(AgentTest, NoMoreHandlersRunThanThePoolHasThreads) {
  Gate gate;
  Session session(2, {gate.function_of("gate")},
                  [](AgentOptions& options) { options.threads = 3; });
  std::deque<TextCall> calls;
  for (int i = 0; i < 20; ++i) start(session[0], calls.emplace_back(), 1, "gate");
  while (gate.inside < 3) std::this_thread::yield();
  EXPECT_EQ(session[1].stats().executor.running, 3);
  gate.open = true;
  for (auto& call : calls) session[0].wait(call);
  EXPECT_EQ(gate.most, 3);
}

TEST(AgentTest, ThreadsThatWaitRunNoHandlers) {
  std::mutex mutex;
  std::set<std::thread::id> handlers;
  TestFunction note = function("note", [&](Request&, const std::string& text) {
    const std::scoped_lock lock(mutex);
    handlers.insert(std::this_thread::get_id());
    return text;
  });
  Session session(2, {note});
  std::vector<std::thread> threads;
  std::set<std::thread::id> callers;
  for (std::size_t from = 0; from < 2; ++from) {
    threads.emplace_back([&, from] {
      {
        const std::scoped_lock lock(mutex);
        callers.insert(std::this_thread::get_id());
      }
      for (int i = 0; i < 500; ++i) sync(session[from], static_cast<WorkerId>(1 - from), "note");
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& caller : callers) EXPECT_FALSE(handlers.contains(caller));
}

TEST(AgentTest, ShortHandlersRunOnTheThreadThatServesUntilOneIsLong) {
  Gate gate;
  std::atomic<bool> slow{false};
  TestFunction quick = function("quick", [&](Request&, const std::string& text) {
    if (slow.exchange(false)) {
      while (!gate.open.load()) std::this_thread::yield();
    }
    return text;
  });
  Session session(2, {quick, echo()}, [](AgentOptions& options) { options.most_inline = 1ms; });
  for (int i = 0; i < 200; ++i) sync(session[0], 1, "quick", "x");
  EXPECT_GT(session[1].stats().inline_runs, 0u);
  slow = true;
  TextCall stuck;
  start(session[0], stuck, 1, "quick", "stuck");
  // It stands on the thread that serves; somebody takes over.
  EXPECT_EQ(sync(session[0], 1, "echo", "x"), "x");
  EXPECT_TRUE(stuck.under_way());
  gate.open = true;
  session[0].wait(stuck);
  EXPECT_EQ(stuck.result(), "stuck");
  EXPECT_EQ(sync(session[0], 1, "quick", "x"), "x");
}

TEST(AgentTest, SomethingRunsAfterTheHandler) {
  Session* all = nullptr;
  std::atomic<bool> inside{false};
  std::atomic<int> after{0};
  std::thread::id thread;
  TestFunction ask = function("ask", [&](Request&, const std::string& text) {
    inside = true;
    thread = std::this_thread::get_id();
    (*all)[1].run_after_handler([&] {
      EXPECT_FALSE(inside);
      EXPECT_EQ(Request::current(), nullptr);
      EXPECT_EQ(std::this_thread::get_id(), thread);
      ++after;
      (*all)[1].wake();
    });
    inside = false;
    return text;
  });
  Session session(2, {ask});
  all = &session;
  const auto limit = Deadline::after(30s);
  for (int i = 1; i <= 100; ++i) {
    EXPECT_EQ(sync(session[0], 1, "ask", "x"), "x");
    ASSERT_TRUE(session[1].wait(limit, [&] { return after == i; }));
  }
  // Not in a handler.
  session[1].run_after_handler([&] {
    EXPECT_TRUE(session[1].in_own_thread());
    ++after;
    session[1].wake();
  });
  ASSERT_TRUE(session[1].wait(limit, [&] { return after == 101; }));
}

// It may be what the handler waits for.
TEST(AgentTest, WhatRunsAfterAHandlerDoesNotWaitForOneThatWaits) {
  Session* all = nullptr;
  TestFunction ask = function("ask", [&](Request&, const std::string&) {
    Agent& here = (*all)[1];
    std::atomic<bool> done{false};
    TextCall call;
    call.then = [&](TextCall&) {
      here.run_after_handler([&] {
        done = true;
        here.wake();
      });
    };
    start(here, call, 0, "echo", "x");
    const bool in_time = here.wait(Deadline::after(20s), [&] { return done.load(); });
    here.wait(call);
    return std::string(in_time ? "in time" : "late");
  });
  Session session(2, {ask, echo()}, [](AgentOptions& options) { options.threads = 1; });
  all = &session;
  for (int i = 0; i < 20; ++i) ASSERT_EQ(sync(session[0], 1, "ask"), "in time");
}

TEST(AgentTest, AnswersMayComeLaterFromAnywhere) {
  std::mutex mutex;
  std::vector<RequestRef> kept;
  TestFunction keep{"keep", [&](RequestRef request) {
                      const std::scoped_lock lock(mutex);
                      kept.push_back(std::move(request));
                    }};
  TestFunction drop{"drop", [](const RequestRef&) {}};
  Session session(2, {keep, drop, echo()}, [](AgentOptions& options) { options.threads = 1; });
  std::deque<TextCall> calls;
  for (int i = 0; i < 10; ++i) start(session[0], calls.emplace_back(), 1, "keep");
  for (;;) {
    const std::scoped_lock lock(mutex);
    if (kept.size() == 10) break;
  }
  EXPECT_EQ(sync(session[0], 1, "echo", "free"), "free") << "they hold no thread";
  {
    const std::scoped_lock lock(mutex);
    const std::string answer = "late";
    for (const auto& request : kept) {
      EXPECT_TRUE(request->reply({.body = std::as_bytes(std::span(answer))}));
      EXPECT_FALSE(request->reply({})) << "it was answered";
      EXPECT_FALSE(request->fail(ErrorKind::kRemote, "", "too late"));
    }
    kept.clear();
  }
  for (auto& call : calls) {
    session[0].wait(call);
    EXPECT_EQ(call.result(), "late");
  }
  EXPECT_THAT(error_text(ErrorKind::kRemote, [&] { sync(session[0], 1, "drop"); }),
              HasSubstr("without an answer"));
}

// Whoever replies has to know: what is counted with the reply does not arrive.
TEST(AgentTest, AReplyThatDoesNotGoIsSaidSo) {
  std::atomic<int> went{0};
  std::atomic<int> replies{0};
  std::atomic<bool> began{false};
  TestFunction late{"late", [&](const RequestRef& request) {
                      began = true;
                      const Deadline limit = Deadline::after(20s);
                      while (!request->cancelled() && !limit.expired()) std::this_thread::yield();
                      went += request->reply({}) ? 1 : 0;
                      ++replies;
                    }};
  TestFunction much{"much", [&](const RequestRef& request) {
                      const std::vector<Piece> pieces(Outgoing::kMostPieces + 1);
                      went += request->reply({.pieces = pieces}) ? 1 : 0;
                      ++replies;
                    }};
  Session session(2, {late, much});
  TextCall call;
  start(session[0], call, 1, "late");
  const Deadline limit = Deadline::after(20s);
  while (!began) ASSERT_FALSE(limit.expired());
  EXPECT_TRUE(session[0].cancel(call));
  EXPECT_THAT(error_text(ErrorKind::kInvalidArgument, [&] { sync(session[0], 1, "much"); }),
              HasSubstr("cannot be sent"));
  while (replies != 2) ASSERT_FALSE(limit.expired());
  EXPECT_EQ(went, 0);
}

TEST(AgentTest, RequestsMayOutliveTheAgent) {
  RequestRef kept;
  std::atomic<bool> is_kept{false};
  TestFunction keep{"keep", [&](RequestRef request) {
                      kept = std::move(request);
                      is_kept = true;
                    }};
  TextCall call;
  {
    Session session(2, {keep});
    start(session[0], call, 1, "keep");
    const Deadline limit = Deadline::after(20s);
    while (!is_kept) {
      ASSERT_FALSE(limit.expired());
      std::this_thread::yield();
    }
  }
  EXPECT_TRUE(call.over());
  EXPECT_TRUE(call.failure.has_value());
  ASSERT_TRUE(kept);
  kept->reply({});
  kept = {};
}

TEST(AgentTest, ALostWorkerFailsCallsByName) {
  Gate gate;
  Session session(3, {gate.function_of("gate"), echo()});
  EXPECT_EQ(sync(session[0], 2, "echo", "x"), "x");
  std::deque<TextCall> calls;
  for (int i = 0; i < 5; ++i) start(session[0], calls.emplace_back(), 1, "gate");
  while (gate.inside == 0) std::this_thread::yield();
  session.end(1);
  for (auto& call : calls) {
    session[0].wait(call);
    ASSERT_TRUE(call.failure.has_value());
    EXPECT_EQ(call.failure->kind, ErrorKind::kPeerLost);
    EXPECT_EQ(call.failure->worker, "worker1");
    EXPECT_THAT(call.failure->text, HasSubstr("worker1 is lost"));
  }
  error_text(ErrorKind::kPeerLost, [&] { sync(session[0], 1, "echo"); });
  error_text(ErrorKind::kPeerLost, [&] { sync(session[2], 1, "echo"); });
  EXPECT_EQ(sync(session[0], 2, "echo", "x"), "x");
}

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

TEST(AgentTest, SeveralSessionsLiveSideBySide) {
  Session first(2, {echo()});
  Session second(2, {function("echo", [](Request&, const std::string&) { return "second"; })});
  EXPECT_EQ(sync(first[0], 1, "echo", "first"), "first");
  EXPECT_EQ(sync(second[0], 1, "echo", "first"), "second");
}

TEST(AgentTest, StrangersAreNotHeard) {
  std::atomic<int> runs{0};
  Session session(2, {function("count",
                               [&](Request&, const std::string&) {
                                 ++runs;
                                 return "";
                               }),
                      echo()});
  struct Stranger final : transport::Inbox {
    std::atomic<bool> cut{false};
    void arrived(transport::Remote&, transport::Arrival&&) noexcept override { ADD_FAILURE(); }
    void lost(transport::Remote&, const Error&) noexcept override { cut = true; }
  };
  for (transport::LetterKind kind = 0; kind < 10; ++kind) {
    for (const std::size_t bytes : {0, 1, 16, 32, 100}) {
      Stranger stranger;
      const auto endpoint = shm::make_shm_endpoint(stranger);
      transport::Remote& remote = endpoint->remote(session[1].address());
      const std::vector<std::byte> head(bytes, std::byte{0});
      ASSERT_EQ(remote.try_send({.kind = kind, .head = std::span<const std::byte>(head)}),
                transport::SendResult::kSent);
      EXPECT_TRUE(endpoint->wait(Deadline::after(20s), [&] { return stranger.cut.load(); }))
          << "kind " << kind << ", " << bytes << " bytes";
    }
  }
  EXPECT_EQ(runs, 0);
  EXPECT_EQ(sync(session[0], 1, "echo", "alive"), "alive");
}

TEST(AgentTest, AWorkerThatDiesBeforeItsGreetingIsLost) {
  TestAgent agent({.name = "worker0", .rank = 0, .call_timeout = 30s}, {echo()});
  struct Mute final : transport::Inbox {
    void arrived(transport::Remote&, transport::Arrival&&) noexcept override {}
    void lost(transport::Remote&, const Error&) noexcept override {}
  } mute;
  auto endpoint = shm::make_shm_endpoint(mute);
  const Member members[] = {{"worker0", agent->address()}, {"worker1", endpoint->address()}};
  endpoint->remote(agent->address());  // and not a word
  agent->admit(Id::random(), members);
  endpoint.reset();
  EXPECT_THAT(error_text(ErrorKind::kPeerLost, [&] { sync(*agent, 1, "echo"); }),
              HasSubstr("worker1 is lost"));
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

TEST(AgentTest, OtherLayersHaveLettersOfTheirOwn) {
  Agent first({.name = "worker0", .rank = 0});
  Agent second({.name = "worker1", .rank = 1});
  std::atomic<int> sum{0};
  second.on_letter(kFirstOtherLetter, [&](const Worker& from, auto body, auto&& parts) {
    EXPECT_EQ(from.name, "worker0");
    EXPECT_EQ(parts.size(), 0u);
    sum += static_cast<int>(body.size());
    second.wake();
  });
  admit({&first, &second});
  const std::string text = "12345";
  for (int i = 0; i < 100; ++i) {
    first.send_letter(1, kFirstOtherLetter, {.body = std::as_bytes(std::span(text))});
  }
  EXPECT_TRUE(second.wait(Deadline::after(20s), [&] { return sum == 500; }));
}

// --- the flight record ---

// What it has of calls that were made since this was: "worker0 to worker1 #1 begun".
class FlightReader {
 public:
  std::vector<std::string> of(const std::string& function) const {
    const auto log = read();
    std::vector<std::string> lines;
    for (const auto& call : log.calls) {
      if (call.operation != function || call.ticket <= since_) continue;
      const auto* const session = log.group_of(call);
      constexpr std::array kStates = {"none", "queued", "begun", "answered", "failed"};
      lines.push_back(concat(session ? session->name : "?", call.served ? " for " : " to ",
                             flight::peer_of(log, call), call.peer < 0 ? "" : " #",
                             call.peer < 0 ? "" : std::to_string(call.number), " ",
                             kStates[static_cast<std::size_t>(call.state)]));
      EXPECT_LE(call.created, std::chrono::steady_clock::now().time_since_epoch() + 1ms);
      if (call.over()) {
        EXPECT_GE(call.ended + 2us, call.created);
      }
    }
    std::sort(lines.begin(), lines.end());
    return lines;
  }
  void await(const std::string& function, const std::vector<std::string>& lines) const {
    const auto deadline = Deadline::after(20s);
    while (of(function) != lines && !deadline.expired()) std::this_thread::yield();
    EXPECT_EQ(of(function), lines);
  }

 private:
  static flight::Log read() {
    const auto& recorder = flight::Recorder::instance();
    return flight::read(*recorder.ring(), recorder.bytes()).value();
  }
  static std::uint64_t last_ticket() {
    const auto log = read();
    return log.calls.empty() ? 0 : log.calls.back().ticket;
  }

  const std::uint64_t since_ = last_ticket();
};

TEST(AgentTest, TheFlightRecordHasCallsFromTheirStartToTheirEnd) {
  const FlightReader record;
  Gate gate;
  TextCall first, second, after;
  {
    Session session(2,
                    {gate.function_of("flown"),
                     function("flown_after", [](Request&, const std::string&) { return ""; })},
                    [](AgentOptions& options) { options.threads = 1; });
    start(session[0], first, 1, "flown");
    record.await("flown", {"worker0 to worker1 #1 begun", "worker1 for worker0 #1 begun"});
    start(session[0], second, 1, "flown");
    record.await("flown", {"worker0 to worker1 #1 begun", "worker0 to worker1 #2 begun",
                           "worker1 for worker0 #1 begun", "worker1 for worker0 #2 queued"});
    // Nobody waits for it any more, and it is not begun. (What was sent later has come.)
    EXPECT_TRUE(session[0].cancel(second));
    start(session[0], after, 1, "flown_after");
    record.await("flown_after", {"worker0 to worker1 #3 begun", "worker1 for worker0 #3 queued"});
    record.await("flown", {"worker0 to worker1 #1 begun", "worker0 to worker1 #2 failed",
                           "worker1 for worker0 #1 begun", "worker1 for worker0 #2 queued"});
    gate.open.store(true);
    session[0].wait(first);
    session[0].wait(after);
    record.await("flown", {"worker0 to worker1 #1 answered", "worker0 to worker1 #2 failed",
                           "worker1 for worker0 #1 answered", "worker1 for worker0 #2 failed"});
    // The other way round, and to itself.
    EXPECT_EQ(sync(session[1], 1, "flown"), "");
    EXPECT_THAT(record.of("flown"), AllOf(Contains("worker1 to worker1 #1 answered"),
                                          Contains("worker1 for worker1 #1 answered")));
  }
}

TEST(AgentTest, TheFlightRecordHasErrorsAndLosses) {
  const FlightReader record;
  Gate gate;
  TextCall lost, cut;
  Session session(3, {function("throwing",
                               [](Request&, const std::string&) -> std::string {
                                 throw std::runtime_error("no");
                               }),
                      gate.function_of("kept")});
  error_text(ErrorKind::kRemote, [&] { sync(session[0], 1, "throwing"); });
  record.await("throwing", {"worker0 to worker1 #1 failed", "worker1 for worker0 #1 failed"});
  start(session[0], lost, 2, "kept");
  record.await("kept", {"worker0 to worker2 #1 begun", "worker2 for worker0 #1 begun"});
  std::thread opens([&] {
    while (lost.under_way()) std::this_thread::yield();
    gate.open.store(true);
  });
  session[2].abort();
  session[0].wait(lost);
  opens.join();
  session.end(2);
  record.await("kept", {"worker0 to worker2 #1 failed", "worker2 for worker0 #1 answered"});
  gate.open.store(false);
  start(session[0], cut, 1, "kept");
  session[0].abort();
  EXPECT_THAT(record.of("kept"), Contains("worker0 to worker1 #2 failed"));
  gate.open.store(true);
}

TEST(AgentTest, TheFlightRecordHasWhatWorkersDoTogether) {
  const FlightReader record;
  Session session(2, {});
  const std::vector<WorkerId> all = {0, 1};
  std::thread waits([&] { session[0].barrier(all, Deadline::after(20s)); });
  record.await("barrier", {"worker0 to others begun"});
  session[1].barrier(all, Deadline::after(20s));
  waits.join();
  EXPECT_EQ(record.of("barrier"),
            (std::vector<std::string>{"worker0 to others answered", "worker1 to others answered"}));
  EXPECT_EQ(record.of("all_gather"), std::vector<std::string>{});
}

}  // namespace
}  // namespace convoy::agent::test
