// The book of a region: who holds which block, with threads that stand for processes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "os/segment.h"
#include "share/book.h"
#include "share/pool.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::share {
namespace {

using convoy::test::expect_error;

struct BookTest : testing::Test {
  static constexpr std::size_t kBytes = std::size_t{64} << 12;
  Segment memory = Segment::create(kBytes, "share");
  Book book = Book::create(memory.data(), kBytes, BookHead::kOwned, own_process_word());
  const std::uint64_t first = book.head().first;

  // All others live.
  int claim(ProcessWord process) const {
    return book.claim_slot(process, [](ProcessWord) { return false; });
  }
  // What a slot holds.
  std::atomic<ProcessWord>& word(int slot) const {
    return reinterpret_cast<std::atomic<ProcessWord>*>(memory.data() + sizeof(BookHead))[slot];
  }
};

TEST_F(BookTest, ABlockLivesWhileAnybodyHoldsIt) {
  const auto generation = book.begin(first, 100);
  const int a = claim(process_word(1000, 1)), b = claim(process_word(1001, 1));
  EXPECT_NE(a, b);
  EXPECT_EQ(claim(process_word(1000, 1)), a);
  EXPECT_TRUE(book.acquire(first, generation, a));
  EXPECT_FALSE(book.try_end(first));
  EXPECT_TRUE(book.acquire(first, generation, b));
  book.release(first, a);
  EXPECT_FALSE(book.try_end(first));
  book.release(first, b);
  EXPECT_TRUE(book.try_end(first));
  EXPECT_FALSE(book.acquire(first, generation, a));  // too late
  EXPECT_EQ(book.generation(first), std::nullopt);
  const auto next = book.begin(first, 100);
  EXPECT_NE(next, generation);
  EXPECT_FALSE(book.acquire(first, generation, a));  // of the block before
  EXPECT_TRUE(book.try_end(first));
}

TEST_F(BookTest, HandlesUnderWayHoldIt) {
  const auto generation = book.begin(first, 100);
  const int slot = claim(process_word(1000, 1));
  book.enter_transit(first);
  EXPECT_FALSE(book.try_end(first));
  EXPECT_TRUE(book.acquire(first, generation, slot));
  EXPECT_TRUE(book.leave_transit(first));
  EXPECT_FALSE(book.leave_transit(first));
  EXPECT_FALSE(book.try_end(first));
  book.release(first, slot);
  EXPECT_TRUE(book.try_end(first));
}

TEST_F(BookTest, DeadProcessesHoldNothing) {
  const auto generation = book.begin(first, 100);
  const int dead = claim(process_word(1000, 1));
  const int other = claim(process_word(1001, 1));
  EXPECT_TRUE(book.acquire(first, generation, dead));
  EXPECT_TRUE(book.acquire(first, generation, other));
  book.drop_slot(dead, process_word(1001, 1), own_process_word());  // not the slot's
  EXPECT_EQ(book.slot(dead), process_word(1000, 1));
  book.drop_slot(dead, process_word(1000, 1), own_process_word());
  EXPECT_FALSE(book.try_end(first));
  EXPECT_EQ(book.slot(dead), 0U);
  book.drop_slot(other, process_word(1001, 1), own_process_word());
  EXPECT_TRUE(book.try_end(first));
  EXPECT_EQ(word_liveness(own_process_word(), own_domain()), Liveness::kAlive);
  EXPECT_EQ(word_liveness(process_word(::getpid(), 1), own_domain()), Liveness::kDead);
  // Of another namespace nothing is known.
  EXPECT_EQ(word_liveness(process_word(::getpid(), 1), own_domain() + 1), Liveness::kUnknown);
  EXPECT_EQ(word_liveness(process_word(::getpid(), 1), 0), Liveness::kUnknown);
}

TEST_F(BookTest, AtMostSoManyProcesses) {
  for (int i = 0; i < kMostHolders; ++i) claim(process_word(2 + i, 7));
  expect_error(ErrorKind::kResource, "256 processes", [&] { claim(process_word(9999, 7)); });
  book.drop_slot(200, process_word(202, 7), own_process_word());
  EXPECT_EQ(claim(process_word(9999, 7)), 200);
}

// Also when nobody is there to clear up after the dead.
TEST_F(BookTest, ASlotOfADeadProcessIsTakenOver) {
  const auto generation = book.begin(first, 100);
  int dead = 0;
  for (int i = 0; i < kMostHolders; ++i) {
    const int slot = claim(process_word(2 + i, 7));
    if (i == 77) dead = slot;
  }
  ASSERT_TRUE(book.acquire(first, generation, dead));
  const ProcessWord gone = process_word(2 + 77, 7);
  const auto is_dead = [&](ProcessWord word) { return word == gone; };
  EXPECT_EQ(book.claim_slot(process_word(9999, 7), is_dead), dead);
  EXPECT_EQ(book.slot(dead), process_word(9999, 7));
  EXPECT_EQ(book.claim_slot(process_word(9999, 7), is_dead), dead);
  expect_error(ErrorKind::kResource, "256 processes",
               [&] { book.claim_slot(process_word(9998, 7), is_dead); });
  EXPECT_TRUE(book.try_end(first)) << "the bit of the dead process is still there";
}

// Whoever clears up after a dead process may die of it.
TEST_F(BookTest, ATakeoverThatWasBrokenOffIsDoneAgain) {
  const auto generation = book.begin(first, 100);
  for (int i = 0; i < kMostHolders; ++i) claim(process_word(2 + i, 7));
  ASSERT_TRUE(book.acquire(first, generation, 5));
  const ProcessWord taker = process_word(5000, 7);
  word(5).store(taker | Book::kTakingOver);
  EXPECT_EQ(book.slot(5), taker);
  // While it lives, it is its own.
  expect_error(ErrorKind::kResource, "256 processes", [&] { claim(process_word(9999, 7)); });
  book.drop_slot(5, process_word(7, 7), own_process_word());  // seen before
  EXPECT_EQ(book.slot(5), taker);
  EXPECT_FALSE(book.try_end(first));
  const auto is_dead = [&](ProcessWord seen) { return seen == taker; };
  EXPECT_EQ(book.claim_slot(process_word(9999, 7), is_dead), 5);
  EXPECT_EQ(word(5).load(), process_word(9999, 7));
  EXPECT_TRUE(book.try_end(first));

  word(6).store(taker | Book::kTakingOver);
  book.drop_slot(6, taker, own_process_word());
  EXPECT_EQ(word(6).load(), 0U);
}

// Threads stand for one process after another, which die with what they hold or let go of it. Two
// never have one slot, and nobody's bit is cleared by a takeover that comes late. Owners and users
// clear up after the dead.
TEST_F(BookTest, ManyProcessesOneAfterAnother) {
  constexpr ProcessWord kThreads = 4, kLives = 500, kMost = kThreads * kLives;
  const auto generation = book.begin(first, 100);
  std::vector<std::atomic<bool>> dead(kMost + 1);  // by the word of the process
  // What it finds is old when it is used.
  const auto is_dead = [&](ProcessWord word) {
    const bool found = word <= kMost && dead[word].load();
    if (word % 2 == 0) std::this_thread::yield();
    return found;
  };
  // Others live for ever and leave few slots.
  for (int i = 0; i < kMostHolders - 8; ++i) {
    claim(process_word(2 + i, 7));
  }
  // All slots may be in the hands of others who clear them.
  const auto claim_patiently = [&](ProcessWord self) {
    for (;;) {
      try {
        return book.claim_slot(self, is_dead);
      } catch (const Error&) {
        std::this_thread::yield();
      }
    }
  };
  std::array<std::atomic<ProcessWord>, kMostHolders> users{};
  std::atomic<int> wrong{0};
  std::atomic<bool> done{false};
  std::jthread owner([&] {
    while (!done) {
      for (int i = 0; i < kMostHolders; ++i) {
        const ProcessWord user = book.slot(i);
        if (user != 0 && is_dead(user)) book.drop_slot(i, user, own_process_word());
      }
      std::this_thread::yield();
    }
  });
  {
    std::vector<std::jthread> threads;
    for (ProcessWord t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (ProcessWord life = 0; life < kLives; ++life) {
          const ProcessWord self = 1 + life * kThreads + t;
          const int slot = claim_patiently(self);
          auto& user = users[static_cast<std::size_t>(slot)];
          const ProcessWord before = user.exchange(self);
          if (before != 0 && !is_dead(before)) ++wrong;
          if (!book.acquire(first, generation, slot)) ++wrong;
          const auto& holders = book.entry(first).holders[static_cast<std::size_t>(slot) / 64];
          for (int look = 0; look < 3; ++look) {
            std::this_thread::yield();
            if ((holders.load() >> (slot % 64) & 1) == 0 || book.slot(slot) != self) ++wrong;
          }
          if (life % 4 == 0) book.release(first, slot);
          dead[self] = true;
        }
      });
    }
  }
  done = true;
  owner.join();
  EXPECT_EQ(wrong, 0);
  for (int i = 0; i < kMostHolders; ++i) {
    if (book.slot(i) != 0) book.drop_slot(i, book.slot(i), own_process_word());
  }
  EXPECT_TRUE(book.try_end(first));
}

TEST_F(BookTest, MemoryThatIsNoBookIsRefused) {
  EXPECT_NO_THROW(Book::open(memory.data(), kBytes));
  const auto refused = [&](std::size_t bytes) {
    expect_error(ErrorKind::kInvalidArgument, "not a region",
                 [&] { Book::open(memory.data(), bytes); });
  };
  refused(kBytes / 2);
  refused(4096);
  book.head().first += 4096;
  refused(kBytes);
  book.head().first -= 4096;
  book.head().magic = 1;
  refused(kBytes);
  EXPECT_FALSE(book.is_block(0, 10));
  EXPECT_FALSE(book.is_block(first + 1, 10));
  EXPECT_FALSE(book.is_block(first, kBytes));
  EXPECT_FALSE(book.is_block(kBytes, 0));
  EXPECT_TRUE(book.is_block(first, kBytes - first));
}

// A block goes round among "processes", each of which lets go only when the next one holds it; the
// owner tries to end it all the time. It never succeeds before the last one has let go.
TEST_F(BookTest, NeverEndedWhileItGoesRound) {
  constexpr int kProcesses = 8, kRounds = 2000;
  std::vector<int> slots;
  // Spread over all words of holders.
  for (int i = 0; i < kMostHolders; ++i) {
    const int slot = claim(process_word(100 + i, 1));
    if (i % (kMostHolders / kProcesses) == 0) slots.push_back(slot);
  }
  for (int round = 0; round < 20; ++round) {
    const auto generation = book.begin(first, 1);
    std::atomic<int> turn{0};
    std::atomic<bool> ended{false}, done{false};
    ASSERT_TRUE(book.acquire(first, generation, slots[0]));
    std::jthread owner([&] {
      while (!done) {
        if (book.try_end(first)) ended = true;
      }
    });
    {
      std::vector<std::jthread> holders;
      for (int i = 0; i < 2; ++i) {
        holders.emplace_back([&, i] {
          for (int t = i; t < kRounds / 20; t += 2) {
            while (turn.load() != t) std::this_thread::yield();
            const int from = slots[static_cast<std::size_t>(t % kProcesses)];
            const int to = slots[static_cast<std::size_t>((t + 3) % kProcesses)];
            if (!book.acquire(first, generation, to)) ended = true;
            book.release(first, from);
            if (t + 1 < kRounds / 20) {
              // The next one takes from its own: hand over to it.
              const int next = slots[static_cast<std::size_t>((t + 1) % kProcesses)];
              if (!book.acquire(first, generation, next)) ended = true;
              if (next != to) book.release(first, to);
            }
            turn = t + 1;
          }
        });
      }
    }
    EXPECT_FALSE(ended);
    done = true;
    owner.join();
    for (const int slot : slots) book.release(first, slot);
    if (book.generation(first)) {
      EXPECT_TRUE(book.try_end(first));
    }
  }
}

TEST(PoolTest, TakesTheSmallestHoleAndJoinsNeighbours) {
  Pool pool;
  pool.add(Region::create_pool(1 << 20));
  const auto a = pool.take(5000), b = pool.take(4096), c = pool.take(1), d = pool.take(40000);
  ASSERT_TRUE(a && b && c && d);
  EXPECT_EQ(a->bytes, 8192U);
  EXPECT_EQ(b->offset, a->offset + a->bytes);
  pool.give_back(*b);
  const auto again = pool.take(4000);  // the hole of b, not the large one behind
  EXPECT_EQ(again->offset, b->offset);
  pool.give_back(*a);
  pool.give_back(*c);
  pool.give_back(*again);
  const auto joined = pool.take(8192 + 4096 + 4096);
  EXPECT_EQ(joined->offset, a->offset);
  EXPECT_EQ(pool.take_unused(), nullptr);
  pool.give_back(*joined);
  pool.give_back(*d);
  EXPECT_EQ(pool.take(1 << 20), std::nullopt);
  EXPECT_NE(pool.take_unused(), nullptr);
  EXPECT_EQ(pool.bytes(), 0U);
}

TEST(PoolTest, RegionsHaveRoomForTheirBook) {
  Pool pool;
  const std::size_t bytes = Pool::region_bytes_for(123456789);
  EXPECT_GE(bytes - Book::head_bytes(bytes), 123456789U);
  EXPECT_LT(bytes, std::size_t{126'000'000});
  EXPECT_GE(pool.next_region_bytes(1), std::size_t{4} << 20);
}

// Against a simple model: what is handed out never overlaps.
TEST(PoolTest, RandomUse) {
  Pool pool;
  pool.add(Region::create_pool(4 << 20));
  std::mt19937 random(1);
  std::vector<Pool::Place> taken;
  std::vector<bool> used((4 << 20) / kBookPage);
  for (int step = 0; step < 20000; ++step) {
    if (taken.empty() || random() % 2 == 0) {
      const auto place = pool.take(1 + random() % 60000);
      if (!place) continue;
      for (std::size_t p = 0; p < place->bytes / kBookPage; ++p) {
        const std::size_t page = place->offset / kBookPage + p;
        ASSERT_FALSE(used[page]);
        used[page] = true;
      }
      taken.push_back(*place);
    } else {
      std::swap(taken[random() % taken.size()], taken.back());
      for (std::size_t p = 0; p < taken.back().bytes / kBookPage; ++p) {
        used[taken.back().offset / kBookPage + p] = false;
      }
      pool.give_back(taken.back());
      taken.pop_back();
    }
  }
  for (const auto& place : taken) pool.give_back(place);
  EXPECT_NE(pool.take_unused(), nullptr);
}

}  // namespace
}  // namespace convoy::share
