#include "os/signal_fd.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include "os/socket.h"

namespace convoy {
namespace {

// Restores the mask that SignalFd changes.
class SignalFdTest : public testing::Test {
 protected:
  SignalFdTest() { pthread_sigmask(SIG_SETMASK, nullptr, &before_); }
  ~SignalFdTest() override { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  sigset_t before_{};
};

TEST_F(SignalFdTest, SignalsBecomeEvents) {
  SignalFd signals({SIGUSR1, SIGUSR2});
  EXPECT_FALSE(signals.next());
  ::kill(getpid(), SIGUSR2);
  ASSERT_TRUE(wait_ready(signals.fd(), POLLIN, Deadline::after(std::chrono::seconds(10))));
  EXPECT_EQ(signals.next(), SIGUSR2);
  EXPECT_FALSE(signals.next());
}

TEST_F(SignalFdTest, KnowsIgnoredSignals) {
  EXPECT_FALSE(is_ignored(SIGUSR1));
  signal(SIGUSR1, SIG_IGN);
  EXPECT_TRUE(is_ignored(SIGUSR1));
  signal(SIGUSR1, SIG_DFL);
}

}  // namespace
}  // namespace convoy
