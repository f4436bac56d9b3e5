// How long references and their values live, what fails, and who hears of it. The scenarios of
// PyTorch's rpc_test.py have its names behind them.
#include <signal.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "base/concat.h"
#include "convoy/rpc.h"
#include "convoy/rref.h"
#include "rpc/rref_functions.h"
#include "rpc/workers.h"
#include "support/eventually.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::rpc::test {

using convoy::test::eventually;
using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using namespace std::chrono_literals;

at::Tensor throw_remote(const at::Tensor&) { throw std::invalid_argument("Expected error"); }
CONVOY_RPC(throw_remote);

MyClass throw_object() { throw std::invalid_argument("Expected error"); }
CONVOY_RPC(throw_object);

bool is_confirmed_here(const RRef<int>& reference) { return reference.confirmed_by_owner(); }
CONVOY_RPC(is_confirmed_here);

// Keeps references, by a number.
std::mutex kept_mutex;
std::map<int, RRef<MyClass>> kept_references;
void keep_reference(int rank, const RRef<MyClass>& reference) {
  const std::scoped_lock lock(kept_mutex);
  kept_references[rank] = reference;
}
CONVOY_RPC(keep_reference);
int use_kept(int rank) {
  RRef<MyClass> reference;
  {
    const std::scoped_lock lock(kept_mutex);
    reference = kept_references.at(rank);
  }
  return reference.rpc_sync<&MyClass::value>();
}
CONVOY_RPC(use_kept);
void drop_kept(int rank) {
  const std::scoped_lock lock(kept_mutex);
  kept_references.erase(rank);
}
CONVOY_RPC(drop_kept);

MyClass slow_object(int n) {
  rref_gate().wait();
  return MyClass(n);
}
CONVOY_RPC(slow_object);

RRefGate& second_gate() {
  static RRefGate one;
  return one;
}
void wait_at_second_gate() { second_gate().wait(); }
CONVOY_RPC(wait_at_second_gate);

namespace {

TEST(RRefTest, Confirmed) {  // test_user_rrefs_confirmed, test_user_rrefs_confirmed_remote
  run_workers(3, [](Session& rpc, int rank) {
    const auto value = rpc.remote<my_function>(next_of(rpc), 1, 1, 1);
    EXPECT_TRUE(rpc.rpc_sync<is_confirmed_here>((rank + 2) % 3, value));
    EXPECT_TRUE(rpc.remote<is_confirmed_here>((rank + 2) % 3, value).to_here());
    value.created().wait();
    EXPECT_TRUE(value.confirmed_by_owner());
  });
}

TEST(RRefTest, FailedCreation) {  // test_remote_with_exception, test_remote_throw
  run_workers(3, [](Session& rpc, int rank) {
    const auto bad = rpc.remote<throw_remote>(next_of(rpc), torch::ones({1}));
    expect_error(ErrorKind::kRemote, "Expected error", [&] { bad.to_here(); });
    expect_error(ErrorKind::kRemote, "Expected error", [&] { bad.created().wait(); });
    expect_error(ErrorKind::kRemote, "Expected error",
                 [&] { rpc.rpc_sync<add_rref_to_value>((rank + 2) % 3, bad, torch::ones({1})); });
    const auto own = rpc.remote<throw_remote>(rank, torch::ones({1}));
    expect_error(ErrorKind::kRemote, "Expected error", [&] { own.to_here(); });
    expect_error(ErrorKind::kRemote, "Expected error", [&] { own.local_value(); });
    expect_error(ErrorKind::kRemote, "Expected error", [&] { own.created().wait(); });
  });
}

// The owner forgets it before it looks at the question: the one who asks knows why.
void ask_while_creation_fails(const std::function<void(const RRef<MyClass>&)>& ask) {
  rref_gate().set(false);
  second_gate().set(false);
  run_workers(2,
              [&](Session& rpc, int rank) {
                if (rank == 0) {
                  const auto first = rpc.rpc_async<slow_function>(1, 1);
                  const auto bad = rpc.remote<throw_object>(1);
                  const auto second = rpc.rpc_async<wait_at_second_gate>(1);
                  expect_error(ErrorKind::kRemote, "Expected error", [&] { ask(bad); });
                  first.wait();
                  second.wait();
                  return;
                }
                // All four have come: one runs, the others wait for their turn.
                EXPECT_TRUE(eventually([&] { return rpc.stats().requests == 4; }));
                rref_gate().set(true);
                EXPECT_TRUE(eventually([] { return second_gate().is_waited_at(); }));
                EXPECT_TRUE(eventually([&] { return rpc.rref_info().num_owner_rrefs == 0; }));
                second_gate().set(true);
              },
              {.threads = 1});
}

TEST(RRefTest, FailedCreationWhileTheValueIsAskedFor) {
  ask_while_creation_fails([](const auto& bad) { RRef<int>(bad.handle()).to_here(); });
}

TEST(RRefTest, FailedCreationWhileAFunctionIsCalled) {
  ask_while_creation_fails([](const auto& bad) { bad.template rpc_sync<&MyClass::value>(); });
}

// test_rref_proxy_timeout, test_remote_message_dropped_*, test_remote_message_delay_timeout,
// test_rref_to_here_timeout
TEST(RRefTest, Timeouts) {
  rref_gate().set(false);
  run_workers(3, [](Session& rpc, int rank) {
    if (rank == 0) {
      const auto late = rpc.to("worker1", {.timeout = 10ms}).remote<slow_function>(1);
      expect_error(ErrorKind::kTimeout, "RRef creation", [&] { late.created().wait(); });
      expect_error(ErrorKind::kTimeout, "RRef creation", [&] { late.to_here(); });
      expect_error(ErrorKind::kTimeout, "RRef creation",
                   [&] { rpc.rpc_sync<add_to_reference>("worker2", late, 1); });
      const auto slow = rpc.remote<slow_function>("worker1", 2);
      expect_error(ErrorKind::kTimeout, "", [&] { slow.to_here(10ms); });
      // A slow method, and a slow constructor.
      const auto object = rpc.remote<make<MyClass, int>>("worker1", 5);
      const auto quick = object.with({.timeout = 20ms});
      const auto expect_late = [](const char* why, const std::function<void()>& call) {
        expect_error(ErrorKind::kTimeout, why, call);
      };
      const char* const long_run = "ran for more than 0.02 s";
      expect_late(long_run, [&] { quick.rpc_sync<&MyClass::slow_value>(); });
      expect_late(long_run,
                  [&] { static_cast<void>(quick.rpc_async<&MyClass::slow_value>().wait()); });
      const auto unfinished = quick.remote<&MyClass::slow_value>();
      expect_late(long_run, [&] { unfinished.created().wait(); });
      expect_late(long_run, [&] { unfinished.to_here(); });
      const auto unmade = rpc.to("worker1", {.timeout = 10ms}).remote<slow_object>(1);
      expect_late("RRef creation", [&] { unmade.created().wait(); });
      expect_late("RRef creation", [&] { unmade.rpc_sync<&MyClass::value>(); });
      rref_gate().set(true);
      EXPECT_EQ(slow.to_here(), 2);
      EXPECT_EQ(object.rpc_sync<&MyClass::slow_value>(), 5);
    }
    rpc.barrier();
    // What was given up is nobody's.
    EXPECT_TRUE(eventually([&] {
      const auto info = rpc.rref_info();
      return info.num_owner_rrefs + info.num_forks + info.num_pending_users == 0;
    }));
    rpc.barrier();
  });
}

// At the owner there is no call to be late.
TEST(RRefTest, TimeoutsAtTheOwner) {
  rref_gate().set(false);
  Session rpc({.name = "me"});
  const auto slow = rpc.remote<slow_function>("me", 3);
  expect_error(ErrorKind::kTimeout, "not there within 0.01 s", [&] { slow.to_here(10ms); });
  expect_error(ErrorKind::kTimeout, "not there within 0.01 s",
               [&] { static_cast<void>(slow.with({.timeout = 10ms}).to_here_async().wait()); });
  expect_error(ErrorKind::kInvalidArgument, "timeout must be >= 0", [&] { slow.to_here(-1us); });
  const auto later = slow.to_here_async();
  rpc.set_timeout(10ms);
  expect_error(ErrorKind::kTimeout, "not there within 0.01 s", [&] { slow.to_here(); });
  expect_error(ErrorKind::kTimeout, "not there in time", [&] { slow.local_value(); });
  EXPECT_FALSE(later.done());
  rref_gate().set(true);
  EXPECT_EQ(later.wait(), 3);
  EXPECT_EQ(slow.to_here(10ms), 3);
  EXPECT_EQ(slow.to_here(0ms), 3);
  rpc.shutdown();
}

// A value lives as long as a reference to it, and no longer.
TEST(RRefTest, LifeOfAValue) {
  ASSERT_EQ(alive.load(), 0);
  run_workers(3, [](Session& rpc, int rank) {
    if (rank == 0) {
      {
        auto object = rpc.remote<make<MyClass, int>>("worker1", 5);
        rpc.rpc_sync<keep_reference>("worker2", 0, object);
        object = {};
        EXPECT_EQ(rpc.rpc_sync<use_kept>("worker2", 0), 5);
        EXPECT_EQ(alive.load(), 1);
        rpc.rpc_sync<drop_kept>("worker2", 0);
      }
      EXPECT_TRUE(eventually([] { return alive.load() == 0; }));
      // One that is dropped at once, and one whose user never waits for it.
      for (int i = 0; i < 100; ++i) static_cast<void>(rpc.remote<make<MyClass, int>>("worker1", i));
      EXPECT_TRUE(eventually([] { return alive.load() == 0; }));
      // At its owner, and passed to nobody.
      { const auto own = rpc.rref(std::make_shared<MyClass>(1)); }
      EXPECT_EQ(alive.load(), 0);
    }
    rpc.barrier();
  });
  EXPECT_EQ(alive.load(), 0);
}

TEST(RRefTest, AfterShutdown) {  // test_use_rref_after_shutdown
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    Session rpc({.rank = r.id(), .size = 2, .store = r.store()});
    const auto value = rpc.remote<my_function>(1 - r.id(), 1, 1, 1);
    const auto own = rpc.rref(1);
    rpc.shutdown();
    expect_error(ErrorKind::kInvalidArgument, "", [&] { value.to_here(); });
    expect_error(ErrorKind::kInvalidArgument, "",
                 [&] { rpc.rpc_sync<add_to_reference>(1 - r.id(), value, 1); });
    rpc = Session({.rank = 0, .size = 1, .store = make_local_store()});
    expect_error(ErrorKind::kInvalidArgument, "deleted", [&] { value.to_here(); });
    expect_error(ErrorKind::kInvalidArgument, "deleted", [&] { own.to_here(); });
    expect_error(ErrorKind::kInvalidArgument, "nothing", [&] { RRef<int>().to_here(); });
  });
}

// test_rref_leak, test_ignore_rref_leak
TEST(RRefTest, Leaks) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    for (const bool ignore : {false, true}) {
      Session rpc({.rank = r.id(), .size = 2, .store = r.store()});
      const auto value = rpc.remote<my_function>(1 - r.id(), 1, 1, 1);
      EXPECT_EQ(value.to_here(), 3);
      rpc.barrier();
      const auto meet = [&](const char* where) {
        r.store()->barrier(convoy::concat(where, ignore), 2, Deadline::after(30s));
      };
      if (r.id() == 0 && ignore) {
        rpc.shutdown({.graceful = false, .ignore_leaks = true});
      } else if (r.id() == 0) {
        expect_error(ErrorKind::kInvalidArgument, "Leaking RRef",
                     [&] { rpc.shutdown({.graceful = false}); });
      }
      meet("first");
      // What the first one had is gone with it.
      if (r.id() == 1) {
        EXPECT_TRUE(eventually([&] { return rpc.view().workers.size() == 1; }));
        rpc.shutdown({.graceful = false});
      }
      meet("second");
    }
  });
}

TEST(RRefTest, CountersAndReports) {  // _rref_context_get_debug_info
  run_workers(2, [](Session& rpc, int rank) {
    if (rank == 0) {
      const auto value = rpc.remote<my_function>("worker1", 1, 1, 1);
      value.created().wait();
      EXPECT_EQ(rpc.rref_info().num_pending_users, 0u);
      const auto own = rpc.rref(3);
      EXPECT_EQ(rpc.rpc_sync<add_to_reference>("worker1", own, 1), 4);
      rpc.barrier();
      rpc.barrier();  // the references live until the other has looked
    } else {
      rpc.barrier();
      EXPECT_EQ(rpc.rref_info().num_owner_rrefs, 1u);
      EXPECT_EQ(rpc.rref_info().num_forks, 1u);
      rpc.barrier();
    }
  });
}

// The future needs no reference.
TEST(RRefTest, CreatedWithoutAReference) {
  run_workers(3, [](Session& rpc, int rank) {
    if (rank != 0) return;
    for (int i = 0; i < 100; ++i) {
      rpc.remote<my_function>("worker1", 1, 1, 1).created().wait();
      rpc.rpc_sync<nested_rrefs>("worker1", "worker2").front().created().wait();
    }
  });
}

// A reference whose owner is killed.
TEST(RRefTest, OwnerIsKilled) {
  RankGroup group(3, RankMode::kProcesses);
  group.start([](Rank& r) {
    Session rpc({.rank = r.id(), .size = 3, .store = r.store()});
    if (r.id() == 1) {
      r.mark("ready");
      r.wait_for("never");
      return;
    }
    const auto value = rpc.remote<my_function>("worker1", 1, 1, 1);
    EXPECT_EQ(value.to_here(), 3);
    std::atomic<int> lost{0};
    value.on_lost([&](const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPeerLost);
      lost += 1;
    });
    rpc.on_lost("worker1", [&](const WorkerInfo& worker, const Error&) {
      EXPECT_EQ(worker.name, "worker1");
      lost += 10;
    });
    r.mark("ready");
    EXPECT_TRUE(eventually([&] { return lost == 11; }));
    expect_error(ErrorKind::kPeerLost, "worker1", [&] { value.to_here(); });
    expect_error(ErrorKind::kPeerLost, "worker1",
                 [&] { rpc.rpc_sync<add_to_reference>(2 - r.id(), value, 1); });
    rpc.barrier({"worker0", "worker2"});
    rpc.shutdown({.graceful = false, .ignore_leaks = true});
  });
  group.wait_mark("ready");
  group.kill(1, SIGKILL);
  group.join();
}

}  // namespace
}  // namespace convoy::rpc::test
