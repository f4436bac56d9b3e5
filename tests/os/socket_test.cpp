#include "os/socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>

#include "os/segment.h"
#include "support/deadlines.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::expect_error;
using test::soon;
Deadline shortly() { return Deadline::after(milliseconds(20)); }

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string receive_text(Socket& socket, std::size_t size) {
  std::string text(size, '\0');
  socket.receive(std::as_writable_bytes(std::span(text)), soon());
  return text;
}

std::vector<UniqueFd> open_many(std::size_t count) {
  std::vector<UniqueFd> fds;
  for (std::size_t i = 0; i < count; ++i) {
    fds.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  }
  return fds;
}
std::vector<int> numbers(const std::vector<UniqueFd>& fds) {
  std::vector<int> result;
  for (const auto& fd : fds) result.push_back(fd.get());
  return result;
}

TEST(SocketTest, PairTalksBothWays) {
  auto [a, b] = Socket::pair();
  a.send(bytes_of("to b"), soon());
  b.send(bytes_of("to a!"), soon());
  EXPECT_EQ(receive_text(b, 4), "to b");
  EXPECT_EQ(receive_text(a, 5), "to a!");
}

TEST(SocketTest, FlagsAreSet) {
  auto [a, b] = Socket::pair();
  EXPECT_TRUE(::fcntl(a.fd(), F_GETFD) & FD_CLOEXEC);
  EXPECT_TRUE(::fcntl(a.fd(), F_GETFL) & O_NONBLOCK);
  // Also on one that comes from elsewhere.
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const UniqueFd other(ends[1]);
  const Socket taken{UniqueFd(ends[0])};
  EXPECT_TRUE(::fcntl(taken.fd(), F_GETFD) & FD_CLOEXEC);
  EXPECT_TRUE(::fcntl(taken.fd(), F_GETFL) & O_NONBLOCK);
}

TEST(SocketTest, TakesNothingButUnixStreams) {
  const auto refuse = [](int fd) {
    ASSERT_GE(fd, 0);
    expect_error(ErrorKind::kInvalidArgument, "is not a Unix stream socket",
                 [&] { Socket socket{UniqueFd(fd)}; });
    EXPECT_EQ(::fcntl(fd, F_GETFD), -1);  // it was ours to close
  };
  refuse(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  refuse(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  refuse(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  expect_error(ErrorKind::kInvalidArgument, "descriptor -1", [] { Socket socket{UniqueFd()}; });
}

TEST(SocketTest, EmptyAndMovedFrom) {
  Socket empty;
  EXPECT_FALSE(empty);
  empty.close();
  empty.shutdown();
  auto [a, b] = Socket::pair();
  const int number = a.fd();
  Socket moved(std::move(a));
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): what a move leaves is the point
  EXPECT_EQ(moved.fd(), number);
  b = std::move(moved);  // closes what b was
  EXPECT_EQ(b.fd(), number);
  auto& same = b;
  b = std::move(same);
  EXPECT_TRUE(b);
}

TEST(SocketTest, ReleaseGivesTheDescriptorAway) {
  auto [a, b] = Socket::pair();
  const UniqueFd fd = a.release();
  EXPECT_FALSE(a);
  b.send(bytes_of("x"), soon());
  char c = 0;
  EXPECT_EQ(::read(fd.get(), &c, 1), 1);
}

TEST(SocketTest, PeerIsThisProcess) {
  auto [a, b] = Socket::pair();
  EXPECT_EQ(a.peer().pid, ::getpid());
  EXPECT_EQ(a.peer().uid, ::geteuid());
  EXPECT_EQ(a.peer().gid, ::getegid());
  EXPECT_NO_THROW(a.require_same_user());
}

TEST(SocketTest, TransfersMuchMoreThanTheBuffersHold) {
  auto [a, b] = Socket::pair();
  const int small = 4096;
  ASSERT_EQ(::setsockopt(a.fd(), SOL_SOCKET, SO_SNDBUF, &small, sizeof small), 0);
  std::vector<std::uint32_t> out(1 << 20);
  std::iota(out.begin(), out.end(), 0u);
  std::vector<std::uint32_t> in(out.size());
  std::jthread sender([&, socket = &a] { socket->send(std::as_bytes(std::span(out)), soon()); });
  b.receive(std::as_writable_bytes(std::span(in)), soon());
  EXPECT_EQ(in, out);
}

TEST(SocketTest, SendAndReceiveFromTwoThreadsAtOnce) {
  auto [a, b] = Socket::pair();
  const std::string text(1 << 20, 'x');
  std::jthread echo([&, socket = &b] {
    for (int i = 0; i < 4; ++i) socket->send(bytes_of(receive_text(*socket, text.size())), soon());
  });
  std::jthread sender([&, socket = &a] {
    for (int i = 0; i < 4; ++i) socket->send(bytes_of(text), soon());
  });
  for (int i = 0; i < 4; ++i) EXPECT_EQ(receive_text(a, text.size()), text);
}

TEST(SocketTest, NothingIsSentAndReceivedAtOnce) {
  auto [a, b] = Socket::pair();
  a.send({}, Deadline::after(seconds(0)));
  b.receive({}, Deadline::after(seconds(0)));
}

TEST(SocketTest, SendGivesUpAtTheDeadline) {
  auto [a, b] = Socket::pair();
  const std::string text(std::size_t{4} << 20, 'x');  // nobody reads
  expect_error(ErrorKind::kTimeout, "sent at the deadline",
               [&, socket = &a] { socket->send(bytes_of(text), shortly()); });
}

TEST(SocketTest, ReceiveGivesUpAtTheDeadline) {
  auto [a, b] = Socket::pair();
  a.send(bytes_of("abc"), soon());
  std::array<std::byte, 10> bytes;
  expect_error(ErrorKind::kTimeout, "receiving 10 bytes: 3 arrived by the deadline",
               [&, socket = &b] { socket->receive(bytes, shortly()); });
}

TEST(SocketTest, EndOfStreamSaysHowFarItCame) {
  auto [a, b] = Socket::pair();
  a.send(bytes_of("abc"), soon());
  a.close();
  std::array<std::byte, 10> bytes;
  expect_error(ErrorKind::kPeerLost, "closed the connection after 3 of 10 bytes",
               [&, socket = &b] { socket->receive(bytes, soon()); });
}

TEST(SocketTest, PeerThatClosesWithUnreadBytesIsLost) {
  auto [a, b] = Socket::pair();
  a.send(bytes_of("never read"), soon());
  b.close();  // the kernel answers a with ECONNRESET
  std::array<std::byte, 1> byte;
  expect_error(ErrorKind::kPeerLost, "closed the connection",
               [&, socket = &a] { socket->receive(byte, soon()); });
}

TEST(SocketTest, SendToNobodyIsAnErrorAndNoSignal) {
  auto [a, b] = Socket::pair();
  b.close();
  expect_error(ErrorKind::kPeerLost, "sending 1 bytes",
               [&, socket = &a] { socket->send(bytes_of("x"), soon()); });
  EXPECT_EQ(a.try_send(bytes_of("x")), std::nullopt);
}

TEST(SocketTest, ShutdownWakesABlockedReceiver) {
  auto [a, b] = Socket::pair();
  std::atomic<bool> lost = false;
  std::jthread receiver([&, socket = &a] {
    std::array<std::byte, 1> byte;
    const auto error = test::error_of([&] { socket->receive(byte, soon()); });
    lost = error && error->kind() == ErrorKind::kPeerLost;
  });
  a.shutdown();
  receiver.join();
  EXPECT_TRUE(lost);
}

TEST(SocketTest, TrySendAndReceiveDoNotBlock) {
  auto [a, b] = Socket::pair();
  std::array<std::byte, 100> bytes;
  EXPECT_EQ(b.try_receive(bytes), 0u);
  const std::string text(std::size_t{1} << 20, 'x');
  std::size_t sent = 0;
  for (;;) {
    const auto n = a.try_send(bytes_of(text));
    ASSERT_TRUE(n);
    if (*n == 0) break;
    sent += *n;
  }
  std::size_t received = 0;
  while (received < sent) received += b.try_receive(bytes).value_or(sent);
  EXPECT_EQ(received, sent);
  a.close();
  EXPECT_EQ(b.try_receive(bytes), std::nullopt);
}

TEST(DescriptorPassingTest, ArriveWithTheBytes) {
  auto [a, b] = Socket::pair();
  const auto segment = Segment::create(1, "passed");
  const int fd = segment.fd();
  a.send(bytes_of("hi"), soon(), {&fd, 1});
  std::array<std::byte, 2> bytes;
  std::vector<UniqueFd> fds;
  b.receive(bytes, soon(), &fds);
  ASSERT_EQ(fds.size(), 1u);
  EXPECT_EQ(Segment::key_of(fds[0].get()), segment.key());
  EXPECT_TRUE(::fcntl(fds[0].get(), F_GETFD) & FD_CLOEXEC);
}

TEST(DescriptorPassingTest, OncePerMessageAlsoWhenItIsSentInPieces) {
  auto [a, b] = Socket::pair();
  const int small = 4096;
  ASSERT_EQ(::setsockopt(a.fd(), SOL_SOCKET, SO_SNDBUF, &small, sizeof small), 0);
  const std::string text(300'000, 'x');
  const auto fds = open_many(3);
  std::jthread sender([&, socket = &a] {
    for (int i = 0; i < 3; ++i) socket->send(bytes_of(text), soon(), numbers(fds));
  });
  for (int i = 0; i < 3; ++i) {
    std::string in(text.size(), '\0');
    std::vector<UniqueFd> received;
    b.receive(std::as_writable_bytes(std::span(in)), soon(), &received);
    EXPECT_EQ(received.size(), 3u);
    EXPECT_EQ(in, text);
  }
}

TEST(DescriptorPassingTest, AsManyAsTheKernelTakesAndNoMore) {
  auto [a, b] = Socket::pair();
  const auto fds = open_many(254);
  auto list = numbers(fds);
  expect_error(ErrorKind::kInvalidArgument, "at most 253",
               [&, socket = &a] { socket->send(bytes_of("x"), soon(), list); });
  list.pop_back();
  a.send(bytes_of("x"), soon(), list);
  std::array<std::byte, 1> byte;
  std::vector<UniqueFd> received;
  b.receive(byte, soon(), &received);
  EXPECT_EQ(received.size(), 253u);
}

TEST(DescriptorPassingTest, ClosedOneIsNamed) {
  auto [a, b] = Socket::pair();
  const int bad = 999'999;
  expect_error(ErrorKind::kInvalidArgument, "one of them is not open",
               [&, socket = &a] { socket->send(bytes_of("x"), soon(), {&bad, 1}); });
}

TEST(DescriptorPassingTest, NeedAByte) {
  auto [a, b] = Socket::pair();
  const int fd = 0;
  expect_error(ErrorKind::kInternal, "descriptors need a byte",
               [&, socket = &a] { socket->send({}, soon(), {&fd, 1}); });
}

TEST(DescriptorPassingTest, UnexpectedOnesAreRefusedAndClosed) {
  auto [a, b] = Socket::pair();
  const auto fds = open_many(2);
  a.send(bytes_of("x"), soon(), numbers(fds));
  std::array<std::byte, 1> byte;
  expect_error(ErrorKind::kInvalidArgument, "sent 2 descriptors where none were expected",
               [&, socket = &b] { socket->receive(byte, soon()); });
}

TEST(DescriptorPassingTest, UnreadOnesGoWithTheSocket) {
  auto [a, b] = Socket::pair();
  auto [passed, peer] = Socket::pair();
  const int fd = passed.fd();
  a.send(bytes_of("x"), soon(), {&fd, 1});
  passed.close();
  std::array<std::byte, 1> byte;
  EXPECT_EQ(peer.try_receive(byte), 0u);  // in flight, so alive
  b.close();
  a.close();
  ASSERT_TRUE(wait_ready(peer.fd(), POLLIN, soon()));
  EXPECT_EQ(peer.try_receive(byte), std::nullopt);
}

TEST(DescriptorPassingTest, FullTableIsAnErrorAndLeaksNothing) {
  test::run_in_process([] {
    auto [a, b] = Socket::pair();
    const auto fds = open_many(10);
    a.send(bytes_of("x"), soon(), numbers(fds));
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
    const UniqueFd top = duplicate(0);
    const rlimit low{.rlim_cur = static_cast<rlim_t>(top.get()) + 4, .rlim_max = before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
    std::array<std::byte, 1> byte;
    std::vector<UniqueFd> received;
    expect_error(ErrorKind::kResource, "ulimit -n",
                 [&, socket = &b] { socket->receive(byte, soon(), &received); });
    EXPECT_TRUE(received.empty());
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  });
}

TEST(WaitReadyTest, EventsAndDeadline) {
  auto [a, b] = Socket::pair();
  EXPECT_FALSE(wait_ready(a.fd(), POLLIN, Deadline::after(seconds(0))));
  EXPECT_FALSE(wait_ready(a.fd(), POLLIN, shortly()));
  EXPECT_TRUE(wait_ready(a.fd(), POLLOUT, soon()));
  b.send(bytes_of("x"), soon());
  EXPECT_TRUE(wait_ready(a.fd(), POLLIN, soon()));
  EXPECT_TRUE(wait_ready(a.fd(), POLLIN, Deadline::never()));
}

}  // namespace
}  // namespace convoy
