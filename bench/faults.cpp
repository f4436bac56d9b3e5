// How long survivors take to learn of a death: a rank of four is killed, again and again, in tight
// loops of operations, while another rank is late, while the group is being made, and while it is
// idle. `make bench-faults` prints the times from the signal to each survivor's error.
// BENCH_KILLS=n kills n times for each line.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../tests/coll/support.h"
#include "agent/agent.h"
#include "base/concat.h"
#include "coll/control.h"
#include "coll/mesh.h"
#include "coll/shared_memory.h"
#include "transport/shm/shm_endpoint.h"

namespace convoy::coll::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
constexpr int kRanks = 4;
constexpr int kVictim = 2;
constexpr int kLate = 3;
constexpr std::size_t kBytes = std::size_t{8} << 20;

int kills() {
  const char* const asked = std::getenv("BENCH_KILLS");
  return asked ? std::max(1, std::atoi(asked)) : 100;
}

// Runs `operation` until it fails; returns when it did.
Clock::time_point until_error(const std::function<void()>& operation) {
  try {
    for (;;) operation();
  } catch (const Error& error) {
    const auto told = Clock::now();
    EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
    EXPECT_NE(std::string(error.what()).find("SIGKILL"), std::string::npos) << error.what();
    return told;
  }
}

// What a rank does; returns when it was told. A rank whose time does not count returns an empty
// one.
using Behaviour = std::function<Clock::time_point(Rank&)>;

Clock::time_point in_loop(Rank& r, const std::string& kind) {
  const auto group = make_group(r, "world", {.timeout = 60s});
  Region region(*group, kind == "shared" ? Place::kShared : Place::kPrivate, kBytes);
  group->barrier();
  r.mark("ready");
  if (kind == "outside" && r.id() == kVictim) r.wait_for("never");
  return until_error([&] {
    if (kind == "barrier" || kind == "outside") return group->barrier();
    group->all_reduce(region.data(), region.data(), kBytes / 4, DataType::kF32);
  });
}

// The victim has arrived when it dies; another rank computes until the rest has been told.
Clock::time_point beside_a_late_rank(Rank& r) {
  const auto group = make_group(r, "world", {.timeout = 60s});
  group->barrier();
  if (r.id() == kVictim) {
    Work work = group->start(group->calls().barrier());
    auto* const control = mesh_of(*group->medium())->control().data();
    const auto& slot = Layout(kRanks).rank(control, kVictim).slots[work.number() & 1];
    while (slot.arrived.load() < work.number()) std::this_thread::yield();
    r.mark("ready");
    r.wait_for("never");
  }
  r.mark("ready");
  if (r.id() == kLate) r.store()->get("others", Deadline::after(60s));
  const auto told = until_error([&] { group->barrier(); });
  if (r.id() == kLate) return {};
  if (r.store()->add("told", 1) == kRanks - 2) r.store()->set("others", "");
  return told;
}

// The victim is killed at a random moment of making the group, after it has come, or soon after.
Clock::time_point in_formation(Rank& r) {
  r.mark("ready");
  r.wait_for("make");
  return until_error([&] {
    const auto group = make_group(r, "world", {.timeout = 60s});
    for (;;) group->barrier();
  });
}

// Nobody calls anything: how soon the group knows.
Clock::time_point idle(Rank& r) {
  const auto group = make_group(r, "world", {.timeout = 60s});
  group->barrier();
  r.mark("ready");
  if (r.id() == kVictim) r.wait_for("never");
  while (group->lost_ranks().empty()) std::this_thread::sleep_for(1ms);
  return Clock::now();
}

// Endpoints that are connected with each other: when lost() was called.
class Losses final : public transport::Inbox {
 public:
  std::string victim;
  std::atomic<Clock::rep> told{0};
  std::atomic<transport::Endpoint*> endpoint{nullptr};

  void arrived(transport::Remote&, transport::Arrival&&) noexcept override {}
  void lost(transport::Remote& remote, const Error& error) noexcept override {
    if (remote.address().encode() != victim) return;
    EXPECT_NE(std::string(error.what()).find("SIGKILL"), std::string::npos) << error.what();
    told.store(Clock::now().time_since_epoch().count());
    if (auto* const known = endpoint.load()) known->wake();
  }
};

Clock::time_point between_endpoints(Rank& r, bool busy) {
  Losses inbox;
  const auto endpoint = shm::make_shm_endpoint(inbox);
  inbox.endpoint = endpoint.get();
  r.store()->set(concat("address/", r.id()), endpoint->address().encode());
  const auto address = [&](int rank) {
    return r.store()->get(concat("address/", rank), r.deadline());
  };
  inbox.victim = address(kVictim);
  std::vector<transport::Remote*> remotes;
  for (int other = 0; other < kRanks; ++other) {
    if (other == r.id()) continue;
    remotes.push_back(&endpoint->remote(transport::Address::decode(address(other))));
    remotes.back()->try_send({});
  }
  r.barrier();
  r.mark("ready");
  if (!busy && r.id() == kVictim) r.wait_for("never");
  while (busy && inbox.told.load() == 0) {
    for (auto* const remote : remotes) remote->try_send({.reply = true});
    endpoint->poll(transport::Endpoint::Serve::kReplies);
  }
  endpoint->wait(r.deadline(), [&] { return inbox.told.load() != 0; });
  inbox.endpoint = nullptr;
  return Clock::time_point(Clock::duration(inbox.told.load()));
}

// A call that notes when it ended.
class TimedCall final : public agent::Call {
 public:
  Clock::time_point told;
  std::string text;

 private:
  void ended(agent::Outcome&& outcome) noexcept override {
    told = Clock::now();
    if (outcome.failure) text = outcome.failure->text;
    mark_over();
  }
};

// Many calls to the victim are under way: when the last one has ended.
Clock::time_point with_calls_under_way(Rank& r) {
  const agent::FunctionKey key{"never", "void()", 1};
  agent::AgentOptions options{.name = concat("worker", r.id()),
                              .rank = static_cast<agent::WorkerId>(r.id())};
  std::mutex mutex;
  std::vector<agent::RequestRef> kept;
  struct Keep {
    std::mutex& mutex;
    std::vector<agent::RequestRef>& kept;
  } keep{mutex, kept};
  options.handlers = {{key,
                       [](void* data, agent::RequestRef request) noexcept {
                         auto& to = *static_cast<Keep*>(data);
                         const std::scoped_lock lock(to.mutex);
                         to.kept.push_back(std::move(request));
                       },
                       &keep}};
  agent::Agent worker(options);
  worker.meet(*r.store(), kRanks, r.deadline());
  std::deque<TimedCall> calls;
  if (r.id() != kVictim) {
    for (int i = 0; i < 20; ++i) {
      worker.start(calls.emplace_back(), kVictim, agent::declare_function(key), {});
    }
  }
  r.barrier();
  r.mark("ready");
  if (r.id() == kVictim) r.wait_for("never");
  Clock::time_point last;
  for (TimedCall& call : calls) {
    worker.wait(call);
    EXPECT_NE(call.text.find("worker2 is lost"), std::string::npos) << call.text;
    last = std::max(last, call.told);
  }
  return last;
}

// All lines so far, into the file that BENCH_JSON names: bench/report.py draws them.
void write_record(const char* what, double median, double p99, double longest) {
  const char* const file = std::getenv("BENCH_JSON");
  if (!file) return;
  static std::string records;
  records += concat(records.empty() ? "" : ",\n", R"(  {"bench": "faults", "what": ")", what,
                    R"(", "ranks": )", kRanks, R"(, "median_ms": )", median, R"(, "p99_ms": )", p99,
                    R"(, "longest_ms": )", longest, "}");
  std::ofstream(file) << "[\n" << records << "\n]\n";
}

void measure(const char* what, const Behaviour& behaviour, bool formation = false) {
  std::vector<double> times;
  std::mt19937 random(7);
  for (int i = 0; i < kills(); ++i) {
    RankGroup ranks(kRanks, RankMode::kProcesses);
    ranks.start([&](Rank& r) {
      const auto told = behaviour(r).time_since_epoch().count();
      r.store()->set(concat("told/", r.id()), std::to_string(told));
    });
    if (convoy::test::in_rank()) continue;  // the process of a later kill's rank
    ranks.wait_mark("ready");
    if (formation) {
      ranks.post("make");
      // Of a rank that has told nothing of itself only a launcher knows.
      ranks.store()->get(concat("world/process/", kVictim), Deadline::after(60s));
      // The rest takes a few milliseconds.
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
    }
    const auto killed = Clock::now().time_since_epoch().count();
    ranks.kill(kVictim, SIGKILL);
    for (int r = 0; r < kRanks; ++r) {
      if (r == kVictim) continue;
      const auto told = std::stoll(ranks.store()->get(concat("told/", r), Deadline::after(60s)));
      if (told != 0) times.push_back(static_cast<double>(told - killed) / 1e6);
    }
    ranks.join();
  }
  if (times.empty()) return;
  std::sort(times.begin(), times.end());
  const auto at = [&](double part) {
    const auto rank = static_cast<std::size_t>(std::ceil(part * static_cast<double>(times.size())));
    return times[std::max<std::size_t>(rank, 1) - 1];
  };
  std::printf("%-38s %7.1f ms median %7.1f ms p99 %7.1f ms maximum (%zu times)\n", what, at(0.5),
              at(0.99), times.back(), times.size());
  std::fflush(stdout);
  write_record(what, at(0.5), at(0.99), times.back());
}

void measure_loop(const char* what, const std::string& kind) {
  measure(what, [kind](Rank& r) { return in_loop(r, kind); });
}

TEST(Faults, Barrier) { measure_loop("tight loop of barriers", "barrier"); }
TEST(Faults, Shared) { measure_loop("tight loop of all_reduce, group memory", "shared"); }
TEST(Faults, Private) { measure_loop("tight loop of all_reduce, private", "private"); }
TEST(Faults, Outside) { measure_loop("killed outside, others wait", "outside"); }
TEST(Faults, Late) { measure("killed while another rank is late", beside_a_late_rank); }
TEST(Faults, Formation) { measure("killed while the group is made", in_formation, true); }
TEST(Faults, Idle) { measure("killed while the group is idle", idle); }
TEST(Faults, EndpointsBusy) {
  measure("endpoints that send", [](Rank& r) { return between_endpoints(r, true); });
}
TEST(Faults, Calls) { measure("20 calls to it are under way (RPC)", with_calls_under_way); }
TEST(Faults, EndpointsIdle) {
  measure("endpoints that are idle", [](Rank& r) { return between_endpoints(r, false); });
}

}  // namespace
}  // namespace convoy::coll::test
