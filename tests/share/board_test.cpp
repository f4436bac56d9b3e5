// The protocols of Published and Slots, without torch: for the sanitizers too.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "share/slot_ring.h"
#include "share/version_board.h"
#include "support/deadlines.h"
#include "support/expect_error.h"

namespace convoy::share::test {
namespace {

using convoy::test::at_once;
using convoy::test::expect_error;
using convoy::test::soon;

struct Memory {
  explicit Memory(std::size_t size) : bytes((size + 63) / 64) {}
  std::span<std::byte> span() {
    return {reinterpret_cast<std::byte*>(bytes.data()), bytes.size() * 64};
  }
  struct alignas(64) Line {
    std::byte content[64];
  };
  std::vector<Line> bytes;
};

constexpr std::size_t kWords = 64;

struct Board {
  explicit Board(std::size_t buffers)
      : memory(VersionBoard::bytes_for(buffers, kWords * 8, 6)),
        board(VersionBoard::create(memory.span(), buffers, kWords * 8, "layout")) {}

  std::uint64_t* words(std::size_t buffer) const {
    return reinterpret_cast<std::uint64_t*>(board.data(buffer));
  }
  std::uint64_t publish(const Deadline& deadline = at_once()) const {
    const std::size_t buffer = board.begin(deadline);
    const std::uint64_t next = board.version() + 1;
    for (std::size_t i = 0; i < kWords; ++i) words(buffer)[i] = next;
    return board.publish(buffer);
  }
  // Of the pinned buffer: all words are its version.
  bool whole(const VersionBoard::Pinned& pinned) const {
    for (std::size_t i = 0; i < kWords; ++i) {
      if (words(pinned.buffer)[i] != pinned.version) return false;
    }
    return true;
  }

  Memory memory;
  VersionBoard board;
};

TEST(VersionBoardTest, TheNewestIsRead) {
  const Board b(3);
  const std::size_t slot = b.board.enter();
  EXPECT_EQ(b.board.layout(), "layout");
  EXPECT_EQ(b.board.version(), 0U);
  EXPECT_FALSE(b.board.pin(slot));
  for (std::uint64_t version = 1; version < 20; ++version) {
    EXPECT_EQ(b.publish(), version);
    const auto pinned = b.board.pin(slot);
    ASSERT_TRUE(pinned);
    EXPECT_EQ(pinned->version, version);
    EXPECT_TRUE(b.whole(*pinned));
    b.board.unpin(slot, pinned->buffer);
  }
  b.board.leave(slot);
}

// A held version stays as it is; when all buffers are held nothing is published, and nothing of
// what is there changes.
TEST(VersionBoardTest, HeldVersionsStay) {
  const Board b(3);
  const std::size_t slot = b.board.enter();
  std::vector<VersionBoard::Pinned> held;
  for (int i = 0; i < 3; ++i) {
    b.publish();
    held.push_back(*b.board.pin(slot));
  }
  EXPECT_EQ(b.board.holders(), std::vector<ProcessWord>{own_process_word()});
  expect_error(ErrorKind::kResource, "all 3 buffers", [&] { b.publish(); });
  EXPECT_EQ(b.board.version(), 3U);
  for (const auto& pinned : held) EXPECT_TRUE(b.whole(pinned));
  b.board.unpin(slot, held[1].buffer);
  EXPECT_EQ(b.publish(), 4U);
  EXPECT_TRUE(b.whole(held[0]));
  EXPECT_TRUE(b.whole(held[2]));
  b.board.unpin(slot, held[0].buffer);
  b.board.unpin(slot, held[2].buffer);
  b.board.leave(slot);
  EXPECT_TRUE(b.board.holders().empty());
}

// A slot of a process that is no more, and a writer that is no more.
TEST(VersionBoardTest, TheDeadHoldNothing) {
  const Board b(2);
  b.publish();
  const std::size_t slot = b.board.enter();
  const auto pinned = *b.board.pin(slot);
  b.publish();
  expect_error(ErrorKind::kResource, "all 2 buffers", [&] { b.publish(); });
  // As if another process had done all this, and died in the middle of publishing.
  const ProcessWord dead = process_word(::getpid(), 1);
  auto* const head = reinterpret_cast<BoardHead*>(const_cast<Board&>(b).memory.span().data());
  auto* const readers =
      reinterpret_cast<BoardReader*>(reinterpret_cast<std::byte*>(head) +
                                     (sizeof(BoardHead) + 2 * sizeof(BoardBuffer) + 63) / 64 * 64);
  ASSERT_EQ(readers[slot].process.load(), own_process_word());
  ASSERT_EQ(readers[slot].pins[pinned.buffer].load(), 1U);
  readers[slot].process = dead;
  head->writer = dead;
  head->writing = dead;
  EXPECT_EQ(b.publish(), 3U);
  EXPECT_EQ(b.board.writer(), own_process_word());
  EXPECT_EQ(readers[slot].process.load(), 0U);
  // Its pins are not those of who gets the slot next.
  const std::size_t again = b.board.enter();
  EXPECT_EQ(again, slot);
  EXPECT_TRUE(b.board.holders().empty());
  b.board.leave(again);
  // One that lives is another matter.
  head->writer = process_word(1, 0);
  if (!is_dead(process_word(1, 0), own_domain())) {
    expect_error(ErrorKind::kInvalidArgument, "published by pid 1", [&] { b.publish(); });
  }
}

TEST(VersionBoardTest, OneWriterAtATime) {
  const Board b(3);
  const std::size_t buffer = b.board.begin(at_once());
  expect_error(ErrorKind::kInvalidArgument, "another thread", [&] { b.publish(); });
  b.board.give_up();
  EXPECT_NE(buffer, 99U);
  EXPECT_EQ(b.publish(), 1U);
}

TEST(VersionBoardTest, OtherBytesAreRefused) {
  Memory memory(100'000);
  expect_error(ErrorKind::kInvalidArgument, "refused", [&] { VersionBoard::open(memory.span()); });
  VersionBoard::create(memory.span(), 2, 100, "x");
  reinterpret_cast<BoardHead*>(memory.span().data())->buffer_bytes = 90'000;
  expect_error(ErrorKind::kInvalidArgument, "refused", [&] { VersionBoard::open(memory.span()); });
  expect_error(ErrorKind::kInvalidArgument, "2 to 16", [] { VersionBoard::bytes_for(17, 1, 1); });
}

// A writer and readers that hold what they read for a while: nothing is torn, and nobody waits.
TEST(VersionBoardTest, NothingIsTorn) {
  constexpr int kReads = 20'000;
  const Board b(5);
  b.publish();
  std::vector<std::jthread> readers;
  std::atomic<int> torn{0}, reading{3};
  for (unsigned r = 0; r < 3; ++r) {
    readers.emplace_back([&, r] {
      std::mt19937 random(r);
      const std::size_t slot = b.board.enter();
      std::uint64_t last = 0;
      for (int i = 0; i < kReads; ++i) {
        const auto pinned = b.board.pin(slot);
        if (random() % 16 == 0) std::this_thread::yield();
        if (!pinned || !b.whole(*pinned) || pinned->version < last) ++torn;
        last = pinned->version;
        b.board.unpin(slot, pinned->buffer);
      }
      b.board.leave(slot);
      --reading;
    });
  }
  // Five buffers: the newest, one of each reader, and one to write to.
  while (reading > 0) b.publish();
  readers.clear();
  EXPECT_EQ(torn.load(), 0);
  EXPECT_GT(b.board.version(), 100U);
}

TEST(VersionBoardTest, WaitNewer) {
  const Board b(3);
  b.publish();
  EXPECT_TRUE(b.board.wait_newer(0, at_once()));
  EXPECT_FALSE(b.board.wait_newer(1, Deadline::after(std::chrono::milliseconds(1))));
  std::jthread waiter([&] { EXPECT_TRUE(b.board.wait_newer(5, soon())); });
  while (b.publish() < 6) {
  }
}

struct Ring {
  explicit Ring(std::size_t slots)
      : memory(SlotRing::bytes_for(slots, 64, 6)),
        ring(SlotRing::create(memory.span(), slots, 64, "layout")) {}

  SlotEntry* entries() {
    return reinterpret_cast<SlotEntry*>(memory.span().data() + sizeof(SlotHead));
  }
  Memory memory;
  SlotRing ring;
};

TEST(SlotRingTest, InTheOrderOfCommits) {
  const Ring r(4);
  std::vector<std::size_t> slots;
  for (int i = 0; i < 4; ++i) slots.push_back(*r.ring.fill(at_once()));
  expect_error(ErrorKind::kTimeout, "no slot to fill: of 4 slots 0 are free, 4 being filled",
               [&] { r.ring.fill(at_once()); });
  for (const std::size_t i : {2U, 0U, 3U, 1U}) r.ring.commit(slots[i]);
  for (const std::size_t i : {2U, 0U, 3U, 1U}) {
    const auto slot = r.ring.read(at_once());
    EXPECT_EQ(slot, slots[i]);
    r.ring.release(*slot);
  }
  expect_error(ErrorKind::kTimeout, "no slot to read", [&] { r.ring.read(at_once()); });
  EXPECT_EQ(r.ring.counts().free, 4U);
}

TEST(SlotRingTest, Close) {
  const Ring r(2);
  r.ring.commit(*r.ring.fill(at_once()));
  r.ring.close();
  EXPECT_FALSE(r.ring.fill(soon()));
  EXPECT_EQ(r.ring.read(soon()), 0U);
  EXPECT_FALSE(r.ring.read(soon()));
}

// What dead processes held: half-filled slots are free, half-read ones ready.
TEST(SlotRingTest, TheDeadHoldNothing) {
  Ring r(2);
  const ProcessWord dead = process_word(::getpid(), 1);
  const std::size_t first = *r.ring.fill(at_once());
  r.ring.commit(first);
  EXPECT_EQ(r.ring.read(at_once()), first);
  const std::size_t second = *r.ring.fill(at_once());
  EXPECT_EQ(r.ring.reclaim(), 0U);  // this process lives
  r.entries()[first].state = std::uint64_t{3} << 62 | dead;
  r.entries()[second].state = std::uint64_t{1} << 62 | dead;
  EXPECT_EQ(r.ring.fill(soon()), second);  // whoever waits takes it back
  EXPECT_EQ(r.ring.read(soon()), first);
  EXPECT_EQ(r.ring.number(first), 1U);
  const auto counts = r.ring.counts();
  EXPECT_EQ(counts.abandoned, 1U);
  EXPECT_EQ(counts.returned, 1U);
}

// Fillers and readers: every number is read once, whole.
TEST(SlotRingTest, EverySlotIsReadOnce) {
  constexpr int kEach = 5'000, kFillers = 3, kReaders = 2;
  const Ring r(4);
  std::atomic<int> left{kFillers};
  std::atomic<int> wrong{0};
  std::vector<std::jthread> threads;
  for (int f = 0; f < kFillers; ++f) {
    threads.emplace_back([&, f] {
      for (int i = 0; i < kEach; ++i) {
        const std::size_t slot = *r.ring.fill(soon());
        auto* const words = reinterpret_cast<int*>(r.ring.data(slot));
        words[0] = f * kEach + i;
        words[15] = words[0];
        r.ring.commit(slot);
      }
      if (left.fetch_sub(1) == 1) r.ring.close();
    });
  }
  std::vector<std::atomic<int>> seen(kEach * kFillers);
  for (int reader = 0; reader < kReaders; ++reader) {
    threads.emplace_back([&] {
      while (const auto slot = r.ring.read(soon())) {
        const auto* const words = reinterpret_cast<const int*>(r.ring.data(*slot));
        if (words[0] != words[15]) ++wrong;
        seen[static_cast<std::size_t>(words[0])].fetch_add(1);
        r.ring.release(*slot);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(wrong.load(), 0);
  for (auto& times : seen) EXPECT_EQ(times.load(), 1);
}

}  // namespace
}  // namespace convoy::share::test
