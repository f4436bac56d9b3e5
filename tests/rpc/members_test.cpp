// Sessions whose workers come and go, and the places where they meet.
#include <signal.h>
#include <stdlib.h>
#include <torch/torch.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/concat.h"
#include "base/wire.h"
#include "convoy/rpc.h"
#include "convoy/rref.h"
#include "group/launched_ranks.h"
#include "support/eventually.h"
#include "support/expect_error.h"
#include "support/leak_oracle.h"
#include "support/rank_group.h"

namespace convoy::rpc::members_test {

using convoy::test::error_of;
using convoy::test::eventually;
using convoy::test::expect_error;
using convoy::test::free_port;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using namespace std::chrono_literals;

int add_three(int a, int b, int c) { return a + b + c; }
CONVOY_RPC(add_three);
int add_to(const RRef<int>& reference, int n) { return reference.to_here() + n; }
CONVOY_RPC(add_to);

// What handlers of this process wait for.
struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;

  void wait() {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, 30s, [&] { return open; });
  }
  void set(bool value) {
    const std::lock_guard lock(mutex);
    open = value;
    changed.notify_all();
  }
};
Gate& gate() {
  static Gate one;
  return one;
}
int wait_at_gate(int n) {
  gate().wait();
  return n;
}
CONVOY_RPC(wait_at_gate);

namespace {

// libuv, in torch's store, keeps a pipe as long as the process lives.
[[maybe_unused]] const bool kWarm = [] {
  convoy::test::LeakOracle::warm_up([] {
    Session({.name = "warm",
             .method = concat("tcp://127.0.0.1:", free_port()),
             .rank = 0,
             .members = Members::kComeAndGo})
        .shutdown();
  });
  return true;
}();

Session join_as(const std::shared_ptr<Store>& store, const std::string& name) {
  return Session({.name = name, .store = store, .members = Members::kComeAndGo});
}

std::vector<std::string> names_of(const std::vector<WorkerInfo>& workers) {
  std::vector<std::string> names;
  for (const auto& worker : workers) names.push_back(worker.name);
  return names;
}

TEST(MembersTest, WorkersComeAndGo) {  // test_dynamic_rpc_*
  const auto store = make_local_store();
  Session first = join_as(store, "the-first");
  std::mutex mutex;
  std::vector<View> seen;
  const View before = first.on_change([&](const View& view) {
    const std::scoped_lock lock(mutex);
    seen.push_back(view);
  });
  EXPECT_EQ(names_of(before.workers), (std::vector<std::string>{"the-first"}));
  {
    Session second = join_as(store, "a-second");
    EXPECT_EQ(second.rpc_sync<add_three>("the-first", 1, 1, 0), 2);
    // It has come a moment ago.
    EXPECT_EQ(first.rpc_sync<add_three>("a-second", 1, 1, 0), 2);
    Session third = join_as(store, "third:0");
    EXPECT_EQ(first.rpc_sync<add_three>("third:0", 2, 1, 0), 3);
    EXPECT_EQ(second.rpc_sync<add_three>("third:0", 2, 1, 1), 4);
    EXPECT_EQ(third.rpc_sync<add_three>(second.worker_info(), 2, 1, 2), 5);
    EXPECT_EQ(names_of(third.workers()),
              (std::vector<std::string>{"the-first", "a-second", "third:0"}));
    // References go around, too.
    EXPECT_EQ(third.rpc_sync<add_to>("a-second", third.rref(1), 1), 2);
    second.shutdown();
    third.shutdown();
  }
  EXPECT_TRUE(eventually([&] { return first.view().workers.size() == 1; }));
  EXPECT_EQ(first.view().version, 5u);
  EXPECT_TRUE(eventually([&] {
    const std::scoped_lock lock(mutex);
    return seen.size() == 4;
  }));
  std::vector<std::string> joined, left;
  for (std::size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].version, before.version + 1 + i);
    for (const auto& name : names_of(seen[i].joined)) joined.push_back(name);
    for (const auto& name : names_of(seen[i].left)) left.push_back(name);
  }
  EXPECT_EQ(joined, (std::vector<std::string>{"a-second", "third:0"}));
  EXPECT_EQ(left, (std::vector<std::string>{"a-second", "third:0"}));
  expect_error(ErrorKind::kPeerLost, "a-second",
               [&] { first.rpc_sync<add_three>("a-second", 1, 1, 1); });
  first.shutdown();
}

// What a callback uses may go with shutdown().
TEST(MembersTest, NoCallbackOutlivesTheSession) {
  for (const bool graceful : {true, false}) {
    const auto store = make_local_store();
    const Session first = join_as(store, "the-first");
    std::atomic<int> runs{0};
    std::atomic<bool> over{false};
    first.on_change([&](const View&) {
      EXPECT_FALSE(over);
      ++runs;
      // Until the session is over here, and longer.
      EXPECT_TRUE(eventually([&] {
        const auto error = error_of([&] { first.wait_for("nobody", 1ms); });
        return error && error->kind() == ErrorKind::kCancelled;
      }));
      for (int i = 0; i < 200; ++i) std::this_thread::yield();
      --runs;
    });
    std::optional<Session> second = join_as(store, "second");
    EXPECT_TRUE(eventually([&] { return runs == 1; }));
    second->shutdown({.graceful = false});
    first.shutdown({.graceful = graceful});
    EXPECT_EQ(runs, 0);
    over = true;
  }
}

// Whoever has come can be named, also before its news has.
TEST(MembersTest, ABarrierWithOneThatCameAMomentAgo) {
  const auto store = make_local_store();
  const Session first = join_as(store, "first");
  for (int i = 0; i < 20; ++i) {
    const auto name = concat("later-", i);
    std::atomic<bool> joined{false};
    const auto other = std::async(std::launch::async, [&] {
      const Session second = join_as(store, name);
      joined = true;
      second.barrier({"first", name}, 20s);
      second.shutdown();
    });
    while (!joined && other.wait_for(0s) != std::future_status::ready) std::this_thread::yield();
    first.barrier({name, "first"}, 20s);
  }
  first.shutdown();
}

TEST(MembersTest, NamesOfThoseWhoAreThereAreUnique) {
  const auto store = make_local_store();
  Session first = join_as(store, "same");
  expect_error(ErrorKind::kInvalidArgument, "is not unique", [&] { join_as(store, "same"); });
  // test_dynamic_and_static_init_rpc_together
  expect_error(ErrorKind::kInvalidArgument, "members",
               [&] { Session({.rank = 0, .size = 1, .store = store}); });
  first.shutdown();
  Session again = join_as(store, "same");
  EXPECT_EQ(again.worker_info().rank, 1);
  again.shutdown();
}

// A loss that is found while changes are read ends calls, and their callbacks may want to read
// changes, too.
TEST(MembersTest, CallbacksOfCallsToTheLostCallByName) {
  gate().set(false);
  const auto store = make_local_store();
  Session first = join_as(store, "first");
  Session second = join_as(store, "second");
  const auto call = first.rpc_async<wait_at_gate>("second", 1);
  const auto after = call.then([&](const Future<int>&) {
    expect_error(ErrorKind::kPeerLost, "second",
                 [&] { first.rpc_sync<add_three>("second", 1, 1, 1); });
    return 7;
  });
  // Somebody else has lost it.
  std::string event;
  WireWriter writer(event);
  writer.put<std::uint8_t>(3);
  writer.put<std::uint32_t>(1);
  writer.put_sized<std::uint16_t>("");
  writer.put_sized<std::uint32_t>("");
  with_prefix(store, "convoy/rpc/open")->set("event/3", event);
  expect_error(ErrorKind::kInvalidArgument, "nobody",
               [&] { first.rpc_sync<add_three>("nobody", 1, 1, 1); });
  EXPECT_EQ(after.wait(), 7);
  EXPECT_EQ(names_of(first.view().workers), (std::vector<std::string>{"first"}));
  gate().set(true);
  second.shutdown({.graceful = false, .ignore_leaks = true});
  first.shutdown({.graceful = false, .ignore_leaks = true});
}

TEST(MembersTest, ListenersThatThrow) {
  const auto store = make_local_store();
  std::atomic<int> told{0};
  std::atomic<int> lost{0};
  Session first = join_as(store, "first");
  const auto fail_lost = [&](const Error&) {
    ++lost;
    throw std::runtime_error("of a reference");
  };
  first.on_change([&](const View&) {
    ++told;
    throw std::runtime_error("of a view");
  });
  Session second = join_as(store, "second");
  first.wait_for("second", 30s);
  const auto value = first.remote<add_three>("second", 1, 1, 1);
  value.created().wait();
  value.on_lost(fail_lost);
  first.on_lost("second", [&](const WorkerInfo&, const Error&) {
    ++told;
    throw 7;  // NOLINT(bugprone-std-exception-baseclass): foreign code may
  });
  second.shutdown({.graceful = false, .ignore_leaks = true});
  EXPECT_TRUE(eventually([&] { return told == 3 && lost == 1; }));
  // At the end of the session.
  Session third = join_as(store, "third");
  first.wait_for("third", 30s);
  const auto last = first.remote<add_three>("third", 1, 1, 1);
  last.created().wait();
  EXPECT_TRUE(eventually([&] { return told == 4; }));
  last.on_lost(fail_lost);
  first.shutdown({.graceful = false, .ignore_leaks = true});
  EXPECT_TRUE(eventually([&] { return lost == 2; }));
  third.shutdown({.graceful = false, .ignore_leaks = true});
}

// A worker that is killed and comes back under its name is another one: references to what the
// first one had fail, and calls by name find the new one.
TEST(MembersTest, RestartedWorker) {
  RankGroup group(3, RankMode::kProcesses);
  group.start([](Rank& r) {
    if (r.id() == 1) {
      Session rpc = join_as(r.store(), "worker");
      r.mark("ready");
      r.wait_for("never");
      return;
    }
    if (r.id() == 2) {
      r.wait_for("killed");
      Session rpc = join_as(r.store(), "worker");
      r.mark("again");
      r.wait_for("end");
      rpc.shutdown({.graceful = false, .ignore_leaks = true});
      return;
    }
    Session rpc = join_as(r.store(), "keeper");
    const auto old = rpc.wait_for("worker", 30s);
    const auto value = rpc.remote<add_three>("worker", 1, 1, 1);
    EXPECT_EQ(value.to_here(), 3);
    std::atomic<bool> lost{false};
    rpc.on_lost(old, [&](const WorkerInfo&, const Error&) { lost = true; });
    r.mark("ready");
    r.wait_for("again");
    EXPECT_TRUE(eventually([&] { return lost.load(); }));
    EXPECT_EQ(rpc.rpc_sync<add_three>("worker", 1, 1, 2), 4);
    EXPECT_NE(rpc.worker_info("worker").rank, old.rank);
    expect_error(ErrorKind::kPeerLost, "worker", [&] { value.to_here(); });
    expect_error(ErrorKind::kPeerLost, "worker", [&] { rpc.rpc_sync<add_three>(old, 1, 1, 1); });
    EXPECT_EQ(rpc.remote<add_three>("worker", 1, 1, 3).to_here(), 5);
    const auto view = rpc.view();
    EXPECT_EQ(names_of(view.workers), (std::vector<std::string>{"keeper", "worker"}));
    r.mark("checked");
    rpc.shutdown({.graceful = false, .ignore_leaks = true});
  });
  group.wait_mark("ready", 0);
  group.kill(1, SIGKILL);
  group.post("killed");
  group.wait_mark("again", 2);
  group.post("again");
  group.wait_mark("checked", 0);
  group.post("end");
  group.join();
}

// --- Where they meet ---------------------------------------------------------------------------

// The place is in the environment of ranks: each runs the test's body anew.
std::string variable(const char* name) {
  const char* const text = ::getenv(name);
  return text ? text : "";
}

Session join_at(const std::string& method, const std::string& name, std::optional<int> rank = {}) {
  return Session({.name = name,
                  .method = method,
                  .rank = rank,
                  .members = Members::kComeAndGo,
                  .start_timeout = 20s});
}

void expect_answers(const Session& session, const std::string& name) {
  EXPECT_EQ(session.rpc_sync<add_three>(session.wait_for(name, 20s), 1, 2, 3), 6);
  EXPECT_EQ(session.remote<add_three>(name, 1, 2, 3).to_here(), 6);
}

// Whoever serves the store comes first and leaves last, or says why it may not.
void meet_where_rank_0_serves(Rank& r, const std::function<Session()>& join) {
  if (r.id() != 0) r.wait_for("served");
  const Session session = join();
  if (r.id() == 0) r.mark("serves");
  for (int other = 0; other < r.size(); ++other) expect_answers(session, concat("at-", other));
  r.barrier();
  if (r.id() == 0) {
    expect_error(ErrorKind::kInvalidArgument, "at-0 serves the session's store",
                 [&] { session.shutdown(); });
    // It is still there.
    for (int other = 0; other < r.size(); ++other) expect_answers(session, concat("at-", other));
  }
  r.barrier();
  if (r.id() != 0) {
    session.shutdown();
    return;
  }
  EXPECT_TRUE(eventually([&] { return session.size() == 1; }));
  session.shutdown();
}
void run_where_rank_0_serves(const std::vector<std::string>& environment,
                             const std::function<Session(Rank&)>& join) {
  RankGroup group(3, RankMode::kProcesses, {.environment = environment});
  group.start([&](Rank& r) { meet_where_rank_0_serves(r, [&] { return join(r); }); });
  group.wait_mark("serves", 0);
  group.post("served");
  group.join();
}

TEST(MembersTest, MeetByTcp) {
  run_where_rank_0_serves({concat("PLACE=tcp://127.0.0.1:", free_port())}, [](Rank& r) {
    // Only one needs a rank: who serves.
    const auto rank = r.id() == 2 ? std::nullopt : std::optional<int>(r.id());
    return join_at(variable("PLACE"), concat("at-", r.id()), rank);
  });
}

// Sessions of this process: a rank of a RankGroup has a launcher's store.
class Environment {
 public:
  explicit Environment(std::vector<std::pair<std::string, std::string>> variables)
      : variables_(std::move(variables)) {
    for (const auto& [name, value] : variables_) ::setenv(name.c_str(), value.c_str(), 1);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment() {
    for (const auto& [name, value] : variables_) ::unsetenv(name.c_str());
  }

 private:
  const std::vector<std::pair<std::string, std::string>> variables_;
};

void meet_by_variables(const std::function<Session(const std::string& name, int rank)>& join) {
  const Session first = join("first", 0);
  const Session second = join("second", 1);
  expect_answers(first, "second");
  expect_answers(second, "first");
  expect_error(ErrorKind::kInvalidArgument, "first serves the session's store",
               [&] { first.shutdown(); });
  second.shutdown();
  EXPECT_TRUE(eventually([&] { return first.size() == 1; }));
  first.shutdown();
}

// As PyTorch's init_rpc(name, rank) without a size.
TEST(MembersTest, MeetByVariables) {
  const Environment master(
      {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", std::to_string(free_port())}});
  meet_by_variables([](const std::string& name, int rank) {
    if (rank == 0) return join_at("env://", name, rank);
    return join_at("env://", name);  // who does not serve needs no rank
  });
}

TEST(MembersTest, MeetByVariablesOfALauncher) {
  const Environment master({{"MASTER_ADDR", "127.0.0.1"},
                            {"MASTER_PORT", std::to_string(free_port())},
                            {"WORLD_SIZE", "2"},
                            {"TORCHELASTIC_USE_AGENT_STORE", "False"}});
  meet_by_variables([](const std::string& name, int rank) {
    const Environment own({{"RANK", std::to_string(rank)}});
    return join_at("env://", name);
  });
}

// Nobody serves a file: the first may leave, and others may come later.
TEST(MembersTest, MeetByFile) {
  std::string folder;
  if (variable("PLACE").empty()) {  // not in a rank
    folder = (std::filesystem::temp_directory_path() / "members-XXXXXX").string();
    ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  }
  RankGroup(3, RankMode::kProcesses, {.environment = {concat("PLACE=file://", folder, "/store")}})
      .run([](Rank& r) {
        const auto join = [&] { return join_at(variable("PLACE"), concat("at-", r.id())); };
        if (r.id() == 0) {
          const Session session = join();
          expect_answers(session, "at-1");
          r.barrier();
          session.shutdown();
          r.barrier();
          r.barrier();
        } else if (r.id() == 1) {
          const Session session = join();
          expect_answers(session, "at-0");
          r.barrier();
          r.barrier();
          expect_answers(session, "at-2");
          EXPECT_EQ(names_of(session.workers()), (std::vector<std::string>{"at-1", "at-2"}));
          r.barrier();
          session.shutdown();
        } else {
          r.barrier();
          r.barrier();
          const Session session = join();
          expect_answers(session, "at-1");
          expect_error(ErrorKind::kPeerLost, "at-0",
                       [&] { session.rpc_sync<add_three>("at-0", 1, 2, 3); });
          r.barrier();
          session.shutdown();
        }
      });
  std::filesystem::remove_all(folder);
}

// Those who are there go on without a store. (Who comes then hears why; the thread in which torch
// tries to connect would outlive this test.)
TEST(MembersTest, WhoServesTheStoreIsKilled) {
  RankGroup group(3, RankMode::kProcesses,
                  {.environment = {concat("PLACE=tcp://127.0.0.1:", free_port())}});
  group.start([](Rank& r) {
    const std::string name = concat("at-", r.id());
    if (r.id() != 0) r.wait_for("served");
    const Session session = join_at(variable("PLACE"), name, r.id());
    r.mark("joined");
    if (r.id() == 0) r.wait_for("never");
    const std::string other = r.id() == 1 ? "at-2" : "at-1";
    expect_answers(session, other);
    std::atomic<bool> lost{false};
    session.on_lost(session.wait_for("at-0", 20s),
                    [&](const WorkerInfo&, const Error&) { lost = true; });
    r.mark("ready");
    r.wait_for("killed");
    EXPECT_TRUE(eventually([&] { return lost.load(); }));
    expect_answers(session, other);
    EXPECT_TRUE(eventually([&] { return session.size() == 2; }));  // in the order of their coming
    expect_error(ErrorKind::kInvalidArgument, "at-9",
                 [&] { session.rpc_sync<add_three>("at-9", 1, 2, 3); });
    session.barrier({"at-1", "at-2"});
    session.shutdown();
  });
  group.wait_mark("joined", 0);
  group.post("served");
  group.wait_mark("ready", 1);
  group.wait_mark("ready", 2);
  group.kill(0, SIGKILL);
  group.post("killed");
  group.join();
}

}  // namespace
}  // namespace convoy::rpc::members_test
