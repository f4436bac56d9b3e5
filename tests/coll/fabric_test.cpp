#include "transport/shm/fabric.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/error.h"
#include "os/socket.h"
#include "support/rank_group.h"

namespace convoy::shm {
namespace {

using namespace std::chrono_literals;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using testing::HasSubstr;

// Strangers that greet and go leave nothing behind.
TEST(FabricTest, ConnectionsThatNobodyWantsAreClosed) {
  Fabric& fabric = Fabric::instance();
  const auto before = fabric.stats().unclaimed;
  {
    std::vector<Socket> strangers;
    for (int i = 0; i < 39; ++i) {
      strangers.push_back(Socket::connect(fabric.self().socket, Deadline::after(10s)));
      const Frame hello{.type = Frame::kHello, .process = Id::random()};
      strangers.back().send(std::as_bytes(std::span(&hello, 1)), Deadline::after(10s));
    }
    const auto limit = Deadline::after(20s);
    while (fabric.stats().unclaimed < before + 39 && !limit.expired()) std::this_thread::yield();
    EXPECT_EQ(fabric.stats().unclaimed, before + 39) << "they are kept while the others are there";
  }
  const auto limit = Deadline::after(20s);
  while (fabric.stats().unclaimed != 0 && !limit.expired()) std::this_thread::yield();
  EXPECT_EQ(fabric.stats().unclaimed, 0u);
}

// A block is kept as long as somebody looks into it to find out whether another one is free.
TEST(FabricTest, WhatAQuarantineReadsIsKeptToo) {
  Fabric& fabric = Fabric::instance();
  const auto before = fabric.stats().quarantined_blocks;
  auto control = std::make_unique<Block>(fabric.allocate(1 << 20));
  auto data = std::make_unique<Block>(fabric.allocate(1 << 20));
  const Location place = control->location();
  auto* const word = new (control->data()) std::atomic<int>(0);
  fabric.quarantine(data->location(), [word] { return word->load() == 1; }, place);
  fabric.quarantine(place, [] { return true; });  // its own reason to stay is over first
  data.reset();
  control.reset();
  EXPECT_EQ(fabric.stats().quarantined_blocks, before + 2);
  std::vector<Block> others;
  for (int i = 0; i < 8; ++i) {
    others.push_back(fabric.allocate(1 << 20));
    EXPECT_FALSE(others.back().location() == place) << "it was handed out, and is still looked at";
  }
  word->store(1);
  EXPECT_EQ(fabric.stats().quarantined_blocks, before);
}

// The process there is told nothing of a connection that could not be made complete, and the next
// try works.
TEST(FabricTest, AConnectionThatFailsHalfwayIsGivenUp) {
  RankGroup(2, RankMode::kProcesses).run([](Rank& r) {
    Fabric& fabric = Fabric::instance();
    r.store()->set(concat("process/", r.id()), fabric.self().encode());
    const auto other = ProcessInfo::decode(r.store()->get(concat("process/", 1 - r.id())));
    const auto deadline = Deadline::after(20s);
    if (r.id() == 0) {
      // Memory whose descriptor is not open cannot be sent. Its number must not be used again at
      // once: there are smaller ones.
      std::vector<UniqueFd> smaller;
      for (int i = 0; i < 16; ++i) smaller.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      const auto before = fabric.descriptors();
      const Block block = fabric.allocate(fabric.stats().mapped_bytes + (1 << 20));
      int fd = -1;
      for (const int one : fabric.descriptors()) {
        if (std::find(before.begin(), before.end(), one) == before.end()) fd = one;
      }
      ASSERT_GT(fd, smaller.back().get());
      const UniqueFd saved(fcntl(fd, F_DUPFD_CLOEXEC, 0));
      smaller.clear();
      ::close(fd);
      EXPECT_THROW(fabric.connect(other, deadline), Error);
      EXPECT_EQ(fabric.stats().peers, 0u);
      dup3(saved.get(), fd, O_CLOEXEC);
      r.barrier();
      EXPECT_NE(fabric.connect(other, deadline), nullptr);
      r.barrier();
    } else {
      std::shared_ptr<Peer> first;
      try {
        first = fabric.connect(other, Deadline::after(3s));
        while (!first->lost() && !deadline.expired()) std::this_thread::yield();
        EXPECT_TRUE(first->lost());
      } catch (const Error& error) {
        // The other side had given up before this one asked.
        EXPECT_EQ(error.kind(), ErrorKind::kTimeout) << error.what();
      }
      r.barrier();
      const auto second = fabric.connect(other, deadline);
      EXPECT_NE(second, first);
      EXPECT_FALSE(second->lost());
      r.barrier();
    }
  });
}

}  // namespace
}  // namespace convoy::shm
