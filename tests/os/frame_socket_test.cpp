#include "os/frame_socket.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include "support/deadlines.h"
#include "support/expect_error.h"

namespace convoy {
namespace {

using test::expect_error;
using test::soon;

struct Note {
  static constexpr std::uint32_t kMagic = 0x31545643;

  std::uint32_t magic = kMagic;
  std::uint32_t number = 0;
};

struct FrameSocketTest : testing::Test {
  FrameSocketTest() : FrameSocketTest(Socket::pair()) {}
  explicit FrameSocketTest(std::pair<Socket, Socket> ends)
      : ours(std::move(ends.first)), theirs(std::move(ends.second)) {}

  FrameSocket<Note> ours, theirs;
};

TEST_F(FrameSocketTest, WholeFramesInOrder) {
  EXPECT_FALSE(ours.try_receive());
  theirs.send({.number = 1}, soon());
  EXPECT_TRUE(theirs.try_send({.number = 2}));
  EXPECT_EQ(ours.receive(soon()).number, 1u);
  EXPECT_EQ(ours.try_receive()->number, 2u);
  EXPECT_FALSE(ours.try_receive());
  EXPECT_FALSE(ours.ended());
  expect_error(ErrorKind::kTimeout, "0 arrived",
               [&] { ours.receive(Deadline::after(std::chrono::seconds(0))); });
}

TEST_F(FrameSocketTest, PartsAreKeptUntilTheRestComes) {
  const Note note{.number = 7};
  const auto bytes = std::as_bytes(std::span(&note, 1));
  for (const std::size_t cut : {1, 4, 7}) {
    theirs.socket().send(bytes.first(cut), soon());
    EXPECT_FALSE(ours.try_receive());
    theirs.socket().send(bytes.subspan(cut), soon());
    EXPECT_EQ(cut == 4 ? ours.receive(soon()).number : ours.try_receive()->number, 7u);
  }
  theirs.socket().send(bytes.first(5), soon());
  theirs.socket().shutdown();
  EXPECT_FALSE(ours.try_receive());
  EXPECT_TRUE(ours.ended());
  expect_error(ErrorKind::kPeerLost, "closed", [&] { ours.receive(soon()); });
  EXPECT_FALSE(ours.try_send({}));
}

TEST_F(FrameSocketTest, DescriptorsAreCounted) {
  const UniqueFd event(::eventfd(0, EFD_CLOEXEC));
  const int two[] = {event.get(), event.get()};
  theirs.send({}, soon(), {two, 1});
  EXPECT_TRUE(ours.try_receive());
  EXPECT_TRUE(ours.take_descriptor());
  EXPECT_TRUE(ours.take_descriptors(0, 1).empty());
  theirs.send({}, soon(), two);
  EXPECT_TRUE(ours.try_receive());
  expect_error(ErrorKind::kInvalidArgument, "2 descriptors where 1 belong",
               [&] { ours.take_descriptor(); });
  expect_error(ErrorKind::kInvalidArgument, "0 descriptors where 1 belong",
               [&] { ours.take_descriptor(); });
}

TEST_F(FrameSocketTest, AnotherProtocolIsRefused) {
  theirs.send({.magic = Note::kMagic + 1}, soon());
  expect_error(ErrorKind::kInvalidArgument, "bad magic", [&] { ours.try_receive(); });
}

}  // namespace
}  // namespace convoy
