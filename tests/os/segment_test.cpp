#include "os/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <sstream>
#include <vector>

#include "os/file.h"
#include "os/machine.h"
#include "os/segment_copy.h"
#include "os/socket.h"
#include "support/expect_error.h"
#include "support/leak_oracle.h"
#include "support/rank_group.h"

namespace convoy {
namespace {

using test::expect_error;
using test::Rank;
using test::RankGroup;
using test::RankMode;
using test::shared_file_path;

constexpr std::size_t kMiB = std::size_t{1} << 20;

// Bytes that /proc/self/smaps tells of the mapping under this name.
std::size_t mapped_bytes(const void* address, const std::string& name) {
  std::ostringstream begin;
  begin << std::hex << reinterpret_cast<std::uintptr_t>(address) << "-";
  std::istringstream lines(read_file("/proc/self/smaps").value_or(""));
  bool here = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(begin.str())) here = true;
    if (here && line.starts_with(name + ":")) return parse_field(line, name).value_or(0) * 1024;
  }
  return 0;
}
// In this process's page tables.
std::size_t resident_bytes(const void* address) { return mapped_bytes(address, "Rss"); }

TEST(SegmentTest, IsZeroedWritableAndRoundedUp) {
  const auto segment = Segment::create(1, "test");
  ASSERT_TRUE(segment);
  EXPECT_EQ(segment.size(), page_size());
  EXPECT_EQ(segment.bytes().size(), segment.size());
  EXPECT_TRUE(std::all_of(segment.bytes().begin(), segment.bytes().end(),
                          [](std::byte b) { return b == std::byte{}; }));
  std::memset(segment.data(), 7, segment.size());
  EXPECT_EQ(segment.bytes().back(), std::byte{7});
  EXPECT_EQ(Segment::create(page_size(), "test").size(), page_size());
  EXPECT_EQ(Segment::create(page_size() + 1, "test").size(), 2 * page_size());
}

TEST(SegmentTest, PagesAreAllocatedUpFront) {
  const auto segment = Segment::create(kMiB, "test");
  struct stat info {};
  ASSERT_EQ(::fstat(segment.fd(), &info), 0);
  EXPECT_GE(static_cast<std::size_t>(info.st_blocks) * 512, segment.size());
}

TEST(SegmentTest, WarmFillsThePageTables) {
  const auto cold = Segment::create(kMiB, "cold");
  const auto warm = Segment::create(kMiB, "warm", Segment::Warm::kYes);
  EXPECT_LT(resident_bytes(cold.data()), kMiB);
  EXPECT_EQ(resident_bytes(warm.data()), kMiB);
}

TEST(SegmentTest, LargeOnesGetHugePages) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE
  const auto small = Segment::create(4 * kMiB, "small");
  if (::madvise(small.data(), small.size(), kCollapse) != 0) {
    GTEST_SKIP() << "this kernel does not move shared memory to huge pages";
  }
  // One that finds no huge page left, because others take them, is as it was: not all need to.
  std::size_t own = 0, adopted = 0;
  for (int tries = 0; tries < 8 && own + adopted < 8 * kMiB; ++tries) {
    const auto huge = Segment::create(5 * kMiB, "huge", Segment::Warm::kYes);
    const auto again = Segment::adopt(UniqueFd(::dup(huge.fd())), huge.size(), Segment::Warm::kYes);
    own = mapped_bytes(huge.data(), "ShmemPmdMapped");
    adopted = mapped_bytes(again.data(), "ShmemPmdMapped");
  }
  EXPECT_EQ(own, 4 * kMiB);
  EXPECT_EQ(adopted, 4 * kMiB);
}

TEST(SegmentTest, LargeOnesAreAlignedZeroedAndShared) {
  const auto huge = Segment::create(5 * kMiB, "huge", Segment::Warm::kYes);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(huge.data()) % (2 * kMiB), 0u);
  EXPECT_EQ(resident_bytes(huge.data()), huge.size());
  EXPECT_TRUE(std::all_of(huge.bytes().begin(), huge.bytes().end(),
                          [](std::byte b) { return b == std::byte{}; }));
  std::memset(huge.data(), 7, huge.size());
  const auto again = Segment::adopt(UniqueFd(::dup(huge.fd())), huge.size(), Segment::Warm::kYes);
  EXPECT_EQ(std::memcmp(again.data(), huge.data(), huge.size()), 0);
}

// What lies around the copy, at the edges of pages and of huge pages, is zero.
TEST(SegmentTest, BeginsWithACopy) {
  std::vector<std::byte> content(7 * kMiB + 13);
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<std::byte>(i * 7 + 1);
  for (const std::size_t at : {std::size_t{0}, page_size(), 2 * kMiB, 3 * kMiB - page_size()}) {
    for (const std::size_t length : {std::size_t{1}, page_size(), 4 * kMiB, content.size()}) {
      const auto part = std::span(content).first(length);
      const auto segment = create_segment_with(at + length + 5 * kMiB, "copy", at, part);
      const auto bytes = segment.bytes();
      ASSERT_GE(bytes.size(), at + length + 5 * kMiB);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), bytes.begin() + at)) << at << " " << length;
      const auto zero = [](std::byte b) { return b == std::byte{}; };
      EXPECT_TRUE(std::all_of(bytes.begin(), bytes.begin() + at, zero));
      EXPECT_TRUE(std::all_of(bytes.begin() + at + length, bytes.end(), zero));
      struct stat info {};
      ASSERT_EQ(::fstat(segment.fd(), &info), 0);
      EXPECT_GE(static_cast<std::size_t>(info.st_blocks) * 512, segment.size());  // all is there
      EXPECT_EQ(Segment::adopt(UniqueFd(::dup(segment.fd())), segment.size()).key(), segment.key());
    }
  }
  // As create(): an error, and not a process that is killed.
  expect_error(ErrorKind::kResource, "are available", [&] {
    create_segment_with(std::size_t{1} << 50, "copy", 0, std::span(content).first(1));
  });
}

TEST(SegmentTest, LabelIsShownAndMayBeLong) {
  const auto segment = Segment::create(1, "bucket 3");
  EXPECT_NE(read_file("/proc/self/maps").value_or("").find("/memfd:convoy:bucket 3"),
            std::string::npos);
  EXPECT_NO_THROW(Segment::create(1, std::string(1000, 'x')));
}

TEST(SegmentTest, DescriptorIsCloseOnExec) {
  const auto segment = Segment::create(1, "test");
  EXPECT_TRUE(::fcntl(segment.fd(), F_GETFD) & FD_CLOEXEC);
}

TEST(SegmentTest, EmptyOneIsFalseAndSizeZeroIsRefused) {
  EXPECT_FALSE(Segment());
  expect_error(ErrorKind::kInvalidArgument, "at least one byte",
               [] { Segment::create(0, "test"); });
}

TEST(SegmentTest, MovePassesTheMapping) {
  auto a = Segment::create(1, "a");
  std::byte* const data = a.data();
  Segment b(std::move(a));
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): what a move leaves is the point
  EXPECT_EQ(a.size(), 0u);
  EXPECT_EQ(b.data(), data);
  auto c = Segment::create(1, "c");
  c = std::move(b);
  EXPECT_EQ(c.data(), data);
  c.data()[0] = std::byte{1};  // still mapped
  auto& same = c;
  c = std::move(same);
  EXPECT_EQ(c.data(), data);
}

TEST(SegmentTest, AbsurdSizesAreAnErrorAndHarmNobody) {
  for (const std::size_t size : {std::size_t{1} << 50, SIZE_MAX, SIZE_MAX / 2,
                                 static_cast<std::size_t>(memory_state().available) * 4}) {
    expect_error(ErrorKind::kResource, "bytes of memory are available",
                 [&] { Segment::create(size, "absurd"); });
  }
}

TEST(SegmentTest, FileSizeLimitIsAnErrorAndNoSignal) {
  test::run_in_process([] {
    const rlimit limit{.rlim_cur = kMiB, .rlim_max = kMiB};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    EXPECT_NO_THROW(Segment::create(kMiB, "fits"));
    expect_error(ErrorKind::kResource, "ulimit -f", [] { Segment::create(kMiB + 1, "large"); });
  });
}

TEST(SegmentTest, AddressSpaceLimitIsAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return;  // the sanitizers' own mappings cannot live with the limit
#else
  test::run_in_process([] {
    const rlimit limit{.rlim_cur = 128 * kMiB, .rlim_max = 128 * kMiB};
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
    expect_error(ErrorKind::kResource, "mapping", [] { Segment::create(150 * kMiB, "large"); });
  });
#endif
}

TEST(SegmentTest, DescriptorLimitIsAnError) {
  test::run_in_process([] {
    rlimit limit{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
    const rlimit none{.rlim_cur = 3, .rlim_max = limit.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
    expect_error(ErrorKind::kResource, "making shared memory", [] { Segment::create(1, "test"); });
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  });
}

TEST(SegmentTest, TimerSignalsDoNotKeepALargeOneFromBeingMade) {
  test::run_in_process([] {
    struct sigaction action {};
    action.sa_handler = [](int) {};
    ASSERT_EQ(::sigaction(SIGALRM, &action, nullptr), 0);
    // Shorter than the allocation takes: each signal undoes the fallocate that it interrupts.
    const itimerval often{.it_interval = {.tv_sec = 0, .tv_usec = 2000},
                          .it_value = {.tv_sec = 0, .tv_usec = 2000}};
    ASSERT_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
    EXPECT_EQ(Segment::create(64 * kMiB, "large").size(), 64 * kMiB);
    const itimerval off{};
    ::setitimer(ITIMER_REAL, &off, nullptr);
  });
}

TEST(SegmentTest, NobodyCanResizeOrUnseal) {
  const auto segment = Segment::create(2 * page_size(), "sealed");
  const UniqueFd peer = duplicate(segment.fd());
  for (const std::size_t size : {std::size_t{0}, page_size(), 3 * page_size()}) {
    EXPECT_EQ(::ftruncate(peer.get(), static_cast<off_t>(size)), -1);
    EXPECT_EQ(errno, EPERM);
  }
  EXPECT_EQ(::fallocate(peer.get(), 0, 0, static_cast<off_t>(3 * page_size())), -1);
  EXPECT_EQ(::fcntl(peer.get(), F_ADD_SEALS, F_SEAL_WRITE), -1);
  segment.bytes().back() = std::byte{1};
}

TEST(SegmentTest, KeysNameTheMemory) {
  const auto a = Segment::create(1, "same");
  const auto b = Segment::create(1, "same");
  const auto again = Segment::adopt(duplicate(a.fd()), a.size());
  EXPECT_EQ(a.key(), again.key());
  EXPECT_EQ(a.key(), Segment::key_of(a.fd()));
  EXPECT_NE(a.key(), b.key());
  EXPECT_NE(a.data(), again.data());
  expect_error(ErrorKind::kInternal, "identity", [] { Segment::key_of(-1); });
}

TEST(SegmentAdoptTest, SharesTheBytes) {
  const auto mine = Segment::create(100, "test");
  const auto theirs = Segment::adopt(duplicate(mine.fd()), mine.size(), Segment::Warm::kYes);
  mine.data()[99] = std::byte{42};
  EXPECT_EQ(theirs.data()[99], std::byte{42});
}

UniqueFd memfd_with(int seals, std::size_t size = 4096) {
  UniqueFd fd(::memfd_create("foreign", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(size)), 0);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(SegmentAdoptTest, RefusesWhatCanBeResized) {
  for (const int seals : {0, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL}) {
    expect_error(ErrorKind::kInvalidArgument, "not shared memory sealed against resizing",
                 [&] { Segment::adopt(memfd_with(seals), 4096); });
  }
}

TEST(SegmentAdoptTest, RefusesWhatIsNoMemory) {
  const TempFolder folder("segment");
  write_file(folder.path() + "/file", std::string(4096, 'x'));
  const std::string shm = shared_file_path("segment");
  write_file(shm, std::string(4096, 'x'));
  for (const std::string& path :
       {folder.path() + "/file", shm, std::string("/dev/zero"), folder.path()}) {
    expect_error(ErrorKind::kInvalidArgument, "refused", [&] {
      Segment::adopt(UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)), 4096);
    });
  }
  ::unlink(shm.c_str());
  expect_error(ErrorKind::kInvalidArgument, "refused", [] { Segment::adopt(UniqueFd(), 4096); });
}

TEST(SegmentAdoptTest, RefusesAnotherSize) {
  const auto segment = Segment::create(4096, "test");
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, segment.size() - 1,
                                 segment.size() + 1, 2 * segment.size(), SIZE_MAX}) {
    expect_error(ErrorKind::kInvalidArgument, "were announced: refused",
                 [&] { Segment::adopt(duplicate(segment.fd()), size); });
  }
}

TEST(SegmentAdoptTest, RefusesWhatCannotBeWritten) {
  for (const int seal : {F_SEAL_WRITE, F_SEAL_FUTURE_WRITE}) {
    expect_error(ErrorKind::kInvalidArgument, "against writing",
                 [&] { Segment::adopt(memfd_with(F_SEAL_SHRINK | F_SEAL_GROW | seal), 4096); });
  }
}

TEST(SegmentProcessTest, OutlivesItsMakerAndHasOneKey) {
  const TempFolder folder("segment");
  const std::string& path = folder.path();
  RankGroup group(2, RankMode::kProcesses);
  group.start([&](Rank& r) {
    constexpr std::size_t kSize = 3 * kMiB;
    if (r.id() == 0) {
      const auto segment = Segment::create(kSize, "shared");
      const Listener listener(path + "/sockets", "door");
      r.store()->set("door", listener.path());
      Socket socket = listener.accept(r.deadline());
      std::memset(segment.data(), 0x5a, segment.size());
      const auto key = segment.key();
      const int fd = segment.fd();
      socket.send(std::as_bytes(std::span(&key, 1)), r.deadline(), {&fd, 1});
      r.mark("sent");
      return;
    }
    Socket socket = Socket::connect(r.store()->get("door", r.deadline()), r.deadline());
    Segment::Key key{};
    std::vector<UniqueFd> fds;
    socket.receive(std::as_writable_bytes(std::span(&key, 1)), r.deadline(), &fds);
    ASSERT_EQ(fds.size(), 1u);
    const auto segment = Segment::adopt(std::move(fds[0]), kSize);
    r.wait_for("maker is gone");
    EXPECT_EQ(segment.key(), key);
    EXPECT_TRUE(std::all_of(segment.bytes().begin(), segment.bytes().end(),
                            [](std::byte b) { return b == std::byte{0x5a}; }));
  });
  group.wait_mark("sent", 0);
  group.kill(0, SIGKILL);
  group.post("maker is gone", 1);
  group.join();
}

}  // namespace
}  // namespace convoy
