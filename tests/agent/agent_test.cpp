// Agents: how workers meet, know each other and are lost.
#include <gmock/gmock.h>

#include <atomic>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "agent/gate.h"
#include "agent/letters.h"
#include "agent/support.h"
#include "base/concat.h"
#include "convoy/store.h"
#include "transport/shm/shm_endpoint.h"

namespace convoy::agent::test {
namespace {

using namespace std::chrono_literals;

using testing::HasSubstr;

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

}  // namespace
}  // namespace convoy::agent::test
