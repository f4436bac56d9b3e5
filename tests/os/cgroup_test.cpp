#include <gtest/gtest.h>

#include <filesystem>

#include "os/file.h"
#include "os/machine.h"

namespace convoy {
namespace {

// A machine made of files.
class FakeSystem {
 public:
  FakeSystem() { file("/proc/meminfo", "MemTotal: 100 kB\nMemAvailable:    2000 kB\n"); }

  FakeSystem& file(const std::string& path, const std::string& text) {
    const std::string full = folder_.path() + path;
    std::filesystem::create_directories(std::filesystem::path(full).parent_path());
    write_file(full, text);
    return *this;
  }
  SystemRoot root() const {
    return {.proc = folder_.path() + "/proc", .cgroup = folder_.path() + "/cgroup"};
  }

 private:
  TempFolder folder_{"system"};
};

constexpr std::uint64_t kKiB = 1024;

TEST(CgroupTest, NoCgroupsAtAll) {
  const FakeSystem system;
  EXPECT_EQ(cgroup_cores(system.root()), std::nullopt);
  const auto state = memory_state(system.root());
  EXPECT_EQ(state.available, 2000 * kKiB);
  EXPECT_EQ(state.limit, std::nullopt);
  EXPECT_EQ(state.headroom(), 2000 * kKiB);
}

TEST(CgroupTest, NothingIsKnown) {
  const SystemRoot nowhere{.proc = "/nowhere", .cgroup = "/nowhere"};
  EXPECT_EQ(cgroup_cores(nowhere), std::nullopt);
  EXPECT_EQ(memory_state(nowhere).headroom(), UINT64_MAX);  // an unknown limit refuses nothing
}

TEST(CgroupTest, Version2TightestFolderCounts) {
  FakeSystem system;
  system.file("/proc/self/cgroup", "0::/user/job\n")
      .file("/cgroup/user/job/memory.max", "1000000\n")
      .file("/cgroup/user/job/memory.current", "400000\n")
      .file("/cgroup/user/job/memory.stat", "anon 1\ninactive_file 100000\nfile 2\n")
      .file("/cgroup/user/memory.max", "5000000\n")
      .file("/cgroup/user/memory.current", "4900000\n")
      .file("/cgroup/user/job/cpu.max", "max 100000\n")
      .file("/cgroup/user/cpu.max", "250000 100000\n");
  const auto state = memory_state(system.root());
  EXPECT_EQ(state.limit, 5000000u);  // has 100000 left, the job's own 700000
  EXPECT_EQ(state.used, 4900000u);
  EXPECT_EQ(state.headroom(), 100000u);
  EXPECT_EQ(cgroup_cores(system.root()), 3);
}

TEST(CgroupTest, Version2CacheCountsAsFree) {
  FakeSystem system;
  system.file("/proc/self/cgroup", "0::/job\n")
      .file("/cgroup/job/memory.max", "1000000\n")
      .file("/cgroup/job/memory.current", "900000\n")
      .file("/cgroup/job/memory.stat", "inactive_file 800000\n");
  EXPECT_EQ(memory_state(system.root()).headroom(), 900000u);
}

TEST(CgroupTest, Version2WithoutLimits) {
  FakeSystem system;
  system.file("/proc/self/cgroup", "0::/job\n")
      .file("/cgroup/job/memory.max", "max\n")
      .file("/cgroup/job/memory.current", "900000\n")
      .file("/cgroup/job/cpu.max", "max 100000\n");
  EXPECT_EQ(memory_state(system.root()).limit, std::nullopt);
  EXPECT_EQ(cgroup_cores(system.root()), std::nullopt);
}

TEST(CgroupTest, Version2ContainerShowsItsGroupAsTheMount) {
  FakeSystem system;  // its own name space, or a path of the host that is not there
  for (const char* line : {"0::/\n", "0::/docker/0123\n", "0::/../outside\n"}) {
    system.file("/proc/self/cgroup", line)
        .file("/cgroup/memory.max", "1000000\n")
        .file("/cgroup/memory.current", "0\n")
        .file("/cgroup/cpu.max", "50000 100000\n");
    EXPECT_EQ(memory_state(system.root()).limit, 1000000u) << line;
    EXPECT_EQ(cgroup_cores(system.root()), 1) << line;
  }
}

TEST(CgroupTest, UsedAboveTheLimitLeavesNothing) {
  FakeSystem system;
  system.file("/proc/self/cgroup", "0::/job\n")
      .file("/cgroup/job/memory.max", "1000\n")
      .file("/cgroup/job/memory.current", "5000\n");
  EXPECT_EQ(memory_state(system.root()).headroom(), 0u);
}

TEST(CgroupTest, Version1) {
  FakeSystem system;
  system.file("/proc/self/cgroup", "9:memory:/job\n8:cpu,cpuacct:/job/inner\n1:name=systemd:/\n")
      .file("/cgroup/memory/job/memory.limit_in_bytes", "1000000\n")
      .file("/cgroup/memory/job/memory.usage_in_bytes", "600000\n")
      .file("/cgroup/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 100000\n")
      .file("/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
      .file("/cgroup/memory/memory.usage_in_bytes", "700000\n")
      .file("/cgroup/cpu/job/inner/cpu.cfs_quota_us", "-1\n")
      .file("/cgroup/cpu/job/inner/cpu.cfs_period_us", "100000\n")
      .file("/cgroup/cpu/job/cpu.cfs_quota_us", "150000\n")
      .file("/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  const auto state = memory_state(system.root());
  EXPECT_EQ(state.limit, 1000000u);
  EXPECT_EQ(state.used, 500000u);
  EXPECT_EQ(cgroup_cores(system.root()), 2);
}

TEST(CgroupTest, BothVersionsBesideEachOther) {
  FakeSystem system;
  system.file("/proc/self/cgroup", "4:memory:/old\n0::/new\n")
      .file("/cgroup/memory/old/memory.limit_in_bytes", "500000\n")
      .file("/cgroup/memory/old/memory.usage_in_bytes", "100000\n")
      .file("/cgroup/unified/new/memory.max", "300000\n")
      .file("/cgroup/unified/new/memory.current", "100000\n");
  EXPECT_EQ(memory_state(system.root()).headroom(), 200000u);
}

TEST(CgroupTest, HostHasLessThanTheCgroup) {
  FakeSystem system;
  system.file("/proc/self/cgroup", "0::/\n")
      .file("/cgroup/memory.max", "100000000000\n")
      .file("/cgroup/memory.current", "0\n");
  EXPECT_EQ(memory_state(system.root()).headroom(), 2000 * kKiB);
}

TEST(CgroupTest, GarbageIsNoLimit) {
  FakeSystem system;
  system.file("/proc/self/cgroup", "0::/job\n")
      .file("/cgroup/job/memory.max", "lots\n")
      .file("/cgroup/job/memory.current", "\n")
      .file("/cgroup/memory.max", "99999999999999999999999999\n")
      .file("/cgroup/memory.current", "1\n")
      .file("/cgroup/job/cpu.max", "1e9 0\n")
      .file("/cgroup/cpu.max", "");
  EXPECT_EQ(memory_state(system.root()).limit, std::nullopt);
  EXPECT_EQ(cgroup_cores(system.root()), std::nullopt);
}

TEST(ParseTest, CgroupPath) {
  const std::string text = "12:cpuset:/a\n5:cpu,cpuacct:/b:c\n0::/d\n";
  EXPECT_EQ(parse_cgroup_path(text, ""), "/d");
  EXPECT_EQ(parse_cgroup_path(text, "cpu"), "/b:c");
  EXPECT_EQ(parse_cgroup_path(text, "cpuacct"), "/b:c");
  EXPECT_EQ(parse_cgroup_path(text, "cpuset"), "/a");
  EXPECT_EQ(parse_cgroup_path(text, "memory"), std::nullopt);
  for (const char* bad : {"", "\n\n", "0", "0:", "cpu", ":", "1:cpu"}) {
    EXPECT_EQ(parse_cgroup_path(bad, "cpu"), std::nullopt) << bad;
    EXPECT_EQ(parse_cgroup_path(bad, ""), std::nullopt) << bad;
  }
}

TEST(ParseTest, Numbers) {
  EXPECT_EQ(parse_number("42\n"), 42u);
  EXPECT_EQ(parse_number("18446744073709551615"), UINT64_MAX);
  for (const char* bad : {"", "max", "-1", " 5", "18446744073709551616", "x"}) {
    EXPECT_EQ(parse_number(bad), std::nullopt) << bad;
  }
}

TEST(ParseTest, Fields) {
  const std::string text = "file_mapped 3\nfile 2\nMemAvailable:  7 kB\nempty\n";
  EXPECT_EQ(parse_field(text, "file"), 2u);  // and not file_mapped
  EXPECT_EQ(parse_field(text, "file_mapped"), 3u);
  EXPECT_EQ(parse_field(text, "MemAvailable"), 7u);
  EXPECT_EQ(parse_field(text, "empty"), std::nullopt);
  EXPECT_EQ(parse_field(text, "missing"), std::nullopt);
}

TEST(ParseTest, CpuMax) {
  EXPECT_EQ(parse_cpu_max("100000 100000\n"), 1);
  EXPECT_EQ(parse_cpu_max("100001 100000\n"), 2);
  EXPECT_EQ(parse_cpu_max("1 100000"), 1);
  EXPECT_EQ(parse_cpu_max("0 100000"), 1);
  EXPECT_EQ(parse_cpu_max("18446744073709551615 1"), 1 << 20);
  for (const char* bad : {"max 100000", "", "100000", "100000 0", "100000 x", "-1 100000"}) {
    EXPECT_EQ(parse_cpu_max(bad), std::nullopt) << bad;
  }
}

}  // namespace
}  // namespace convoy
