// Agents in trouble: connections and letters that fail, limits, ends that overlap, workers and
// strangers that send nonsense. On shared memory, where a missing wake-up shows.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <latch>
#include <thread>

#include "agent/letters.h"
#include "agent/membership.h"
#include "base/concat.h"
#include "base/error.h"
#include "base/wire.h"
#include "convoy/store.h"
#include "hooked_endpoint.h"
#include "sleeper.h"
#include "support.h"
#include "support/capture.h"
#include "support/rank_group.h"
#include "transport/faulty.h"
#include "transport/shm/shm_endpoint.h"
#include "transport/simulation.h"

namespace convoy::agent::test {
namespace {

using namespace std::chrono_literals;

using convoy::test::Sleeper;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// "n": calls itself on the other one of two workers, n times.
TestFunction nest() {
  return function("nest", [](Request& request, const std::string& text) {
    const int depth = std::stoi(text);
    if (depth == 0) return std::string("bottom");
    const WorkerId other = 1 - request.agent().self().id;
    return sync(request.agent(), other, "nest", std::to_string(depth - 1));
  });
}

// Answers when it is told to, whatever its caller does.
struct StubbornGate {
  std::atomic<bool> open{false};
  std::atomic<int> inside{0};

  TestFunction function_of(const std::string& name) {
    return function(name, [this](Request&, const std::string& text) {
      ++inside;
      while (!open.load()) std::this_thread::yield();
      --inside;
      return text;
    });
  }
};

AgentOptions hooked(AgentOptions options, Hooks& hooks) {
  options.make_endpoint = [&hooks](transport::Inbox& inbox) {
    return std::make_unique<HookedEndpoint>(
        inbox, hooks, [](transport::Inbox& inner) { return shm::make_shm_endpoint(inner); });
  };
  return options;
}

AgentOptions options_of(WorkerId rank) {
  return {.name = concat("worker", rank), .rank = rank, .call_timeout = 20s};
}

// --- first contact ---

// The callee knows the caller then, but has not heard that the caller knows it.
TEST(AgentTroubleTest, AfterAFirstCallThatIsGivenUpTheOtherCanCall) {
  TestAgent a(options_of(0), {echo()});
  TestAgent b(options_of(1), {echo()});
  const Id session = Id::random();
  const Member members[] = {{"worker0", a->address()}, {"worker1", b->address()}};
  b->admit(session, members);
  // The other one has not met anybody yet, so it does not answer.
  EXPECT_THAT(error_text(ErrorKind::kTimeout, [&] { sync(*b, 0, "echo", "", {.timeout = 20ms}); }),
              HasSubstr("has not been reached yet"));
  a->admit(session, members);
  EXPECT_EQ(sync(*a, 1, "echo", "x"), "x");
}

TEST(AgentTroubleTest, WithoutDescriptorsForAConnectionTheNextCallTriesAgain) {
  convoy::test::run_in_process([] {
    Session session(2, {echo()});
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
    const int next = ::dup(0);
    ::close(next);
    rlimit none = before;
    none.rlim_cur = static_cast<rlim_t>(next);
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
    error_text(ErrorKind::kResource, [&] { sync(session[0], 1, "echo"); });
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    EXPECT_FALSE(session[0].is_lost(1));
    EXPECT_EQ(sync(session[0], 1, "echo", "x"), "x");
  });
}

// The first letter of a connection makes its memory, of which there may be none.
TEST(AgentTroubleTest, AGreetingThatCannotBeSentIsSaidAgain) {
  for (const WorkerId troubled : {0U, 1U}) {  // who calls, and who is called
    Hooks hooks;
    std::atomic<int> failures{2};
    hooks.send = [&](auto&,
                     const transport::Letter& letter) -> std::optional<transport::SendResult> {
      if (static_cast<LetterType>(letter.kind) == LetterType::kHello && failures-- > 0) {
        fail(ErrorKind::kResource, "no memory");
      }
      return std::nullopt;
    };
    TestAgent a(troubled == 0 ? hooked(options_of(0), hooks) : options_of(0), {echo()});
    TestAgent b(troubled == 1 ? hooked(options_of(1), hooks) : options_of(1), {echo()});
    admit({&*a, &*b});
    EXPECT_EQ(sync(*a, 1, "echo", "x"), "x");
    EXPECT_EQ(sync(*b, 0, "echo", "x"), "x");
  }
}

TEST(AgentTroubleTest, AnAllGatherThatCouldNotBeginIsAsIfItHadNotBeen) {
  Hooks hooks;
  bool fails = true;
  const auto trouble = [&] {
    if (fails) fail(ErrorKind::kResource, "too many open files");
  };
  hooks.connect = [&](auto&) { trouble(); };
  TestAgent a(hooked(options_of(0), hooks), {});
  TestAgent b(options_of(1), {});
  TestAgent c(options_of(2), {});
  admit({&*a, &*b, &*c});
  const WorkerId all[] = {0, 1, 2};
  for (int i = 0; i < 3; ++i) {
    error_text(ErrorKind::kResource, [&] { a->all_gather("a", all, Deadline::after(20s)); });
  }
  fails = false;
  std::vector<std::thread> threads;
  for (Agent* const agent : {&*a, &*b, &*c}) {
    threads.emplace_back([&, agent] {
      const std::string mine(1, static_cast<char>('a' + agent->self().id));
      EXPECT_NO_THROW(EXPECT_THAT(agent->all_gather(mine, all, Deadline::after(10s)),
                                  ElementsAre("a", "b", "c")));
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(AgentTroubleTest, ValuesOfAnAllGatherThatGotLostAreAskedFor) {
  constexpr int kRounds = 10;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(concat("seed ", seed));
    transport::World world({.seed = seed});
    const transport::Fault fault{
        .first_kind = static_cast<transport::LetterKind>(LetterType::kGather),
        .last_kind = static_cast<transport::LetterKind>(LetterType::kGatherAsk),
        .drop = 300'000,
        .duplicate = 100'000,
        .delay = 100'000};
    std::vector<std::unique_ptr<TestAgent>> agents;
    std::vector<Agent*> all;
    for (WorkerId rank = 0; rank < 3; ++rank) {
      AgentOptions options = options_of(rank);
      options.make_endpoint = [&, rank](transport::Inbox& inbox) {
        return transport::make_faulty(
            inbox, {.seed = seed + rank, .rules = {fault}},
            [&](transport::Inbox& inner) { return world.join(inner, concat("worker", rank)); });
      };
      options.start_thread = [&](std::function<void()> run) { world.start(std::move(run)); };
      agents.push_back(std::make_unique<TestAgent>(options, std::vector<TestFunction>{}));
      all.push_back(&**agents.back());
    }
    admit(all);
    int ended = 0;
    for (Agent* const agent : all) {
      world.start([&, agent] {
        const WorkerId who[] = {0, 1, 2};
        for (int round = 0; round < kRounds; ++round) {
          const auto values = agent->all_gather(concat(agent->self().id, " ", round), who,
                                                Deadline::at(agent->now() + 1000s));
          EXPECT_THAT(values,
                      ElementsAre(concat("0 ", round), concat("1 ", round), concat("2 ", round)));
          ++ended;
        }
      });
    }
    EXPECT_TRUE(world.run([&] { return ended == 3 * kRounds; }, 1'000'000));
    world.run_out();
    agents.clear();
  }
}

// --- letters that cannot go ---

// It was told that there is no room, and before it could queue the answer the caller was lost.
TEST(AgentTroubleTest, ALargeAnswerToALostCallerIsDropped) {
  const auto kept = std::make_shared<std::vector<std::byte>>(100'000);
  std::atomic<int> told{0};
  TestFunction large{
      "large", [&](const RequestRef& request) {
        const Piece piece{*kept, true};
        request->reply({.pieces = {&piece, 1}, .on_sent = [kept, &told](const Error* lost) {
                          if (lost) ++told;
                        }});
      }};
  Hooks hooks;
  hooks.send = [&](transport::Remote& remote,
                   const transport::Letter& letter) -> std::optional<transport::SendResult> {
    if (static_cast<LetterType>(letter.kind) != LetterType::kReply) return std::nullopt;
    hooks.inbox->lost(remote, Error(ErrorKind::kPeerLost, "it is gone"));
    return transport::SendResult::kWouldBlock;
  };
  TestAgent a(options_of(0), {});
  TestAgent b(hooked(options_of(1), hooks), {large});
  admit({&*a, &*b});
  TextCall call;
  start(*a, call, 1, "large");
  EXPECT_TRUE(b->wait(Deadline::after(20s), [&] {
    return b->stats().requests == 0 && b->stats().executor.running == 0 && b->is_lost(0);
  }));
  EXPECT_EQ(told, 1);
  EXPECT_EQ(kept.use_count(), 1) << "the answer does not hold it any more";
  a->cancel(call);
}

TEST(AgentTroubleTest, CallsThatFailByALossAreCounted) {
  StubbornGate gate;
  Session session(2, {gate.function_of("gate")});
  std::deque<TextCall> calls;
  for (int i = 0; i < 5; ++i) start(session[0], calls.emplace_back(), 1, "gate");
  while (gate.inside == 0) std::this_thread::yield();
  std::thread end([&] { session.end(1); });
  for (auto& call : calls) session[0].wait(call);
  gate.open = true;
  end.join();
  const AgentStats stats = session[0].stats();
  ASSERT_EQ(stats.functions.size(), 1u);
  EXPECT_EQ(stats.functions[0].calls, 5u);
  EXPECT_EQ(stats.functions[0].errors, 5u);
  // Those that fail at once, too.
  EXPECT_THAT(error_text(ErrorKind::kPeerLost, [&] { sync(session[0], 1, "gate"); }),
              HasSubstr("worker1"));
  EXPECT_EQ(session[0].stats().functions[0].calls, 6u);
  EXPECT_EQ(session[0].stats().functions[0].errors, 6u);
}

TEST(AgentTroubleTest, CallsOfMissingFunctionsAreCounted) {
  Session session(2, {});
  // The first one before the other's table has come.
  for (std::uint64_t calls = 1; calls <= 3; ++calls) {
    EXPECT_THAT(error_text(ErrorKind::kInvalidArgument, [&] { sync(session[0], 1, "nothing"); }),
                HasSubstr("not registered"));
    const AgentStats stats = session[0].stats();
    ASSERT_EQ(stats.functions.size(), 1u);
    EXPECT_EQ(stats.functions[0].function, "nothing");
    EXPECT_EQ(stats.functions[0].calls, calls);
    EXPECT_EQ(stats.functions[0].errors, calls);
  }
}

// --- limits, threads ---

TEST(AgentTroubleTest, ALimitOfOneCallLetsCallsGoBackAndForth) {
  Session session(2, {nest()}, [](AgentOptions& options) {
    options.most_calls = 1;
    options.call_timeout = 5s;
  });
  for (const char* const depth : {"1", "2", "3", "10"}) {
    EXPECT_EQ(sync(session[0], 1, "nest", depth), "bottom");
  }
}

// The thread that serves the first session is in a wait of the second.
TEST(AgentTroubleTest, AShortHandlerMayWaitInAnotherSession) {
  for (const auto most_inline : {0us, 1000us}) {
    StubbornGate gate;
    Session second(2, {gate.function_of("gate")},
                   [&](AgentOptions& options) { options.most_inline = most_inline; });
    TestFunction relay = function("relay", [&](Request&, const std::string& text) {
      return text == "wait" ? sync(second[0], 1, "gate", text) : text;
    });
    Session first(2, {relay, echo()}, [](AgentOptions& options) {
      options.most_inline = 5ms;
      options.threads = 2;
    });
    const Deadline limit = Deadline::after(20s);
    while (first[1].stats().inline_runs == 0 && !limit.expired()) sync(first[0], 1, "relay", "x");
    TextCall stuck;
    start(first[0], stuck, 1, "relay", "wait");
    while (gate.inside == 0 && !limit.expired()) std::this_thread::yield();
    EXPECT_EQ(sync(first[0], 1, "echo", "x"), "x");
    EXPECT_TRUE(stuck.under_way());
    gate.open = true;
    first[0].wait(stuck);
    EXPECT_EQ(stuck.result(), "wait");
  }
}

// --- the end ---

TEST(AgentTroubleTest, ShutdownWaitsForAHandlerWhoseCallerGaveUp) {
  StubbornGate gate;
  Session session(2, {gate.function_of("gate")});
  // So long that nothing of the greeting is left that would wake anybody.
  error_text(ErrorKind::kTimeout, [&] { sync(session[0], 1, "gate", "", {.timeout = 150ms}); });
  ASSERT_EQ(gate.inside, 1);
  const auto shut_down = [&](std::size_t rank) {
    EXPECT_NO_THROW(session[rank].shutdown(Deadline::after(10s)));
    EXPECT_FALSE(rank == 1 && !gate.open);
  };
  const Sleeper callee([&] { shut_down(1); });
  const Sleeper caller([&] { shut_down(0); });
  caller.wait_until_asleep();
  callee.wait_until_asleep();
  gate.open = true;
}

TEST(AgentTroubleTest, ShutdownThatTimesOutLeavesTheSessionOpenAndMayBeCalledAgain) {
  Session session(3, {echo()});
  EXPECT_THAT(error_text(ErrorKind::kTimeout, [&] { session[0].shutdown(Deadline::after(20ms)); }),
              AllOf(HasSubstr("worker1"), HasSubstr("worker2")));
  EXPECT_EQ(sync(session[0], 1, "echo", "x"), "x");
  EXPECT_EQ(sync(session[2], 0, "echo", "x"), "x");
  error_text(ErrorKind::kTimeout, [&] { session[0].shutdown(Deadline::after(20ms)); });
  // The others have the first one's words of its tries, and are rounds ahead of it.
  const auto shut_down = [&](std::size_t rank) {
    EXPECT_NO_THROW(session[rank].shutdown(Deadline::after(20s)));
  };
  const Sleeper second([&] { shut_down(1); });
  const Sleeper third([&] { shut_down(2); });
  second.wait_until_asleep();
  third.wait_until_asleep();
  shut_down(0);
}

// As a server does that sits in shutdown() while calls still come.
// It would lose itself, with the calls to itself.
TEST(AgentTroubleTest, WhoEndsSaysNoGoodbyeToItself) {
  Hooks hooks;
  std::vector<transport::Address> told;
  hooks.send = [&](transport::Remote& remote,
                   const transport::Letter& letter) -> std::optional<transport::SendResult> {
    if (static_cast<LetterType>(letter.kind) == LetterType::kGoodbye) {
      told.push_back(remote.address());
    }
    return std::nullopt;
  };
  StubbornGate gate;
  TestAgent a(hooked(options_of(0), hooks), {echo(), gate.function_of("stand")});
  TestAgent b(options_of(1), {echo()});
  admit({&*a, &*b});
  EXPECT_EQ(sync(*a, 1, "echo", "x"), "x");
  TextCall call;
  start(*a, call, 0, "stand");
  while (gate.inside.load() == 0) std::this_thread::yield();
  a->abort();
  ASSERT_TRUE(call.failure);
  EXPECT_EQ(call.failure->kind, ErrorKind::kCancelled);
  EXPECT_EQ(told, std::vector{b->address()});
  gate.open = true;
}

TEST(AgentTroubleTest, CallsOfCallbacksGoOnWhileAWorkerShutsDown) {
  // Two calls, the second one made when the first one ends.
  struct Steps {
    RequestRef request;
    TextCall first;
    TextCall second;
  } steps;
  TestFunction chain{"chain", [&](RequestRef request) {
                       steps.request = std::move(request);
                       Agent& agent = steps.request->agent();
                       steps.second.then = [&steps](TextCall& call) {
                         if (call.failure) {
                           steps.request->fail(ErrorKind::kRemote, "", call.failure->text);
                         } else {
                           steps.request->reply({.body = std::as_bytes(std::span(call.text))});
                         }
                       };
                       steps.first.then = [&steps, &agent](TextCall&) {
                         const CurrentScope nobody(nullptr);  // as a user's callback
                         try {
                           start(agent, steps.second, 2, "echo", "end");
                         } catch (const Error& error) {
                           steps.request->fail(ErrorKind::kRemote, "", error.what());
                         }
                       };
                       start(agent, steps.first, 2, "echo", "begin");
                     }};
  Session session(3, {chain, echo()});
  EXPECT_EQ(sync(session[0], 1, "echo", "x"), "x");
  const Sleeper server([&] { EXPECT_NO_THROW(session[1].shutdown(Deadline::after(20s))); });
  server.wait_until_asleep();
  EXPECT_EQ(sync(session[0], 1, "chain"), "end");
  const Sleeper other([&] { session[2].shutdown(Deadline::after(20s)); });
  session[0].shutdown(Deadline::after(20s));
}

// --- time ---

// In a simulated world, whose time costs nothing.
TEST(AgentTroubleTest, AHandlerOf65SecondsAndTimeOutsOf60And120) {
  transport::World world;
  std::vector<std::unique_ptr<TestAgent>> agents;
  std::atomic<int> cancelled{0};
  TestFunction slow = function("slow", [&](Request& request, const std::string&) {
    Agent& agent = request.agent();
    agent.wait(Deadline::at(agent.now() + 65s), [] { return false; });
    cancelled += request.cancelled() ? 1 : 0;
    return "done";
  });
  for (WorkerId rank = 0; rank < 2; ++rank) {
    AgentOptions options = options_of(rank);
    options.call_timeout = 60s;
    options.make_endpoint = [&, rank](transport::Inbox& inbox) {
      return world.join(inbox, concat("worker", rank));
    };
    options.start_thread = [&](std::function<void()> run) { world.start(std::move(run)); };
    agents.push_back(std::make_unique<TestAgent>(options, std::vector{slow}));
  }
  Agent& caller = **agents[0];
  admit({&caller, &**agents[1]});
  std::optional<Failure> by_default;
  std::string result;
  std::chrono::nanoseconds took{};
  world.start([&] {
    const auto began = caller.now();
    TextCall call;
    start(caller, call, 1, "slow");
    caller.wait(call);
    by_default = call.failure;
    took = caller.now() - began;
    result = sync(caller, 1, "slow", "", {.timeout = 120s});
  });
  world.run_out();
  ASSERT_TRUE(by_default.has_value());
  EXPECT_EQ(by_default->kind, ErrorKind::kTimeout);
  EXPECT_THAT(by_default->text, HasSubstr("ran for more than 60 s"));
  EXPECT_GE(took, 60s);
  EXPECT_LT(took, 61s);
  EXPECT_EQ(result, "done");
  EXPECT_EQ(cancelled, 1) << "the first one's callee knew";
  agents.clear();
}

// --- nonsense ---

// A worker of a session that sends whatever a test wants.
class Impostor final : private transport::Inbox {
 public:
  explicit Impostor(Agent& victim, WorkerId rank) : victim_(victim), rank_(rank) {}

  const transport::Address& address() const { return endpoint_->address(); }
  void greet(const Id& session) {
    const Hello hello{.session = session,
                      .worker = rank_,
                      .name = concat("worker", rank_),
                      .asks = true,
                      .knows = true,
                      .table = {{"called", "text", hash_text("text")}}};
    send(LetterType::kHello, encode_hello(hello), {encode_table(hello.table)});
  }
  void send(LetterType type, std::string_view head, const std::vector<std::string>& pieces = {}) {
    std::vector<Piece> sent;
    for (const auto& piece : pieces) sent.push_back({std::as_bytes(std::span(piece))});
    endpoint_->remote(victim_.address())
        .try_send({.kind = static_cast<transport::LetterKind>(type),
                   .reply = type == LetterType::kReply || type == LetterType::kError,
                   .head = std::as_bytes(std::span(head)),
                   .pieces = sent});
  }
  bool wait_until_cut() {
    return endpoint_->wait(Deadline::after(20s), [&] { return cut_.load(); });
  }

 private:
  void arrived(transport::Remote&, transport::Arrival&&) noexcept override {}
  void lost(transport::Remote&, const Error&) noexcept override { cut_ = true; }

  Agent& victim_;
  const WorkerId rank_;
  std::atomic<bool> cut_{false};
  std::unique_ptr<transport::Endpoint> endpoint_ = shm::make_shm_endpoint(*this);
};

template <class Head>
std::string bytes_of_head(const Head& head, std::string_view more = "") {
  return concat(std::string_view(reinterpret_cast<const char*>(&head), sizeof head), more);
}

TEST(AgentTroubleTest, AWorkerThatSendsNonsenseIsLostAndNothingElseHappens) {
  const CallHead call{.number = 1, .remaining = kNoLimit};
  CallHead no_number = call;
  no_number.number = 0;
  CallHead all_behind = call;
  all_behind.behind = 1;
  CallHead not_zero = call;
  not_zero.flags = 0xffffffff;
  const ReplyHead reply{.number = 1};
  ReplyHead bad_reply = reply;
  bad_reply.zero = 1;
  const std::string error = encode_error({.kind = 5, .type = "t", .text = "no"});
  const std::string bad_kind = encode_error({.kind = 99, .type = "t", .text = "no"});
  const CancelHead cancel{.number = 1, .floor = 1};
  struct Nonsense {
    const char* what;
    LetterType type;
    std::string head;
    std::vector<std::string> pieces = {};
  };
  const std::vector<Nonsense> all = {
      {"a call too short", LetterType::kCall, "short"},
      {"a call without a number", LetterType::kCall, bytes_of_head(no_number)},
      {"a call behind all", LetterType::kCall, bytes_of_head(all_behind)},
      {"a call with unknown flags", LetterType::kCall, bytes_of_head(not_zero)},
      {"a reply too short", LetterType::kReply, "short"},
      {"a reply that is not zero", LetterType::kReply, bytes_of_head(bad_reply)},
      {"an error that is not zero", LetterType::kError, bytes_of_head(bad_reply, error)},
      {"an error without anything", LetterType::kError, bytes_of_head(reply)},
      {"an error of no kind", LetterType::kError, bytes_of_head(reply, bad_kind)},
      {"an error with more behind it", LetterType::kError, bytes_of_head(reply, error + "x")},
      {"a cancellation too short", LetterType::kCancel, "short"},
      {"a cancellation with more", LetterType::kCancel, bytes_of_head(cancel, "x")},
      {"a cancellation with a piece", LetterType::kCancel, bytes_of_head(cancel), {"x"}},
      {"a goodbye with a word", LetterType::kGoodbye, "x"},
      {"a goodbye with a piece", LetterType::kGoodbye, "", {"x"}},
      {"a value too short", LetterType::kGather, "short"},
      {"a hello without a table", LetterType::kHello, "x"},
      {"a hello of nothing", LetterType::kHello, "x", {""}},
      {"a kind that is not there", static_cast<LetterType>(63), ""},
      {"a kind of another layer", static_cast<LetterType>(64), ""},
  };
  std::atomic<int> runs{0};
  TestFunction count = function("count", [&](Request&, const std::string& text) {
    ++runs;
    return text;
  });
  for (const Nonsense& nonsense : all) {
    SCOPED_TRACE(nonsense.what);
    const Id session = Id::random();
    TestAgent victim(options_of(0), {count});
    TestAgent other(options_of(2), {echo()});
    Impostor impostor(*victim, 1);
    const Member members[] = {{"worker0", victim->address()},
                              {"worker1", impostor.address()},
                              {"worker2", other->address()}};
    victim->admit(session, members);
    other->admit(session, members);
    impostor.greet(session);
    TextCall under_way;
    start(*victim, under_way, 1, "called");
    impostor.send(nonsense.type, nonsense.head, nonsense.pieces);
    ASSERT_TRUE(impostor.wait_until_cut());
    victim->wait(under_way);
    ASSERT_TRUE(under_way.failure.has_value());
    EXPECT_EQ(under_way.failure->kind, ErrorKind::kPeerLost);
    EXPECT_EQ(under_way.failure->worker, "worker1");
    EXPECT_TRUE(victim->is_lost(1));
    EXPECT_EQ(sync(*victim, 2, "echo", "alive"), "alive");
    EXPECT_EQ(sync(*other, 0, "count", "alive"), "alive");
  }
  EXPECT_EQ(runs, static_cast<int>(all.size())) << "those of the other worker";
}

// Whoever may connect could fill the disk with our log.
TEST(AgentTroubleTest, StrangersAreNotLoggedWithoutEnd) {
  TestAgent agent(options_of(0), {});
  admit({&*agent});
  convoy::test::StderrCapture log;
  constexpr int kStrangers = 100;
  for (int i = 0; i < kStrangers; ++i) {
    Impostor stranger(*agent, 1);
    stranger.send(LetterType::kCall, "nonsense");
    ASSERT_TRUE(stranger.wait_until_cut());
  }
  const std::string text = log.text();
  std::size_t lines = 0;
  for (std::size_t at = 0; (at = text.find("unusable", at)) != std::string::npos; ++at) ++lines;
  EXPECT_GE(lines, 1u);
  EXPECT_LE(lines, 20u) << text.substr(0, 2000);
}

// A worker of a session whose workers come and go.
struct Joined {
  Joined(const std::shared_ptr<Store>& store, const std::string& name)
      : agent({.name = name, .threads = 1}, {echo()}), membership(Membership::make(*agent)) {
    membership->join({store}, Deadline::after(30s));
  }
  ~Joined() { agent.reset(); }

  TestAgent agent;
  std::shared_ptr<Membership> membership;
};

TEST(AgentTroubleTest, ANewWorkerWithABadNameIsRefused) {
  const auto store = make_local_store();
  Joined first(store, "first");
  Joined second(store, "second");
  first.membership->wait_for("second", Deadline::after(30s));
  std::string body;
  WireWriter writer(body);
  writer.put<std::uint64_t>(3);  // of the view that it makes
  writer.put<std::uint8_t>(1);
  writer.put<std::uint32_t>(0);
  writer.put_sized<std::uint16_t>("no name");
  writer.put_sized<std::uint32_t>(second.agent->address().encode());
  second.agent->send_letter(0, kFirstOtherLetter + 16, {.body = std::as_bytes(std::span(body))});
  EXPECT_EQ(sync(*second.agent, 0, "echo", "after it"), "after it");
  // The next one has its place.
  Joined third(store, "third");
  first.membership->wait_for("third", Deadline::after(30s));
  const View view = first.membership->view();
  EXPECT_EQ(view.version, 3u);
  ASSERT_EQ(view.workers.size(), 3u);
  EXPECT_EQ(view.workers[2].name, "third");
  EXPECT_EQ(sync(*first.agent, 2, "echo", "hello"), "hello");
}

}  // namespace
}  // namespace convoy::agent::test
