#include "launch/writer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>

#include "base/unique_fd.h"

namespace convoy::launch {
namespace {

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) std::abort();
    read_end.reset(ends[0]);
    write_end.reset(ends[1]);
  }
  std::string read_all() {
    write_end.reset();
    std::string text;
    std::array<char, 65536> buffer;
    for (ssize_t n = 0; (n = ::read(read_end.get(), buffer.data(), buffer.size())) > 0;) {
      text.append(buffer.data(), static_cast<std::size_t>(n));
    }
    return text;
  }
  UniqueFd read_end;
  UniqueFd write_end;
};

class WriterTest : public testing::Test {
 protected:
  // A program that writes to a closed pipe dies of it otherwise; convoy ignores it too.
  static void SetUpTestSuite() { signal(SIGPIPE, SIG_IGN); }
  static void TearDownTestSuite() { signal(SIGPIPE, SIG_DFL); }
};

TEST_F(WriterTest, WritesInOrder) {
  Pipe pipe;
  {
    Writer writer("test", {});
    for (int i = 0; i < 100; ++i) writer.write(pipe.write_end.get(), std::to_string(i) + " ");
  }
  std::string expected;
  for (int i = 0; i < 100; ++i) expected += std::to_string(i) + " ";
  EXPECT_EQ(pipe.read_all(), expected);
}

TEST_F(WriterTest, NeverBlocksTheCaller) {
  Pipe pipe;
  const std::string block(1 << 20, 'x');  // more than the pipe holds
  std::string text;
  {
    Writer writer("test", {});
    for (int i = 0; i < 4; ++i) writer.write(pipe.write_end.get(), block);
    EXPECT_GT(writer.queued(), 0U);
    std::array<char, 65536> buffer;
    while (text.size() < 4 * block.size()) {
      const ssize_t n = ::read(pipe.read_end.get(), buffer.data(), buffer.size());
      ASSERT_GT(n, 0);
      text.append(buffer.data(), static_cast<std::size_t>(n));
    }
  }
  EXPECT_EQ(text.size(), 4 * block.size());
}

TEST_F(WriterTest, WaitsForANonBlockingDescriptor) {
  Pipe pipe;
  ASSERT_EQ(::fcntl(pipe.write_end.get(), F_SETFL, O_NONBLOCK), 0);
  Writer writer("test", {});
  writer.write(pipe.write_end.get(), std::string(1 << 20, 'x'));
  std::size_t got = 0;
  std::array<char, 65536> buffer;
  while (got < 1 << 20) {
    const ssize_t n = ::read(pipe.read_end.get(), buffer.data(), buffer.size());
    ASSERT_GT(n, 0);
    got += static_cast<std::size_t>(n);
  }
}

TEST_F(WriterTest, ReportsAnErrorOnceAndDropsTheRest) {
  Pipe gone;
  gone.read_end.reset();
  Pipe good;
  std::atomic<int> failures{0};
  std::atomic<int> error{0};
  {
    Writer writer("test",
                  {.failed = [&](int, int code) { ++failures, error = code; }, .progress = {}});
    writer.write(gone.write_end.get(), "a");
    writer.write(gone.write_end.get(), "b");
    writer.write(good.write_end.get(), "c");
  }
  EXPECT_EQ(failures, 1);
  EXPECT_EQ(error, EPIPE);
  EXPECT_EQ(good.read_all(), "c");
}

TEST_F(WriterTest, CanBeAbandonedWhileItIsStuck) {
  Pipe pipe;
  std::atomic<int> events{0};
  {
    Writer writer("test", {.failed = [&](int, int) { ++events; }, .progress = [&] { ++events; }});
    writer.write(pipe.write_end.get(), std::string(1 << 20, 'x'));
    std::array<char, 1> first;
    ASSERT_EQ(::read(pipe.read_end.get(), first.data(), 1), 1);  // it is in the write now
    writer.abandon();
  }
  // The destructor came back. Let the thread go, and see that it calls nobody.
  EXPECT_EQ(pipe.read_all().size(), std::size_t{1 << 20} - 1);
  EXPECT_EQ(events, 0);
}

}  // namespace
}  // namespace convoy::launch
