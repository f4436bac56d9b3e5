// How long survivors take to learn of a death: a rank of four is killed in the middle of
// operations, again and again. `make bench-faults` prints the times from the signal to each
// survivor's error.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "../tests/coll/support.h"
#include "base/concat.h"

namespace convoy::coll::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
constexpr int kRanks = 4;
constexpr int kVictim = 2;
constexpr int kKills = 11;
constexpr std::size_t kBytes = std::size_t{8} << 20;

// The operations until one fails; returns when it did.
Clock::time_point loop_until_error(Rank& r, const std::string& kind) {
  const auto group = make_group(r, "world", {.timeout = 60s});
  Region region(*group, kind == "shared" ? Place::kShared : Place::kPrivate, kBytes);
  group->barrier();
  r.mark("looping");
  if (kind == "outside" && r.id() == kVictim) r.wait_for("never");
  try {
    for (;;) {
      if (kind == "barrier" || kind == "outside") {
        group->barrier();
      } else {
        group->all_reduce(region.data(), region.data(), kBytes / 4, DataType::kF32);
      }
    }
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
    return Clock::now();
  }
}

void measure(const std::string& kind, const char* what) {
  std::vector<double> times;
  for (int i = 0; i < kKills; ++i) {
    RankGroup ranks(kRanks, RankMode::kProcesses);
    ranks.start([&](Rank& r) {
      const auto told = loop_until_error(r, kind).time_since_epoch().count();
      r.store()->set(concat("told/", r.id()), std::to_string(told));
    });
    if (convoy::test::in_rank()) continue;  // the process of a later kill's rank
    ranks.wait_mark("looping");
    const auto killed = Clock::now().time_since_epoch().count();
    ranks.kill(kVictim, SIGKILL);
    for (int r = 0; r < kRanks; ++r) {
      if (r == kVictim) continue;
      const auto told = std::stoll(ranks.store()->get(concat("told/", r), Deadline::after(60s)));
      times.push_back(static_cast<double>(told - killed) / 1e6);
    }
    ranks.join();
  }
  std::sort(times.begin(), times.end());
  std::printf("%-34s %8.2f ms median %8.2f ms 90 %% %8.2f ms most\n", what, times[times.size() / 2],
              times[times.size() * 9 / 10], times.back());
  std::fflush(stdout);
}

TEST(Faults, Barrier) { measure("barrier", "killed in a barrier"); }
TEST(Faults, Shared) { measure("shared", "killed in all_reduce, group memory"); }
TEST(Faults, Private) { measure("private", "killed in all_reduce, private"); }
TEST(Faults, Outside) { measure("outside", "killed outside, others wait"); }

}  // namespace
}  // namespace convoy::coll::test
