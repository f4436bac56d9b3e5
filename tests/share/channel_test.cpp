// Channels: messages, ends and deadlines, with both ends in one process.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <torch/types.h>

#include <thread>

#include "convoy/share.h"
#include "os/socket.h"
#include "support.h"

namespace convoy::share::test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

struct ShareChannelTest : ShareTest {};

TEST_F(ShareChannelTest, MessagesMixKinds) {
  auto [a, b] = channel();
  const Bytes bytes{std::byte{1}, std::byte{0}, std::byte{255}};
  a.send(Message{at::ones({2}), "text", 3, 2.5, true, bytes, std::monostate{},
                 PythonObject{"pickle"}, std::string("zero\0inside", 11), std::int64_t{1} << 40});
  const Message message = b.receive_message();
  ASSERT_EQ(message.size(), 10U);
  EXPECT_EQ(message.tensor(0).sum().item<float>(), 2);
  EXPECT_EQ(message.text(1), "text");
  EXPECT_EQ(message.integer(2), 3);
  EXPECT_EQ(message.real(3), 2.5);
  EXPECT_TRUE(std::get<bool>(message[4]));
  EXPECT_EQ(message.bytes(5), bytes);
  EXPECT_EQ(message[6].index(), 0U);
  EXPECT_EQ(std::get<PythonObject>(message[7]).pickle, "pickle");
  EXPECT_EQ(message.text(8).size(), 11U);
  EXPECT_EQ(message.integer(9), std::int64_t{1} << 40);
  expect_error(ErrorKind::kInvalidArgument, "value 1 of a message is a string, not a tensor",
               [&] { message.tensor(1); });
  expect_error(ErrorKind::kInvalidArgument, "value 12 does not exist: the message has 10",
               [&] { message.tensor(12); });
  a.send(Message{});
  EXPECT_EQ(b.receive_message().size(), 0U);
}

TEST_F(ShareChannelTest, MessagesOfAnySize) {
  auto [a, b] = channel();
  for (const std::size_t size : {0UL, 1UL, 60'000UL, 66'000UL, 5'000'000UL}) {
    a.send(Message{std::string(size, 'x'), at::ones({3})});
    const Message message = b.receive_message();
    EXPECT_EQ(message.text(0), std::string(size, 'x'));
    EXPECT_EQ(message.tensor(1).sum().item<float>(), 3);
  }
  Message many;
  for (int i = 0; i < 3000; ++i) many.add(at::full({4}, i));
  a.send(many);
  const Message got = b.receive_message();
  ASSERT_EQ(got.size(), 3000U);
  for (std::size_t i = 0; i < 3000; ++i) {
    ASSERT_EQ(got.tensor(i)[3].item<float>(), static_cast<float>(i));
  }
}

TEST_F(ShareChannelTest, WhatIsNoTensorWaitsForWhoTakesIt) {
  auto [a, b] = channel();
  a.send(Message{"text"});
  a.send(Message{at::ones({1}), at::ones({1})});
  expect_error(ErrorKind::kInvalidArgument, "the next message is a string",
               [&, &end = b] { (void)end.receive(); });
  EXPECT_EQ(b.receive_message().text(0), "text");
  expect_error(ErrorKind::kInvalidArgument, "is 2 values", [&, &end = b] { (void)end.receive(); });
  EXPECT_EQ(b.try_receive()->size(), 2U);
  EXPECT_EQ(b.try_receive(), std::nullopt);
}

TEST_F(ShareChannelTest, DeadlinesAndEnds) {
  auto [a, b] = channel({.timeout = 20ms});
  expect_error(ErrorKind::kTimeout, "receive", [&, &end = b] { (void)end.receive(); });
  expect_error(ErrorKind::kTimeout, "receive",
               [&, &end = b] { (void)end.receive_message(Deadline::after(1ms)); });
  a.send(at::ones({1}));
  a = {};  // what was sent before the end is received
  EXPECT_EQ(b.receive().item<float>(), 1);
  expect_error(ErrorKind::kPeerLost, "closed the channel", [&, &end = b] { (void)end.receive(); });
  expect_error(ErrorKind::kPeerLost, "closed the channel", [&, &end = b] {
    for (;;) end.send(at::ones({1}));
  });
  expect_error(ErrorKind::kInvalidArgument, "this Channel is empty",
               [] { Channel().send(Message{}); });
  b.close();
  expect_error(ErrorKind::kInvalidArgument, "is closed", [&, &end = b] { (void)end.receive(); });
}

// Neither side has the tensors any more; the messages have.
TEST_F(ShareChannelTest, WhatIsNeverReceivedIsFreedWithTheReceiver) {
  {
    auto [a, b] = channel();
    for (int i = 0; i < 10; ++i) a.send(at::ones({1000}));
    EXPECT_EQ(usage().blocks, 10U);
    b = {};
  }
  expect_nothing_held();
  auto [a, b] = channel();
  a.send(at::ones({1000}));
  a = {};  // the sender has gone: kept for the receiver
  EXPECT_EQ(usage().blocks, 1U);
  EXPECT_EQ(b.receive().sum().item<float>(), 1000);
  EXPECT_EQ(usage().blocks, 0U);
}

// A sender that sends fresh tensors needs no more memory than what is under way.
TEST_F(ShareChannelTest, MemoryIsUsedAgain) {
  auto [a, b] = channel();
  trim();
  for (int i = 0; i < 50; ++i) {
    a.send(at::full({1 << 18}, i));
    EXPECT_EQ(b.receive()[99].item<float>(), static_cast<float>(i));
  }
  EXPECT_LE(usage().pool_bytes, 16U << 20);
}

TEST_F(ShareChannelTest, TenThousandSends) {
  auto [a, b] = channel();
  std::jthread echo([end = b] {
    for (int i = 0; i < 10'000; ++i) end.send(end.receive(soon()));
  });
  for (int i = 0; i < 10'000; ++i) {
    const auto tensor = i % 2 == 0 ? at::full({10}, i) : share::empty({10}).fill_(i);
    a.send(tensor);
    const auto same = a.receive(soon());
    ASSERT_EQ(same.storage().unsafeGetStorageImpl(), tensor.storage().unsafeGetStorageImpl());
  }
}

TEST_F(ShareChannelTest, ListenAndConnect) {
  const TempFolder folder("share");
  {
    const auto listener = listen(folder.path() + "/socket");
    struct stat info {};
    ASSERT_EQ(::stat(listener.path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600U);
    expect_error(ErrorKind::kInvalidArgument, "binding", [&] { listen(listener.path()); });
    expect_error(ErrorKind::kTimeout, "", [&] { (void)listener.accept(Deadline::after(1ms)); });
    const Channel client = connect(listener.path(), soon());
    client.send(Message{"before anybody accepts"});
    const Channel server = listener.accept(soon());
    EXPECT_EQ(server.receive_message().text(0), "before anybody accepts");
    server.send(at::ones({2}));
    EXPECT_EQ(client.receive().sum().item<float>(), 2);
  }
  expect_error(ErrorKind::kPeerLost, "connecting",
               [&] { (void)connect(folder.path() + "/socket", soon()); });
  expect_error(ErrorKind::kInvalidArgument, "not a path", [] { listen("socket"); });
  expect_error(ErrorKind::kInvalidArgument, "not safe", [] { listen("/tmp/convoy-socket"); });
}

// What was sent before belongs to who gets the end, though memory was short in between: then this
// process looks at its channels.
TEST_F(ShareChannelTest, AnEndThatIsGivenAwayKeepsWhatCame) {
  auto [a, b] = channel();
  a.send(Message{at::ones({3}), 1});
  (void)usage();
  (void)trim();
  const Channel c = Channel::adopt(b.release());
  const Message got = c.receive_message(soon());
  EXPECT_EQ(got.tensor(0).sum().item<double>(), 3);
}

TEST_F(ShareChannelTest, EndsAreGivenAwayAsDescriptors) {
  auto [a, b] = channel();
  const Channel c = Channel::adopt(b.release());
  a.send(at::ones({2}));
  EXPECT_EQ(c.receive().sum().item<float>(), 2);
  expect_error(ErrorKind::kInvalidArgument, "is closed", [&, &end = b] { (void)end.receive(); });
  expect_error(ErrorKind::kInvalidArgument, "before it was used", [&] { c.release(); });
  expect_error(ErrorKind::kInvalidArgument, "not a Unix stream socket",
               [] { Channel::adopt(::open("/dev/null", O_RDONLY | O_CLOEXEC)); });
}

}  // namespace
}  // namespace convoy::share::test
