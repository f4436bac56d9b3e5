#include "launch/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <set>
#include <stdexcept>

#include "launch/doctor_probes.h"
#include "launch/json.h"
#include "launch/launched.h"
#include "os/file.h"

namespace convoy::launch {
namespace {

using testing::HasSubstr;

void expect_ok(const Finding& finding) {
  EXPECT_EQ(finding.level, Level::kOk) << finding.text;
  EXPECT_NE(finding.text, "");
  EXPECT_EQ(finding.fix, "");
}
void expect_level(const Finding& finding, Level level, const char* text, const char* fix) {
  EXPECT_EQ(finding.level, level) << finding.text;
  EXPECT_THAT(finding.text, HasSubstr(text));
  EXPECT_THAT(finding.fix, HasSubstr(fix));
}
void expect_warn(const Finding& finding, const char* text, const char* fix) {
  expect_level(finding, Level::kWarn, text, fix);
}
void expect_fail(const Finding& finding, const char* text, const char* fix) {
  expect_level(finding, Level::kFail, text, fix);
}

constexpr std::uint64_t kMiB = 1024 * 1024;

TEST(Doctor, Pidfd) {
  expect_ok(check_pidfd(0));
  expect_fail(check_pidfd(ENOSYS), "pidfd_open", "Linux 5.3");
  expect_fail(check_pidfd(EPERM), "pidfd_open", "seccomp");
}

TEST(Doctor, Memfd) {
  expect_ok(check_memfd(0));
  expect_fail(check_memfd(ENOSYS), "share memory", "Linux 3.17");
}

TEST(Doctor, NoexecSeal) {
  expect_ok(check_noexec_seal(0));
  expect_warn(check_noexec_seal(EINVAL), "works without", "Linux 6.3");
}

TEST(Doctor, Futex) {
  expect_ok(check_futex(0));
  expect_fail(check_futex(EPERM), "could not wait", "seccomp");
}

TEST(Doctor, Subreaper) {
  expect_ok(check_subreaper(0));
  expect_fail(check_subreaper(EINVAL), "escape", "Linux 3.4");
}

TEST(Doctor, Proc) {
  expect_ok(check_proc(true));
  expect_fail(check_proc(false), "does not show", "mount");
}

TEST(Doctor, PeerMemory) {
  expect_ok(check_peer_memory({.error = 0, .ptrace_scope = {}}));
  expect_warn(check_peer_memory({.error = EPERM, .ptrace_scope = 1}), "process_vm_readv",
              "ptrace_scope=0 (it is 1)");
  expect_warn(check_peer_memory({.error = EPERM, .ptrace_scope = {}}), "process_vm_readv",
              "SYS_PTRACE");
}

TEST(Doctor, Cores) {
  expect_ok(check_cores({.online = 8, .usable = 8}));
  expect_ok(check_cores({.online = 8, .usable = 2}));
  EXPECT_THAT(check_cores({.online = 8, .usable = 2}).text, HasSubstr("quota"));
  expect_warn(check_cores({.online = 8, .usable = 1}), "take turns", "--cpus");
}

TEST(Doctor, Memory) {
  expect_ok(check_memory({.available = 8192 * kMiB, .limit = {}, .used = {}}));
  expect_warn(check_memory({.available = 500 * kMiB, .limit = {}, .used = {}}), "500 MiB",
              "larger machine");
  expect_warn(check_memory({.available = 8192 * kMiB, .limit = 600 * kMiB, .used = 100 * kMiB}),
              "cgroup limit 600 MiB", "memory limit");
  // "No limit" of cgroups of version 1.
  const auto unlimited =
      check_memory({.available = 8192 * kMiB, .limit = 9223372036854771712u, .used = 100 * kMiB});
  expect_ok(unlimited);
  EXPECT_EQ(unlimited.text, "8 GiB can still be allocated");
  expect_fail(check_memory({.available = 10 * kMiB, .limit = {}, .used = {}}), "too little", "");
}

TEST(Doctor, CoreDistance) {
  using std::chrono::nanoseconds;
  expect_ok(check_core_distance({nanoseconds(80)}, 2));
  expect_ok(check_core_distance({nanoseconds(400)}, 2));
  expect_ok(check_core_distance({nanoseconds(5000)}, 1));
  expect_warn(check_core_distance({nanoseconds(5000)}, 2), "5000 ns", "--pin");
}

TEST(Doctor, HugePages) {
  expect_ok(check_huge_pages("always [madvise] never\n"));
  expect_ok(check_huge_pages("[always] madvise never\n"));
  expect_warn(check_huge_pages("always madvise [never]\n"), "are off", "echo madvise");
  expect_warn(check_huge_pages({}), "no transparent huge pages", "kernel");
}

TEST(Doctor, OpenFiles) {
  expect_ok(check_open_files(1024, 4096));
  expect_ok(check_open_files({}, {}));
  expect_warn(check_open_files(256, 4096), "256", "ulimit -n");
  expect_fail(check_open_files(64, 64), "too few", "ulimit -Hn");
}

TEST(Doctor, LockedMemory) {
  expect_ok(check_locked_memory(8 * kMiB));
  expect_ok(check_locked_memory({}));
  expect_warn(check_locked_memory(16 * 1024), "16 KiB", "ulimit -l");
}

TEST(Doctor, FileSize) {
  expect_ok(check_file_size({}));
  expect_fail(check_file_size(kMiB), "1 MiB", "ulimit -f");
}

TEST(Doctor, AddressSpace) {
  expect_ok(check_address_space({}));
  expect_warn(check_address_space(4096 * kMiB), "4 GiB", "ulimit -v");
}

TEST(Doctor, Shm) {
  expect_ok(check_shm(8192 * kMiB));
  EXPECT_THAT(check_shm(8192 * kMiB).text, HasSubstr("convoy does not use it"));
  expect_warn(check_shm(64 * kMiB), "64 MiB", "--shm-size");
  expect_warn(check_shm({}), "no /dev/shm", "--shm-size");
}

TEST(Doctor, TempFolder) {
  expect_ok(check_temp({.folder = "/tmp", .error = 0}));
  expect_fail(check_temp({.folder = "/ro", .error = EROFS}), "/ro", "TMPDIR");
  expect_fail(check_temp({.folder = "/" + std::string(90, 'x'), .error = 0}), "Unix socket",
              "shorter");
}

TEST(Doctor, UnixSocket) {
  expect_ok(check_unix_socket({.error = 0, .ours = 5, .peer = 5}));
  expect_fail(check_unix_socket({.error = EACCES, .ours = 5, .peer = 5}), "could not meet",
              "AF_UNIX");
  expect_fail(check_unix_socket({.error = 0, .ours = 5, .peer = 65534}), "65534", "namespace");
}

TEST(Doctor, Loopback) {
  expect_ok(check_loopback(0));
  expect_warn(check_loopback(EADDRNOTAVAIL), "127.0.0.1", "lo up");
}

TEST(Doctor, Ports) {
  expect_ok(check_ports({}));
  expect_fail(check_ports({29500, 80}), "29500, 80", "bug");
}

TEST(Doctor, EnvironmentOfLaunchers) {
  expect_ok(check_environment({}));
  expect_ok(check_environment({{"RANK", "0"}, {"WORLD_SIZE", "2"}}));
  expect_ok(check_environment({{"SLURM_PROCID", "0"}}));
  expect_fail(check_environment({{"RANK", "0"}}), "WORLD_SIZE is not", "unset");
  expect_fail(check_environment({{"WORLD_SIZE", "2"}}), "RANK is not", "unset");
  expect_fail(check_environment({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), "do not go together", "");
  expect_fail(check_environment({{"RANK", "x"}, {"WORLD_SIZE", "2"}}), "do not go together", "");
  expect_warn(
      check_environment({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}}),
      "Open MPI", "unset");
}

TEST(Doctor, ProbesSeeTheLimitsOfThisProcess) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(probe_limit(RLIMIT_NOFILE), limit.rlim_cur);
  EXPECT_TRUE(probe_proc());
  EXPECT_GE(probe_cores().online, 1);
}

TEST(Doctor, ACheckThatThrowsFails) {
  expect_fail(guarded("it", []() -> Finding { throw std::runtime_error("no threads"); }),
              "no threads", "message");
}

TEST(Doctor, FormatsFindings) {
  const std::vector<Finding> findings = {{Level::kOk, "first", "fine", ""},
                                         {Level::kFail, "second", "a \"bad\" thing", "do this"}};
  EXPECT_THAT(format_findings(findings), HasSubstr("ok    first          fine\n"
                                                   "FAIL  second         a \"bad\" thing\n"
                                                   "                     fix: do this\n"
                                                   "1 ok, 0 to look at, 1 failed\n"));
}

TEST(Doctor, ExaminesThisMachine) {
  const auto result = run_convoy({"doctor", "--json"});
  const auto json = Json::parse(result.out);
  ASSERT_TRUE(json) << result.out;
  std::set<std::string> names;
  double failed = 0;
  for (const auto& check : std::get<Json::Array>(json->member("checks")->value)) {
    names.insert(*check.member("name")->text());
    if (*check.member("level")->text() == "FAIL") ++failed;
  }
  EXPECT_EQ(names.size(), 21U);
  EXPECT_EQ(std::get<double>(json->member("failed")->value), failed);
  EXPECT_EQ(result.code, failed > 0 ? 1 : 0);
}

TEST(Doctor, FailsWhereTheTemporaryFolderIsMissing) {
  Launched doctor({.arguments = {"doctor"}, .environment = {{"TMPDIR", "/no/such/folder"}}});
  EXPECT_EQ(doctor.finish().shell_code(), 1);
  EXPECT_THAT(doctor.out(), HasSubstr("FAIL  temp-folder    /no/such/folder: No such file"));
}

}  // namespace
}  // namespace convoy::launch
