#include "support/leak_oracle.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "base/concat.h"
#include "base/guarded.h"
#include "base/id.h"
#include "base/unique_fd.h"
#include "os/file.h"
#include "os/process.h"
#include "os/segment.h"
#include "os/socket.h"
#include "support/programs.h"

namespace convoy::test {
namespace {

// As Python's multiprocessing names a semaphore.
std::string foreign_path() {
  return concat("/dev/shm/sem.mp-", Id::random().to_string().substr(0, 8));
}

// Without our tag in its environment: a stranger.
void make_as_another_program(const std::string& path) {
  auto stranger = ChildProcess::spawn(
      {.arguments = {"touch", path}, .environment = std::vector<std::string>{"A=b"}});
  const auto status = stranger.wait(Deadline::after(std::chrono::seconds(10)));
  ASSERT_TRUE(status && status->success());
}

class LeakOracleTest : public testing::Test {
 protected:
  std::vector<Holding> before_ = take_holdings(LeakScope::kMachine);

  LeakDiff now() const { return difference(before_, take_holdings(LeakScope::kMachine)); }
  // The one thing that is there now and was not before.
  Holding gained() const {
    const auto diff = now();
    EXPECT_EQ(diff.gained.size(), 1u) << diff.to_string();
    EXPECT_TRUE(diff.lost.empty()) << diff.to_string();
    return diff.gained.empty() ? Holding{} : diff.gained.front();
  }
  LeakDiff settled() const {
    return settled_difference(before_, LeakScope::kMachine,
                              Deadline::after(std::chrono::seconds(10)));
  }
};

TEST_F(LeakOracleTest, NothingChanges) { EXPECT_TRUE(now().empty()) << now().to_string(); }

TEST_F(LeakOracleTest, Descriptor) {
  UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const auto leak = gained();
  EXPECT_EQ(leak.kind, HoldingKind::kDescriptor);
  EXPECT_EQ(leak.number, fd.get());
  EXPECT_EQ(leak.to_string(), concat("descriptor ", fd.get(), " /dev/null"));
  fd.reset();
  EXPECT_TRUE(now().empty());
}

TEST_F(LeakOracleTest, DescriptorThatBecameAnother) {
  UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const auto before = take_holdings(LeakScope::kProcess);
  const UniqueFd zero(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
  ASSERT_GE(::dup3(zero.get(), fd.get(), O_CLOEXEC), 0);
  const auto diff = difference(before, take_holdings(LeakScope::kProcess));
  ASSERT_EQ(diff.lost.size(), 1u);
  EXPECT_EQ(diff.lost[0].to_string(), concat("descriptor ", fd.get(), " /dev/null"));
  EXPECT_EQ(diff.gained.size(), 2u);
}

TEST_F(LeakOracleTest, DescriptorThatWasClosed) {
  UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const auto before = take_holdings(LeakScope::kProcess);
  fd.reset();
  const auto diff = difference(before, take_holdings(LeakScope::kProcess));
  ASSERT_EQ(diff.lost.size(), 1u);
  EXPECT_NE(diff.to_string().find("gone:        descriptor"), std::string::npos);
}

TEST_F(LeakOracleTest, ListeningSocketIsNamed) {
  const TempFolder folder("leak");
  const auto before = take_holdings(LeakScope::kProcess);
  const Listener listener(folder.path(), "door");
  const auto diff = difference(before, take_holdings(LeakScope::kProcess));
  ASSERT_EQ(diff.gained.size(), 1u);
  EXPECT_NE(diff.to_string().find("listening, bound to " + folder.path() + "/door"),
            std::string::npos)
      << diff.to_string();
}

TEST_F(LeakOracleTest, ListeningPortIsNamed) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(fd.get(), 1), 0);
  socklen_t size = sizeof address;
  ASSERT_EQ(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string text = gained().to_string();
  EXPECT_NE(text.find(concat("listening, bound to 127.0.0.1:", ntohs(address.sin_port))),
            std::string::npos)
      << text;
}

TEST_F(LeakOracleTest, MappingWithoutDescriptor) {
  auto segment = Segment::create(1, "leaked");
  const std::size_t size = segment.size();
  void* again = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, segment.fd(), 0);
  ASSERT_NE(again, MAP_FAILED);
  segment = Segment();
  const auto leak = gained();
  EXPECT_EQ(leak.kind, HoldingKind::kMapping);
  EXPECT_EQ(leak.number, static_cast<long>(size));
  EXPECT_NE(leak.key.find("convoy:leaked"), std::string::npos) << leak.key;
  ::munmap(again, size);
  EXPECT_TRUE(now().empty());
}

TEST_F(LeakOracleTest, Thread) {
  Guarded<bool> go(false);
  std::thread thread([&] {
    auto lock = go.lock();
    lock.wait(Deadline::after(std::chrono::seconds(30)), [&] { return *lock; });
  });
  const auto leak = gained();
  EXPECT_EQ(leak.kind, HoldingKind::kThread);
  *go.lock() = true;
  go.notify();
  thread.join();
  EXPECT_TRUE(settled().empty());
}

TEST_F(LeakOracleTest, ChildRunningAndZombie) {
  auto child = ChildProcess::spawn({.arguments = {"sleep", "1000"}});
  {
    const auto diff = now();  // the pidfd too
    ASSERT_EQ(diff.gained.size(), 2u) << diff.to_string();
    EXPECT_EQ(diff.gained[1].kind, HoldingKind::kChild);
    EXPECT_EQ(diff.gained[1].number, child.pid());
  }
  child.kill(SIGKILL);
  ASSERT_TRUE(wait_ready(child.pidfd(), 1, Deadline::after(std::chrono::seconds(10))));
  EXPECT_NE(now().to_string().find("state Z"), std::string::npos) << now().to_string();
  child = ChildProcess();
  EXPECT_TRUE(settled().empty());
}

TEST_F(LeakOracleTest, EndProcessesEndsThem) {
  auto child = ChildProcess::spawn({.arguments = {"sleep", "1000"}});
  const pid_t pid = child.pid();
  end_processes(now());
  EXPECT_EQ(process_state(pid), std::nullopt);
}

TEST_F(LeakOracleTest, StrayGrandchild) {
  // The shell ends at once and leaves its child to somebody else.
  auto shell = ChildProcess::spawn({.arguments = {"sh", "-c", "sleep 1000 & exit 0"}});
  ASSERT_TRUE(shell.wait(Deadline::after(std::chrono::seconds(10))));
  shell = ChildProcess();
  const auto leak = gained();
  EXPECT_EQ(leak.kind, HoldingKind::kStray);
  end_processes(now());
  EXPECT_TRUE(settled().empty());
}

TEST_F(LeakOracleTest, SharedMemoryFile) {
  const std::string path = shared_file_path("file");
  write_file(path, "x");
  const auto leak = gained();
  EXPECT_EQ(leak.kind, HoldingKind::kSharedFile);
  EXPECT_EQ(leak.key, path);
  // It stays a leak when things have settled.
  const auto late =
      settled_difference(before_, LeakScope::kMachine, Deadline::after(std::chrono::seconds(0)));
  EXPECT_EQ(late.gained.size(), 1u);
  ::unlink(path.c_str());
  EXPECT_TRUE(now().empty());
}

TEST_F(LeakOracleTest, SharedMemoryFileOfAnEndedChild) {
  const std::string path = shared_file_path("child");
  auto child = ChildProcess::spawn({.arguments = {"touch", path}});
  ASSERT_TRUE(child.wait(Deadline::after(std::chrono::seconds(10))));
  child = ChildProcess();
  const auto leak = gained();
  EXPECT_EQ(leak.key, path);
  ::unlink(path.c_str());
}

// Whatever the file is called, whoever has it open or mapped holds it.
TEST_F(LeakOracleTest, OpenSharedMemoryFileWithAnotherName) {
  const std::string path = foreign_path();
  UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  const auto leak = gained();
  EXPECT_EQ(leak.to_string(), concat("descriptor ", file.get(), " ", path));
  ASSERT_EQ(::ftruncate(file.get(), 4096), 0);
  void* const mapped = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, file.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  file.reset();
  ::unlink(path.c_str());
  const auto mapping = gained();
  EXPECT_EQ(mapping.kind, HoldingKind::kMapping);
  EXPECT_NE(mapping.key.find(path), std::string::npos) << mapping.key;
  ::munmap(mapped, 4096);
  EXPECT_TRUE(now().empty());
}

// Python's semaphores, which nobody has open after they are made and before they are used.
TEST_F(LeakOracleTest, SharedMemoryFileOfAnotherProgram) {
  const std::string path = foreign_path();
  make_as_another_program(path);
  EXPECT_TRUE(now().empty()) << now().to_string();
  ::unlink(path.c_str());
}

TEST_F(LeakOracleTest, TemporaryFile) {
  {
    const TempFolder folder("leak");
    const auto leak = gained();
    EXPECT_EQ(leak.kind, HoldingKind::kTempFile);
    EXPECT_EQ(leak.key, folder.path());
  }
  EXPECT_TRUE(now().empty());
}

TEST_F(LeakOracleTest, ProcessScopeLeavesOutWhatOthersMayMake) {
  const auto before = take_holdings(LeakScope::kProcess);
  const std::string path = shared_file_path("scope");
  write_file(path, "x");
  EXPECT_TRUE(difference(before, take_holdings(LeakScope::kProcess)).empty());
  ::unlink(path.c_str());
}

TEST_F(LeakOracleTest, IgnoredHoldingIsLeftOut) {
  static int exempt = -1;
  LeakOracle::ignore([](const Holding& holding) {
    return holding.kind == HoldingKind::kDescriptor && holding.number == exempt;
  });
  const UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_FALSE(now().empty());
  exempt = fd.get();
  EXPECT_TRUE(now().empty());
  exempt = -1;
}

// The listener itself: a test program whose test leaks must fail.
struct Run {
  ExitStatus status;
  std::string output;
};

Run run_test(const std::string& filter, const std::vector<std::string>& more = {}) {
  const TempFolder folder("run");
  const std::string file = folder.path() + "/output";
  const UniqueFd out(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  std::vector<std::string> environment = {"CONVOY_TEST_SETTLE_MS=50"};
  environment.insert(environment.end(), more.begin(), more.end());
  for (char** entry = environ; *entry; ++entry) environment.emplace_back(*entry);
  auto child = ChildProcess::spawn(
      {.arguments = {sibling_program("misbehaving_tests"), "--gtest_filter=" + filter},
       .environment = environment,
       .standard_output = out.get(),
       .standard_error = out.get(),
       .death_signal = SIGKILL});
  const auto status = child.wait(Deadline::after(std::chrono::seconds(60)));
  return {status.value_or(ExitStatus{.code = -1}), read_file(file).value_or("")};
}

TEST(LeakListenerTest, TestThatLeaksDescriptorFails) {
  const auto run = run_test("Leaking.Descriptor");
  EXPECT_EQ(run.status.code, 1) << run.output;
  EXPECT_NE(run.output.find("Leaking.Descriptor did not leave things"), std::string::npos)
      << run.output;
  EXPECT_NE(run.output.find("left behind: descriptor"), std::string::npos) << run.output;
  EXPECT_EQ(run.output.find("test suite Leaking did"), std::string::npos)
      << "reported twice: " << run.output;
}

TEST(LeakListenerTest, TestThatLeaksChildFailsAndChildIsEnded) {
  const auto run = run_test("Leaking.Child");
  EXPECT_EQ(run.status.code, 1) << run.output;
  EXPECT_NE(run.output.find("left behind: child process"), std::string::npos) << run.output;
}

TEST(LeakListenerTest, TestThatLeaksSharedMemoryFileFails) {
  const auto run = run_test("Leaking.SharedMemoryFile");
  EXPECT_EQ(run.status.code, 1) << run.output;
  const std::string begin = "left behind: shared memory file ";
  const auto at = run.output.find(begin);
  ASSERT_NE(at, std::string::npos) << run.output;
  const auto path = at + begin.size();
  const std::string file = run.output.substr(path, run.output.find('\n', path) - path);
  EXPECT_EQ(::unlink(file.c_str()), 0) << file;
}

// What Convoy itself puts into /dev/shm by default, in tests goes where only this program looks.
TEST(LeakListenerTest, TestThatLeaksInTheFolderOfNamesFails) {
  const auto run = run_test("Leaking.NameInTheSharedFolder");
  EXPECT_EQ(run.status.code, 1) << run.output;
  EXPECT_NE(run.output.find("left behind: temporary file"), std::string::npos) << run.output;
}

TEST(LeakListenerTest, OtherProgramsMayUseSharedMemory) {
  const std::string path = foreign_path();
  const auto run = run_test("Beside.AnotherProgram", {"CONVOY_TEST_FOREIGN_FILE=" + path});
  EXPECT_TRUE(run.status.success()) << run.output;
  EXPECT_EQ(::unlink(path.c_str()), 0) << "it was not there: the test has not seen it";
}

TEST(LeakListenerTest, CleanTestPasses) {
  const auto run = run_test("Leaking.Nothing");
  EXPECT_TRUE(run.status.success()) << run.output;
}

TEST(LeakListenerTest, SuiteThatLeaksFails) {
  const auto run = run_test("LeakingSuite.Descriptor");
  EXPECT_EQ(run.status.code, 1) << run.output;
  EXPECT_NE(run.output.find("test suite LeakingSuite did not leave"), std::string::npos)
      << run.output;
}

}  // namespace
}  // namespace convoy::test
