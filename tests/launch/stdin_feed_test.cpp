#include "launch/stdin_feed.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <thread>

#include "launch/writer.h"
#include "os/file.h"

namespace convoy::launch {
namespace {

std::string read_all(const UniqueFd& fd) {
  std::string text;
  std::array<char, 65536> buffer;
  for (ssize_t n = 0; (n = ::read(fd.get(), buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<std::size_t>(n));
  }
  return text;
}

class Feed : public testing::Test {
 protected:
  static void SetUpTestSuite() { signal(SIGPIPE, SIG_IGN); }
  static void TearDownTestSuite() { signal(SIGPIPE, SIG_DFL); }

  Feed() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) std::abort();
    feed_ = std::make_unique<StdinFeed>(loop_, UniqueFd(ends[0]), folder_.path());
    source_.reset(ends[1]);
  }
  void run() {
    thread_ = std::jthread([this] { loop_.run(); });
  }
  ~Feed() override {
    loop_.stop();
    if (thread_.joinable()) thread_.join();
  }

  const TempFolder folder_{"launch-test"};
  Loop loop_;
  std::unique_ptr<StdinFeed> feed_;
  UniqueFd source_;
  std::jthread thread_;
};

std::string pattern(std::size_t size) {
  std::string text(size, '\0');
  for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<char>('a' + i % 23 + i / 65536 % 3);
  return text;
}

TEST_F(Feed, EveryRankGetsAllOfIt) {
  const UniqueFd first = feed_->add(0);
  const UniqueFd second = feed_->add(1);
  run();
  const std::string text = pattern(3'000'000);
  const std::jthread writer([&] {
    write_fully(source_.get(), text);
    source_.reset();
  });
  // The second is read only after the first has everything.
  EXPECT_EQ(read_all(first), text);
  EXPECT_EQ(read_all(second), text);
}

TEST_F(Feed, LeavesNoFile) {
  const UniqueFd reader = feed_->add(0);
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST_F(Feed, ARankThatClosesItsInputDropsOut) {
  const UniqueFd first = feed_->add(0);
  { const UniqueFd closed = feed_->add(1); }
  run();
  const std::string text = pattern(2'000'000);
  const std::jthread writer([&] {
    write_fully(source_.get(), text);
    source_.reset();
  });
  EXPECT_EQ(read_all(first), text);
}

TEST_F(Feed, TheSourceIsClosedWhenNobodyIsLeft) {
  { const UniqueFd closed = feed_->add(0); }
  run();
  // More than pipe and look-ahead hold: it ends by the error, not by being read.
  EXPECT_EQ(write_fully(source_.get(), pattern(8'000'000)), EPIPE);
}

TEST_F(Feed, ReadsNoFasterThanTheFastestRank) {
  const UniqueFd reader = feed_->add(0);
  ASSERT_EQ(::fcntl(source_.get(), F_SETFL, O_NONBLOCK), 0);
  run();
  // With nobody reading, only so much goes in: pipes and the look-ahead.
  const std::string block = pattern(65536);
  std::size_t accepted = 0;
  const auto deadline = Deadline::after(std::chrono::seconds(2));
  for (int refusals = 0; refusals < 20 && !deadline.expired() && accepted < (8U << 20);) {
    const ssize_t n = ::write(source_.get(), block.data(), block.size());
    if (n > 0) {
      accepted += static_cast<std::size_t>(n);
    } else {
      ++refusals;
      ::poll(nullptr, 0, 5);
    }
  }
  EXPECT_LT(accepted, 2U << 20);
  source_.reset();
  EXPECT_EQ(read_all(reader).size(), accepted);
}

}  // namespace
}  // namespace convoy::launch
