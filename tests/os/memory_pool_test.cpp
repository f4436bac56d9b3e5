#include "os/memory_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "base/guarded.h"
#include "support/expect_error.h"

namespace convoy {
namespace {

using test::expect_error;

bool is_filled(const void* data, std::size_t bytes, int with) {
  const auto* const begin = static_cast<const unsigned char*>(data);
  return std::all_of(begin, begin + bytes, [&](unsigned char each) { return each == with; });
}

// Pages of a range that have memory behind them.
std::size_t resident(const void* data, std::size_t bytes) {
  std::vector<unsigned char> pages(bytes / 4096);
  EXPECT_EQ(::mincore(const_cast<void*>(data), bytes, pages.data()), 0);
  return static_cast<std::size_t>(
      std::count_if(pages.begin(), pages.end(), [](unsigned char each) { return each & 1; }));
}

TEST(MemoryPoolTest, EverySizeIsAlignedAndWastesAtMostAnEighth) {
  auto& pool = MemoryPool::instance();
  EXPECT_EQ(pool.allocate(0), nullptr);
  pool.free(nullptr);
  for (std::size_t bytes = 1; bytes < 600'000; bytes += bytes < 3000 ? 1 : bytes / 97) {
    void* const data = pool.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % MemoryPool::kAlignment, 0u);
    EXPECT_TRUE(pool.owns(data));
    const std::size_t size = pool.size_of(data);
    EXPECT_GE(size, bytes);
    EXPECT_LT(size, bytes + bytes / 8 + MemoryPool::kAlignment) << bytes;
    std::memset(data, 1, bytes);
    pool.free(data);
  }
  int on_the_stack = 0;
  EXPECT_FALSE(pool.owns(&on_the_stack));
}

// Buffers that live at the same time do not overlap, whatever order they come and go in.
TEST(MemoryPoolTest, RandomProgramAgainstAModel) {
  auto& pool = MemoryPool::instance();
  struct Buffer {
    std::size_t bytes;
    int value;
  };
  std::map<void*, Buffer> live;
  std::mt19937_64 random(7);
  const auto below = [&](std::uint64_t n) { return static_cast<std::size_t>(random() % n); };
  std::size_t most = 0;
  std::size_t bytes_live = 0;
  for (int step = 0; step < 20'000; ++step) {
    if (live.empty() || (below(100) < 52 && bytes_live < 200'000'000)) {
      const std::size_t bytes = 1 + below(std::size_t{1} << (4 + below(19)));
      const int value = static_cast<int>(below(251));
      void* const data = pool.allocate(bytes);
      std::memset(data, value, bytes);
      EXPECT_TRUE(live.emplace(data, Buffer{bytes, value}).second);
      bytes_live += bytes;
      most = std::max(most, bytes_live);
    } else {
      auto chosen = live.begin();
      std::advance(chosen,
                   static_cast<std::ptrdiff_t>(below(std::min<std::size_t>(live.size(), 40))));
      ASSERT_TRUE(is_filled(chosen->first, chosen->second.bytes, chosen->second.value));
      bytes_live -= chosen->second.bytes;
      pool.free(chosen->first);
      live.erase(chosen);
    }
    if (step % 1000 == 0) pool.trim();
  }
  const auto stats = pool.stats();
  EXPECT_GE(stats.used_bytes, bytes_live);
  for (const auto& [data, buffer] : live) {
    ASSERT_TRUE(is_filled(data, buffer.bytes, buffer.value));
    pool.free(data);
  }
  EXPECT_LE(pool.stats().used_bytes + bytes_live, stats.used_bytes + MemoryPool::kMostCached);
}

TEST(PageHeapTest, FreedRunsJoin) {
  PageHeap heap;
  const std::size_t bytes = std::size_t{8} << 20;
  std::vector<Span*> parts;
  for (int i = 0; i < 4; ++i) parts.push_back(heap.allocate(bytes, Span::Use::kWhole));
  std::byte* const first = parts[0]->begin;
  for (const std::size_t each : {1, 3, 0, 2}) heap.free(parts[each]);
  Span* const whole = heap.allocate(4 * bytes, Span::Use::kWhole);
  EXPECT_EQ(whole->begin, first);
  EXPECT_EQ(heap.peak_bytes(), 4 * bytes);
  // A run that is free up to the top grows by what is missing.
  heap.free(whole);
  EXPECT_EQ(heap.allocate(5 * bytes, Span::Use::kWhole)->begin, first);
  EXPECT_EQ(heap.find(first)->bytes(), 5 * bytes);
}

// What is cached stays in proportion to what is used.
TEST(PageHeapTest, RunsThatDoNotFitAreGivenBack) {
  PageHeap heap;
  const std::size_t bytes = std::size_t{64} << 20;
  std::vector<Span*> parts;
  for (int i = 0; i < 12; ++i) parts.push_back(heap.allocate(bytes, Span::Use::kWhole));
  for (std::size_t i = 0; i < parts.size(); i += 2) heap.free(parts[i]);
  for (std::size_t i = 1; i + 2 < parts.size(); i += 4) heap.free(parts[i]);
  EXPECT_GT(heap.cached_bytes(), heap.used_bytes());
  heap.allocate(8 * bytes, Span::Use::kWhole);
  EXPECT_EQ(heap.cached_bytes(), 0u);
}

TEST(MemoryPoolTest, TrimGivesMemoryBackAndTheAddressesStay) {
  auto& pool = MemoryPool::instance();
  const std::size_t bytes = std::size_t{16} << 20;
  void* const data = pool.allocate(bytes);
  std::memset(data, 1, bytes);
  EXPECT_EQ(resident(data, bytes), bytes / 4096);
  pool.free(data);
  EXPECT_EQ(resident(data, bytes), bytes / 4096);
  EXPECT_GE(pool.stats().cached_bytes, bytes);
  EXPECT_GE(pool.trim(), bytes);
  EXPECT_EQ(resident(data, bytes), 0u);
  EXPECT_EQ(pool.trim(), 0u);
  void* const again = pool.allocate(bytes);
  EXPECT_TRUE(is_filled(again, bytes, 0));  // fresh from the system
  pool.free(again);
}

TEST(MemoryPoolTest, MoreThanTheMachineHas) {
  auto& pool = MemoryPool::instance();
  const auto before = pool.stats().used_bytes;
  expect_error(ErrorKind::kResource, "cannot get", [&] { pool.allocate(std::size_t{1} << 50); });
  expect_error(ErrorKind::kResource, "cannot get", [&] { pool.allocate(SIZE_MAX - 100); });
  EXPECT_EQ(pool.stats().used_bytes, before);
}

// Every buffer is freed by another thread than made it, and threads end with full caches.
TEST(MemoryPoolTest, BuffersWanderBetweenThreads) {
  auto& pool = MemoryPool::instance();
  pool.trim();
  const auto before = pool.stats();
  struct Parcel {
    void* data;
    std::size_t bytes;
    int value;
  };
  constexpr int kThreads = 4;
  constexpr int kParcels = 3000;
  std::array<Guarded<std::vector<Parcel>>, kThreads> boxes;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&boxes, &pool, t] {
        std::mt19937_64 random(static_cast<std::uint64_t>(t));
        for (int i = 0; i < kParcels; ++i) {
          const std::size_t bytes = 1 + random() % (std::size_t{1} << (random() % 19));
          const int value = static_cast<int>(random() % 251);
          void* const data = pool.allocate(bytes);
          std::memset(data, value, bytes);
          boxes[static_cast<std::size_t>(t + 1) % kThreads].lock()->push_back({data, bytes, value});
          std::vector<Parcel> mine;
          mine.swap(*boxes[static_cast<std::size_t>(t)].lock());
          for (const Parcel& each : mine) {
            EXPECT_TRUE(is_filled(each.data, each.bytes, each.value));
            pool.free(each.data);
          }
          if (i % 1000 == 999) pool.trim();
        }
      });
    }
  }
  for (auto& box : boxes) {
    for (const Parcel& each : *box.lock()) pool.free(each.data);
  }
  pool.trim();
  const auto after = pool.stats();
  EXPECT_EQ(after.used_bytes, before.used_bytes);
  EXPECT_EQ(after.allocations - before.allocations, std::uint64_t{kThreads} * kParcels);
  EXPECT_LT(after.refills - before.refills, std::uint64_t{kThreads} * kParcels);
}

// The destructor of a thread_local that came before the cache runs after the cache is gone.
TEST(MemoryPoolTest, AThreadFreesWhileItEnds) {
  auto& pool = MemoryPool::instance();
  pool.trim();
  const auto before = pool.stats().used_bytes;
  std::thread([] {
    struct Last {
      void* data = nullptr;
      ~Last() {
        auto& mine = MemoryPool::instance();
        mine.free(data);
        mine.free(mine.allocate(100));
      }
    };
    thread_local Last last;
    last.data = nullptr;
    last.data = MemoryPool::instance().allocate(1000);
  }).join();
  pool.trim();
  EXPECT_EQ(pool.stats().used_bytes, before);
}

// A child made while other threads allocate can allocate, and does not disturb its parent.
TEST(MemoryPoolTest, AForkedChildGoesOn) {
  auto& pool = MemoryPool::instance();
  void* const data = pool.allocate(300'000);
  std::memset(data, 5, 300'000);
  std::jthread busy([&pool](const std::stop_token& stop) {
    for (std::size_t i = 0; !stop.stop_requested(); ++i) pool.free(pool.allocate(1 + i % 300'000));
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      bool good = is_filled(data, 300'000, 5);
      std::memset(data, 6, 300'000);
      for (std::size_t bytes = 1; bytes < 1'000'000; bytes *= 2) {
        void* const mine = pool.allocate(bytes);
        std::memset(mine, 7, bytes);
        good = good && is_filled(mine, bytes, 7);
        pool.free(mine);
      }
      pool.free(data);
      ::_exit(good ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_TRUE(is_filled(data, 300'000, 5));
  pool.free(data);
}

}  // namespace
}  // namespace convoy
