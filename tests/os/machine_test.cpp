#include "os/machine.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "os/file.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy {
namespace {

cpu_set_t affinity() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  EXPECT_EQ(sched_getaffinity(0, sizeof mask, &mask), 0);
  return mask;
}

TEST(MachineTest, UsableCoresAreAtMostTheAffinityMask) {
  const cpu_set_t mask = affinity();
  EXPECT_GE(usable_cores(), 1);
  EXPECT_LE(usable_cores(), CPU_COUNT(&mask));
  EXPECT_EQ(usable_cores(), std::min(CPU_COUNT(&mask), cgroup_cores().value_or(1 << 20)));
}

TEST(MachineTest, PinnedThreadHasOneCore) {
  std::jthread([] {
    const cpu_set_t mask = affinity();
    int first = 0;
    while (!CPU_ISSET(first, &mask)) ++first;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(usable_cores(), 1);
  }).join();
}

TEST(MachineTest, MemoryStateIsPlausible) {
  const auto state = memory_state();
  const auto total = parse_field(read_file("/proc/meminfo").value_or(""), "MemTotal");
  ASSERT_TRUE(total);
  EXPECT_GT(state.available, std::uint64_t{1} << 20);
  EXPECT_LE(state.available, *total * 1024);
  EXPECT_LE(state.headroom(), state.available);
  EXPECT_GT(state.headroom(), 0u);
  EXPECT_EQ(state.limit.has_value(), state.used.has_value());
}

TEST(MachineTest, CoreDistanceIsMeasuredAndAffinityKept) {
  const cpu_set_t before = affinity();
  const auto distance = measure_core_distance();
  const cpu_set_t after = affinity();
  EXPECT_GT(distance.round_trip.count(), 0);
  EXPECT_LT(distance.round_trip, std::chrono::seconds(1));
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(MachineTest, CoreDistanceOnOneCore) {
  std::jthread([] {
    const cpu_set_t mask = affinity();
    int first = 0;
    while (!CPU_ISSET(first, &mask)) ++first;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    const auto distance = measure_core_distance();
    EXPECT_FALSE(distance.near());  // context switches
    EXPECT_LT(distance.round_trip, std::chrono::seconds(1));
  }).join();
}

TEST(MachineTest, NearIsBelow150Nanoseconds) {
  EXPECT_TRUE(CoreDistance{std::chrono::nanoseconds(149)}.near());
  EXPECT_FALSE(CoreDistance{std::chrono::nanoseconds(150)}.near());
}

TEST(MachineTest, HostNameIsTheKernels) {
  std::string kernel = read_file("/proc/sys/kernel/hostname").value_or("");
  EXPECT_EQ(host_name() + "\n", kernel);
}

TEST(MachineTest, BootIdIsTheSameInAllProcesses) {
  const std::string id = boot_id();
  EXPECT_EQ(id.size(), 36u) << id;
  test::RankGroup group(2, test::RankMode::kProcesses);
  group.start([](test::Rank& r) {
    r.store()->set("boot " + std::to_string(r.id()), boot_id());
    r.mark("set");
    r.wait_for("end");
  });
  group.wait_mark("set");
  for (const char* key : {"boot 0", "boot 1"}) EXPECT_EQ(group.store()->try_get(key), id);
  group.post("end");
  group.join();
}

TEST(CoreSetTest, TextAndBack) {
  EXPECT_EQ(CoreSet().to_string(), "0");
  EXPECT_EQ(CoreSet().count(), 0);
  EXPECT_EQ(CoreSet().nth(0), -1);
  EXPECT_EQ(CoreSet::of_core(0).to_string(), "1");
  EXPECT_EQ(CoreSet::of_core(5).to_string(), "02");
  const CoreSet far = CoreSet::of_core(2000);
  EXPECT_EQ(CoreSet::parse(far.to_string()).nth(0), 2000);
  const CoreSet some = CoreSet::parse("a01");
  EXPECT_EQ(some.count(), 3);
  EXPECT_EQ(some.nth(0), 1);
  EXPECT_EQ(some.nth(1), 3);
  EXPECT_EQ(some.nth(2), 8);
  EXPECT_EQ(some.nth(9), 8);
  for (const char* bad : {"", "x", "0A", "1 ", "-1"}) {
    test::expect_error(ErrorKind::kInvalidArgument, "not a set of cores",
                       [&] { CoreSet::parse(bad); });
  }
  test::expect_error(ErrorKind::kInvalidArgument, "not a set of cores",
                     [] { CoreSet::parse(std::string(100000, '1')); });
}

TEST(CoreSetTest, Together) {
  CoreSet set = CoreSet::of_core(1);
  set.add(CoreSet::of_core(100));
  set.add(CoreSet::of_core(1));
  EXPECT_EQ(set.count(), 2);
  EXPECT_EQ(set.nth(1), 100);
  EXPECT_GE(usable_cores(CoreSet::of_thread()), 1);
}

}  // namespace
}  // namespace convoy
