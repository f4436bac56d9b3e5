// Sessions from their beginning to their end, in trouble: how they start, forked children, workers
// that are killed, ends that overlap with what is under way.
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <thread>

#include "agent/sleeper.h"
#include "base/concat.h"
#include "base/unique_fd.h"
#include "convoy/rpc.h"
#include "group/launched_ranks.h"
#include "rpc/twin.h"
#include "support/expect_error.h"
#include "support/forked.h"
#include "support/programs.h"
#include "support/rank_group.h"

namespace convoy::rpc::test {

using convoy::test::expect_error;
using convoy::test::in_forked_child;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using convoy::test::Refusals;
using namespace std::chrono_literals;

namespace life {

int rank_here() { return current().session().worker_info().rank; }
CONVOY_RPC(rank_here);

at::Tensor sum(const at::Tensor& a, const at::Tensor& b) { return a + b; }
CONVOY_RPC(sum);

bool is_there(const RRef<at::Tensor>& reference) { return static_cast<bool>(reference); }
CONVOY_RPC(is_there);

std::atomic<bool> gate_open{false};
std::atomic<int> at_gate{0};
void wait_at_gate() {
  const auto limit = Deadline::after(30s);
  ++at_gate;
  while (!gate_open && !limit.expired()) std::this_thread::yield();
  --at_gate;
}
CONVOY_RPC(wait_at_gate);

// Runs so long, and says whether anybody still waits for it.
bool run_for(int milliseconds) {
  const auto limit = Deadline::after(std::chrono::milliseconds(milliseconds));
  while (!limit.expired()) std::this_thread::yield();
  return !current().cancelled();
}
CONVOY_RPC(run_for);

Future<int> two_steps(int to) {
  const auto session = current().session();
  return session.rpc_async<rank_here>(to).then(
      [session, to](int) { return session.rpc_async<rank_here>(to); });
}
CONVOY_RPC(two_steps);

// --- the state of threads ---

void spoil() { at::GradMode::set_enabled(false); }
CONVOY_RPC(spoil);
void spoil_caller() {
  const auto session = current().session();
  session.rpc_sync<spoil>(current().caller());
}
CONVOY_RPC(spoil_caller);
Future<bool> grad_mode_after_spoiling(int by) {
  const auto session = current().session();
  co_await session.rpc_async<spoil_caller>(by);
  co_return at::GradMode::is_enabled();
}
CONVOY_RPC(grad_mode_after_spoiling);

// --- promises of no session ---

Promise<int>& endless() {
  static Promise<int> never;
  return never;
}
std::optional<CurrentCall> kept;
void wait_shortly() {
  kept = current();
  expect_error(ErrorKind::kTimeout, "", [] { static_cast<void>(endless().future().wait(1ms)); });
}
CONVOY_RPC(wait_shortly);

std::atomic<int> ends_seen{0};
std::atomic<bool> waits_for_end{false};
Future<int> wait_for_the_end() {
  const auto call = current();
  const auto limit = Deadline::after(30s);
  waits_for_end = true;
  for (bool ended = false; !ended && !limit.expired();) {
    try {
      static_cast<void>(call.session());
      std::this_thread::yield();
    } catch (const Error&) {
      ended = true;
      ++ends_seen;
    }
  }
  co_return co_await endless().future();
}
CONVOY_RPC(wait_for_the_end);

std::optional<Promise<int>> promised;
void keep_promise(int value) { promised->set_value(value); }
CONVOY_RPC(keep_promise);
// Of a user's: goes on on the session's threads, and waits there.
Future<int> wait_on_a_pool_thread(Session session) {
  co_await session.rpc_async<rank_here>(0);
  co_return promised->future().wait();
}

}  // namespace life

namespace {

int twin() { return 1; }
struct TwinScope {};

SessionOptions options_for(const Rank& r) {
  return {.rank = r.id(), .size = r.size(), .store = r.store()};
}

void expect_calls(const Session& session) {
  const int other = (session.worker_info().rank + 1) % session.size();
  EXPECT_EQ(session.rpc_sync<life::rank_here>(other), other);
  EXPECT_EQ(session.rpc_async<life::rank_here>(other).wait(), other);
}

// --- how they start ---

// Somebody listens there.
bool is_served(int port) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

void be_started_worker(int rank) {
  const Session session;
  EXPECT_TRUE(is_served(std::stoi(std::getenv("MASTER_PORT"))));
  EXPECT_EQ(session.worker_info(), (WorkerInfo{concat("worker", rank), rank}));
  EXPECT_EQ(session.size(), 2);
  expect_calls(session);
  const Session second({.name = concat("again", rank)});  // by the same variables
  expect_calls(second);
  second.shutdown();
  session.shutdown();
}

// This test again, in programs that a user starts, or a launcher does. (A rank of a RankGroup would
// find a store of its own.)
void start_by_variables(const std::string& test, Variables variables) {
  if (std::getenv("STARTED_WORKER")) {
    be_started_worker(std::atoi(std::getenv("RANK")));
    if (!testing::Test::HasFailure()) std::cout << "started, called, ended" << std::endl;
    // The store of a process is served as long as that lives.
    std::_Exit(testing::Test::HasFailure() ? 1 : 0);
  }
  // What they leave behind, since they end early.
  auto folder = (std::filesystem::temp_directory_path() / "started-XXXXXX").string();
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  variables.insert({{"STARTED_WORKER", "1"},
                    {"TMPDIR", folder},
                    {"WORLD_SIZE", "2"},
                    {"MASTER_ADDR", "127.0.0.1"},
                    {"MASTER_PORT", std::to_string(convoy::test::free_port())}});
  std::vector<convoy::test::Program> programs;
  for (const char* const rank : {"0", "1"}) {
    variables["RANK"] = rank;
    programs.push_back(
        {{convoy::test::this_program(), concat("--gtest_filter=RpcLifeTest.", test)}, variables});
  }
  for (const auto& result : convoy::test::run_programs(programs)) {
    EXPECT_EQ(result.code, 0) << result.output;
    EXPECT_NE(result.output.find("started, called, ended"), std::string::npos) << result.output;
  }
  std::filesystem::remove_all(folder);
}

TEST(RpcLifeTest, StartsByVariablesSetByHand) {
  start_by_variables("StartsByVariablesSetByHand", {});
}

// Without a store of its agent's; rpc.torchrun has one.
TEST(RpcLifeTest, StartsByTorchrunsVariables) {
  start_by_variables("StartsByTorchrunsVariables", {{"LOCAL_WORLD_SIZE", "2"},
                                                    {"TORCHELASTIC_RUN_ID", "none"},
                                                    {"TORCHELASTIC_USE_AGENT_STORE", "False"},
                                                    {"TORCHELASTIC_RESTART_COUNT", "0"}});
}

// --- forked children ---

TEST(RpcLifeTest, AForkedChildIsRefusedEverywhereAndItsParentGoesOn) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    std::optional<Session> session(options_for(r));
    expect_calls(*session);
    if (r.id() == 0) {
      const auto ones = torch::ones({2, 2});
      const auto under_way = session->rpc_async<life::wait_at_gate>(1);
      const auto target = session->to(1, {.timeout = 5s});
      EXPECT_EQ(in_forked_child([&] {
                  Refusals refused;
                  refused.expect("rpc_sync", [&] { return session->rpc_sync<life::rank_here>(1); });
                  refused.expect("to itself",
                                 [&] { return session->rpc_sync<life::rank_here>(0); });
                  refused.expect("rpc_async",
                                 [&] { return session->rpc_async<life::sum>(1, ones, ones); });
                  refused.expect("target", [&] { return target.rpc_sync<life::rank_here>(); });
                  refused.expect("operator", [&] {
                    return session->rpc_sync<at::Tensor>(1, op("aten::relu"), ones);
                  });
                  refused.expect("all_gather", [&] { return session->all_gather(1); });
                  refused.expect("barrier", [&] {
                    session->barrier();
                    return 0;
                  });
                  refused.expect("stats", [&] { return session->stats().threads; });
                  refused.expect("wait", [&] {
                    under_way.wait();
                    return 0;
                  });
                  refused.expect("wait with a limit", [&] {
                    under_way.wait(10ms);
                    return 0;
                  });
                  refused.expect("shutdown", [&] {
                    session->shutdown();
                    return 0;
                  });
                  refused.expect("abrupt shutdown", [&] {
                    session->shutdown({.graceful = false});
                    return 0;
                  });
                  refused.expect("new", [&] {
                    Session({.rank = 0, .size = 1, .store = make_local_store()});
                    return 0;
                  });
                  std::string text = refused.text();
                  if (under_way.cancel()) text += "cancelled\n";
                  if (under_way.done()) text += "done\n";
                  session.reset();
                  return text;
                }),
                "");
      EXPECT_FALSE(under_way.done());
      expect_calls(*session);
      EXPECT_TRUE(under_way.cancel());
    }
    session->barrier();
    expect_calls(*session);
    life::gate_open = true;
    session->shutdown();
  });
}

// Its copies are of no use, and their end is nothing to the owner.
TEST(RpcLifeTest, AForkedChildLeavesReferencesAlone) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    const Session session(options_for(r));
    session.barrier();
    if (r.id() == 0) {
      const auto ones = torch::ones({2, 2});
      auto value = session.remote<life::sum>(1, ones, ones);
      auto mine = session.rref(ones);
      value.created().wait();
      EXPECT_TRUE(session.rpc_sync<life::is_there>(1, mine));
      EXPECT_EQ(
          in_forked_child([&] {
            Refusals refused;
            refused.expect("to_here", [&] { return value.to_here(); });
            refused.expect("to_here of its own", [&] { return mine.to_here(); });
            refused.expect("local_value", [&] { return mine.local_value(); });
            refused.expect("confirmed", [&] { return value.confirmed_by_owner(); });
            refused.expect("created", [&] { return value.created(); });
            refused.expect("on_lost", [&] { value.on_lost([](const Error&) {}); });
            refused.expect("argument", [&] { return session.rpc_sync<life::is_there>(1, value); });
            refused.expect("rref", [&] { return session.rref(1); });
            refused.expect("remote", [&] { return session.remote<life::rank_here>(1); });
            refused.expect("rref_info", [&] { return session.rref_info(); });
            refused.expect("view", [&] { return session.view(); });
            refused.expect("wait_for", [&] { return session.wait_for("worker1"); });
            refused.expect("on_change", [&] { return session.on_change([](const View&) {}); });
            refused.expect("lost worker",
                           [&] { session.on_lost(1, [](const WorkerInfo&, const Error&) {}); });
            value = {};
            mine = {};
            return refused.text();
          }),
          "");
      EXPECT_TRUE(torch::equal(value.to_here(), 2 * ones));
      EXPECT_TRUE(torch::equal(mine.local_value(), ones));
    }
    session.shutdown();
  });
}

// --- deaths ---

// The benchmark tells how soon.
TEST(RpcLifeTest, AKilledWorkerFailsAllCallsToItByName) {
  RankGroup group(3, RankMode::kProcesses);
  group.start([](Rank& r) {
    const Session session(options_for(r));
    if (r.id() == 1) {
      r.mark("ready");
      r.wait_for("never");
      return;
    }
    std::vector<Future<void>> futures;
    for (int i = 0; i < 20; ++i) futures.push_back(session.rpc_async<life::wait_at_gate>(1));
    auto chained = session.rpc_async<life::two_steps>(1, 1);
    static_cast<void>(chained.cancel());
    r.mark("ready");
    for (const auto& future : futures) {
      try {
        future.wait(20s);
        ADD_FAILURE() << "no error";
      } catch (const RemoteError& error) {
        EXPECT_EQ(to_string(error.kind()), to_string(ErrorKind::kPeerLost)) << error.what();
        EXPECT_EQ(error.worker(), "worker1");
        EXPECT_NE(std::string(error.what()).find("wait_at_gate"), std::string::npos);
      }
    }
    expect_error(ErrorKind::kPeerLost, "worker1", [&] { session.rpc_sync<life::rank_here>(1); });
    EXPECT_EQ(session.rpc_sync<life::rank_here>(2 - r.id()), 2 - r.id());
    session.barrier({"worker0", "worker2"});
    session.shutdown({.graceful = false});
  });
  group.wait_mark("ready");
  group.kill(1, SIGKILL);
  group.join();
}

// --- time ---

// See AgentTroubleTest.AHandlerOf65SecondsAndTimeOutsOf60And120 for the real ones.
TEST(RpcLifeTest, ACallsOwnTimeoutWinsOverTheSessions) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    auto options = options_for(r);
    options.timeout = 300ms;
    const Session session(options);
    if (r.id() == 0) {
      EXPECT_TRUE((session.to(1, {.timeout = 120s}).rpc_sync<life::run_for>(400)));
      expect_error(ErrorKind::kTimeout, "ran for more than 0.3 s",
                   [&] { session.rpc_sync<life::run_for>(1, 400); });
    }
    session.shutdown();
  });
}

// --- ends ---

// The usual server: it sits in shutdown() while others call.
TEST(RpcLifeTest, ChainsGoOnWhileTheirWorkerShutsDown) {
  static std::atomic<pid_t> server;
  server = 0;
  RankGroup(3, RankMode::kThreads).run([](Rank& r) {
    const Session session(options_for(r));
    session.barrier();
    if (r.id() == 1) server = ::gettid();
    if (r.id() == 0) {
      convoy::test::wait_until_asleep(server);
      EXPECT_EQ(session.rpc_sync<life::two_steps>(1, 2), 2);
    }
    session.shutdown();
  });
}

TEST(RpcLifeTest, ShutdownAfterATimeOutWhileTheHandlerRuns) {
  static std::atomic<pid_t> server;
  server = 0;
  life::gate_open = false;
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const Session session(options_for(r));
    if (r.id() == 1) {
      server = ::gettid();
      session.shutdown({.timeout = 20s});
      return;
    }
    expect_error(ErrorKind::kTimeout, "worker1",
                 [&] { session.to(1, {.timeout = 150ms}).rpc_sync<life::wait_at_gate>(); });
    convoy::test::wait_until_asleep(server);
    std::thread opens([] { life::gate_open = true; });
    session.shutdown({.timeout = 20s});
    opens.join();
  });
}

TEST(RpcLifeTest, AWaitThatTimedOutKeepsNoSession) {
  {
    const Session session({.name = "me"});
    session.rpc_sync<life::wait_shortly>("me");
    EXPECT_EQ(life::kept->session().worker_info().name, "me");
    session.shutdown();
  }
  expect_error(ErrorKind::kCancelled, "has ended",
               [] { static_cast<void>(life::kept->session()); });
  life::kept.reset();
}

TEST(RpcLifeTest, ACoroutineWhoseSessionEndsIsToldSo) {
  life::ends_seen = 0;
  life::waits_for_end = false;
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    std::optional<Session> session(options_for(r));
    session->barrier();
    if (r.id() == 0) {
      const auto future = session->rpc_async<life::wait_for_the_end>(1);
      expect_error(ErrorKind::kPeerLost, "worker1", [&] { static_cast<void>(future.wait()); });
      session->shutdown({.graceful = false});
      return;
    }
    while (!life::waits_for_end && !r.deadline().expired()) std::this_thread::yield();
    session.reset();  // abruptly; perhaps the handler's copy is the last
    while (life::ends_seen == 0 && !r.deadline().expired()) std::this_thread::yield();
  });
  EXPECT_EQ(life::ends_seen, 1);
}

// --- threads ---

TEST(RpcLifeTest, ACoroutineGoesOnWithACleanThread) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    auto options = options_for(r);
    options.threads = 1;
    const Session session(options);
    if (r.id() == 0) {
      EXPECT_TRUE(session.rpc_sync<life::grad_mode_after_spoiling>(1, 0));
    }
    session.shutdown();
  });
}

TEST(RpcLifeTest, ACoroutineThatWaitsOnAThreadOfThePoolIsReplaced) {
  life::promised.emplace();
  const Session session({.name = "me", .timeout = 20s, .threads = 1});
  auto future = life::wait_on_a_pool_thread(session);
  const auto limit = Deadline::after(20s);
  while (session.stats().waiting + session.stats().running == 0 && !limit.expired()) {
    std::this_thread::yield();
  }
  session.rpc_sync<life::keep_promise>("me", 5);
  EXPECT_EQ(future.wait(), 5);
  session.shutdown();
  life::promised.reset();
}

// Each ends the next one.
TEST(RpcLifeTest, ChainsMayBeLong) {
  constexpr int kLinks = 50'000;
  Promise<int> promise;
  auto future = promise.future();
  for (int i = 0; i < kLinks; ++i) future = future.then([](int n) { return n + 1; });
  promise.set_value(0);
  EXPECT_EQ(future.wait(), kLinks);
  auto broken = Promise<int>().future();
  {
    Promise<int> dropped;
    broken = dropped.future();
    for (int i = 0; i < kLinks; ++i) broken = broken.then([](int n) { return n + 1; });
  }
  expect_error(ErrorKind::kCancelled, "", [&] { static_cast<void>(broken.wait()); });
}

// A call in a callback should not be waited for, and works if it is.
TEST(RpcLifeTest, ACallbackMayWait) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    auto options = options_for(r);
    options.threads = 1;
    options.timeout = 10s;
    const Session session(options);
    const int other = 1 - r.id();
    const auto call = [session, other](bool) { return session.rpc_sync<life::rank_here>(other); };
    EXPECT_EQ(session.rpc_async<life::run_for>(other, 20).then(call).wait(), other);
    const auto alone = session.rpc_async<life::run_for>(other, 20).then(call);
    while (!alone.done() && !r.deadline().expired()) std::this_thread::yield();
    EXPECT_EQ(alone.wait(), other);
    session.shutdown();
  });
}

// Callbacks of long chains run one after the other; what one of them waits for does not wait for
// its return.
TEST(RpcLifeTest, ACallbackFarDownAChainMayWait) {
  const Session session({.name = "me", .timeout = 20s});
  Promise<int> promise;
  auto future = promise.future();
  for (int i = 0; i < 100; ++i) future = future.then([](int n) { return n + 1; });
  const auto last = future.then([&](int n) {
    // It has ended this one itself.
    Promise<int> inner;
    const auto follows = inner.future().then([](int m) { return m + 1; });
    inner.set_value(1);
    n += follows.wait(Deadline::after(20s));
    const auto call = session.rpc_async<life::rank_here>("me").then([](int rank) { return rank; });
    n += call.wait(Deadline::after(20s));
    const auto more = session.rpc_async<life::rank_here>("me").then([](int rank) { return rank; });
    return n + wait_all(std::vector{more}, Deadline::after(20s)).front();
  });
  promise.set_value(0);
  EXPECT_EQ(last.wait(), 102);
  session.shutdown();
}

// --- names ---

TEST(RpcLifeTest, TwoFunctionsOfOneNameAndSignatureAreRefused) {
  convoy::test::run_in_process([] {
    detail::export_function<twin>("twin", typeid(TwinScope));
    {
      const Session session({.name = "me"});
      EXPECT_EQ(session.rpc_sync<twin>("me"), 1);
      session.shutdown();
    }
    export_second_twin();
    expect_error(ErrorKind::kInvalidArgument, "twin",
                 [] { const Session session({.name = "me"}); });
  });
}

}  // namespace
}  // namespace convoy::rpc::test
