// Agents: calls of others, on which threads their handlers run, and when they are answered.
#include <gmock/gmock.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "agent/gate.h"
#include "agent/support.h"

namespace convoy::agent::test {
namespace {

using namespace std::chrono_literals;

using testing::HasSubstr;

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

}  // namespace
}  // namespace convoy::agent::test
