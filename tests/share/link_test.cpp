// Rings and links between threads; channels between processes are in process_test.cpp.
#include "share/link.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>

#include "share/depot.h"
#include "share/message.h"
#include "support/deadlines.h"
#include "support/expect_error.h"

namespace convoy::share {
namespace {

using convoy::test::expect_error;
using convoy::test::soon;

std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> made(bytes);
  for (std::size_t i = 0; i < bytes; ++i) made[i] = static_cast<std::byte>(seed + 31 * i);
  return made;
}

TEST(RingTest, MessagesOfAnyLengthInOrder) {
  Ring writer = Ring::create();
  Ring reader = Ring::adopt(duplicate(writer.fd()), writer.bytes());
  std::mt19937 random(1);
  unsigned written = 0, read = 0;
  std::vector<std::size_t> sizes;
  while (read < 5000) {
    const std::size_t size = random() % 8 == 0 ? random() % (Ring::kMostBytes + 1) : random() % 300;
    if (writer.try_write(pattern(size, written))) {
      sizes.push_back(size);
      ++written;
    } else {
      ASSERT_TRUE(reader.has_message());
    }
    while (reader.has_message() && (random() % 3 == 0 || !writer.has_room(Ring::kMostBytes))) {
      ASSERT_EQ(reader.read(), pattern(sizes[read], read));
      ++read;
      reader.finish();
      EXPECT_EQ(writer.done(), read);
    }
  }
}

TEST(RingTest, ImpossibleNumbersAreNotFollowed) {
  for (const std::uint64_t written : {~std::uint64_t{0}, std::uint64_t{Ring::kCapacity + 8}}) {
    Ring writer = Ring::create();
    const auto memory = Segment::adopt(duplicate(writer.fd()), writer.bytes());
    Ring reader = Ring::adopt(duplicate(writer.fd()), writer.bytes());
    std::memcpy(memory.data() + 64, &written, sizeof written);
    expect_error(ErrorKind::kPeerLost, "impossible", [&] { (void)reader.has_message(); });
  }
  Ring writer = Ring::create();
  const auto memory = Segment::adopt(duplicate(writer.fd()), writer.bytes());
  Ring reader = Ring::adopt(duplicate(writer.fd()), writer.bytes());
  writer.try_write(pattern(10, 1));
  const std::uint64_t length = 1 << 30;
  std::memcpy(memory.data() + 256, &length, sizeof length);
  expect_error(ErrorKind::kPeerLost, "impossible length", [&] { reader.read(); });
  auto other = Segment::create(Ring::kCapacity + 256, "ring");
  expect_error(ErrorKind::kInvalidArgument, "not a ring",
               [&] { Ring::adopt(duplicate(other.fd()), other.size()); });
}

struct Pair {
  Pair() : Pair(Socket::pair()) {}
  explicit Pair(std::pair<Socket, Socket> sockets)
      : a(std::move(sockets.first)), b(std::move(sockets.second)) {}
  Link a, b;
};

// Both threads send more than fits and receive: nobody waits for ever, nothing is lost or mixed up.
TEST(LinkTest, BothWaysAtOnce) {
  Pair pair;
  constexpr unsigned kMessages = 3000;
  const auto size_of = [](unsigned i) { return i % 50 == 0 ? Ring::kMostBytes : i % 700; };
  const auto send_all = [&](Link& link) {
    for (unsigned i = 0; i < kMessages; ++i) {
      EXPECT_EQ(link.send(pattern(size_of(i), i), soon()), i + 1);
    }
  };
  const auto receive_all = [&](Link& link) {
    for (unsigned i = 0; i < kMessages; ++i) {
      ASSERT_EQ(link.receive(soon()), pattern(size_of(i), i));
      link.finish();
    }
  };
  {
    std::jthread first([&] { send_all(pair.a); });
    std::jthread second([&] { receive_all(pair.a); });
    std::jthread third([&] { receive_all(pair.b); });
    std::jthread fourth([&] { send_all(pair.b); });
  }
  EXPECT_EQ(pair.a.done(), kMessages);
  EXPECT_EQ(pair.b.done(), kMessages);
}

// A ping-pong in which each side sleeps at times.
TEST(LinkTest, SleepersAreWoken) {
  Pair pair;
  std::jthread echo([&] {
    for (int i = 0; i < 300; ++i) {
      const auto message = pair.b.receive(soon());
      pair.b.finish();
      pair.b.send(message, soon());
    }
  });
  for (unsigned i = 0; i < 300; ++i) {
    // Long enough for the other side to fall asleep at times; its length is not asserted.
    if (i % 10 == 0) {
      for (int j = 0; j < 2000; ++j) std::this_thread::yield();
    }
    pair.a.send(pattern(100, i), soon());
    ASSERT_EQ(pair.a.receive(soon()), pattern(100, i));
    pair.a.finish();
  }
}

TEST(LinkTest, DeadlinesAndEnds) {
  Pair pair;
  const auto now = Deadline::after(std::chrono::milliseconds(20));
  expect_error(ErrorKind::kTimeout, "not used its end", [&] { pair.a.receive(now); });
  pair.b.send(pattern(1, 1), soon());
  pair.a.receive(soon());
  expect_error(ErrorKind::kTimeout, "sent nothing", [&] { pair.a.receive(now); });
  // Until it is full; what does not fit was not sent.
  const auto large = pattern(Ring::kMostBytes, 3);
  int sent = 0;
  try {
    for (;; ++sent) pair.a.send(large, Deadline::after(std::chrono::milliseconds(20)));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
  }
  EXPECT_EQ(sent, 3);
  for (int i = 0; i < sent; ++i) EXPECT_EQ(pair.b.receive(soon()), large);
  EXPECT_FALSE(pair.b.has_message());
  // What was sent before the end is received, then the end.
  pair.a.send(large, soon());
  pair.a.close();
  EXPECT_EQ(pair.b.receive(soon()), large);
  expect_error(ErrorKind::kPeerLost, "closed the channel", [&] { pair.b.receive(soon()); });
  expect_error(ErrorKind::kPeerLost, "closed the channel", [&] { pair.b.has_message(); });
  expect_error(ErrorKind::kPeerLost, "closed the channel", [&] {
    for (;;) pair.b.send(large, soon());
  });
  expect_error(ErrorKind::kInvalidArgument, "is closed", [&] { pair.a.send(large, soon()); });
  expect_error(ErrorKind::kInvalidArgument, "is closed", [&] { pair.a.receive(soon()); });
}

TEST(LinkTest, CloseWakesThisSide) {
  Pair pair;
  pair.b.send(pattern(1, 1), soon());
  pair.a.receive(soon());
  std::atomic<bool> waits{false};
  std::jthread waiter([&] {
    waits = true;
    expect_error(ErrorKind::kInvalidArgument, "is closed", [&] { pair.a.receive(soon()); });
  });
  while (!waits) std::this_thread::yield();
  pair.a.close();
}

// More descriptors than one call of the kernel passes (253), with one message.
TEST(LinkTest, ManyPiecesOfMemoryWithOneMessage) {
  Pair pair;
  constexpr std::uint32_t kRegions = 400;
  std::jthread receiver([&] {
    pair.b.receive(soon());
    for (std::uint32_t i = 0; i < kRegions; ++i) {
      std::uint32_t seen = 0;
      std::memcpy(&seen, pair.b.region(i)->data() + 100, sizeof seen);
      ASSERT_EQ(seen, i);
    }
    expect_error(ErrorKind::kInvalidArgument, "not passed before",
                 [&] { pair.b.region(kRegions); });
    pair.b.finish();
  });
  std::vector<Segment> segments;  // borrowed regions do not keep them
  for (std::uint32_t i = 0; i < kRegions; ++i) {
    auto& segment = segments.emplace_back(Segment::create(4096, "share"));
    std::memcpy(segment.data() + 100, &i, sizeof i);
    const auto region = Region::borrow(duplicate(segment.fd()), segment.data(), segment.size());
    EXPECT_EQ(pair.a.introduce(region, soon()), i);
    EXPECT_EQ(pair.a.introduce(region, soon()), i);
  }
  pair.a.send(pattern(1, 1), soon());
}

TEST(LinkTest, AnythingElseOnTheSocketEndsIt) {
  auto sockets = Socket::pair();
  Link link(std::move(sockets.first));
  const auto bytes = pattern(sizeof(LinkFrame), 7);
  sockets.second.send(bytes, soon());
  expect_error(ErrorKind::kPeerLost, "unusable", [&] { link.receive(soon()); });
}

TEST(LinkTest, AnUnusedEndCanBeGivenAway) {
  auto sockets = Socket::pair();
  Link a(std::move(sockets.first));
  UniqueFd given;
  {
    Link b(std::move(sockets.second));
    given = b.release();
    expect_error(ErrorKind::kInvalidArgument, "only once", [&] { b.release(); });
  }
  Link b{Socket(std::move(given))};
  a.send(pattern(5, 5), soon());
  EXPECT_EQ(b.receive(soon()), pattern(5, 5));
  expect_error(ErrorKind::kInvalidArgument, "before it was used", [&] { b.release(); });
}

TEST(WireMessageTest, ThereAndBack) {
  WireMessage message;
  message.regions.push_back({.kind = 3, .bytes = 8192, .device = 1, .inode = 2, .path = "/a/b"});
  message.blocks.push_back({.book = WireBlock::kLocal,
                            .memory = 4,
                            .generation = 5,
                            .entry = 4096,
                            .offset = 4096,
                            .bytes = 77});
  message.values.push_back({WireValue::kNone, ""});
  message.values.push_back({WireValue::kText, "hello"});
  message.values.push_back({WireValue::kInteger, "12345678"});
  const std::string bytes = encode(message);
  EXPECT_EQ(parse_message(bytes), message);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    expect_error(ErrorKind::kInvalidArgument, "malformed message",
                 [&] { parse_message(std::string_view(bytes).substr(0, length)); });
  }
  expect_error(ErrorKind::kInvalidArgument, "more behind", [&] { parse_message(bytes + "x"); });
  const WireEnvelope envelope{
      {.book = 1, .memory = 1, .generation = 2, .entry = 3, .offset = 4, .bytes = 5}};
  EXPECT_EQ(parse_envelope(encode(envelope)), envelope);
  EXPECT_TRUE(is_envelope(encode(envelope)));
  EXPECT_FALSE(is_envelope(bytes));
}

TEST(WireMessageTest, PathsOfDescriptorsOnly) {
  EXPECT_TRUE(is_descriptor_path("/proc/1/fd/0"));
  EXPECT_TRUE(is_descriptor_path("/proc/4194304/fd/1048575"));
  for (const char* path :
       {"", "/proc/", "/proc/1", "/proc/1/fd/", "/proc//fd/1", "/proc/self/fd/1", "/proc/1/fd/1/",
        "/proc/1/fd/../../../dev/sda", "/proc/../dev/sda", "/proc/../proc/1/fd/1", "/proc/1/mem",
        "/proc/1/fd/-1", "/dev/shm/x", "proc/1/fd/1", "/proc/1/fd/1 ", "/proc/1/cwd/1"}) {
    EXPECT_FALSE(is_descriptor_path(path)) << path;
  }
}

TEST(WireMessageTest, DamagedOnesAreRefusedOrWhole) {
  WireMessage message;
  message.regions.push_back({.kind = 3, .bytes = 8192, .device = 1, .inode = 2, .path = "/a/b"});
  message.blocks.push_back({.book = WireBlock::kLocal, .bytes = 77});
  message.values.push_back({WireValue::kBool, std::string_view("\1", 1)});
  message.values.push_back({WireValue::kTensor, "abc"});
  const std::string good = encode(message);
  std::mt19937 random(1);
  int accepted = 0;
  for (int round = 0; round < 100'000; ++round) {
    std::string bytes = good;
    for (auto changes = 1 + random() % 4; changes > 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    try {
      const auto parsed = parse_message(bytes);
      ASSERT_EQ(encode(parsed), bytes);
      ++accepted;
    } catch (const Error& error) {
      ASSERT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    }
  }
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace convoy::share
