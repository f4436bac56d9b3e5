// Operations on memory that all ranks can reach, which they divide among them as they go.
#include <algorithm>

#include "coll/engine_wait.h"

namespace convoy::coll {
namespace {

// Chunks that ranks take in turn from an operation in shared memory: large enough that taking one
// costs nothing, small enough that ranks finish together.
constexpr std::size_t kLeastChunk = std::size_t{32} << 10;
constexpr std::size_t kMostChunk = std::size_t{1} << 20;
constexpr std::size_t kChunksPerRank = 8;

std::uint64_t tagged(std::uint64_t number, std::uint64_t count) {
  return (number & 0xffffffff) << 32 | count;
}

std::size_t chunk_bytes(std::size_t bytes, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  if (bytes <= n * kLeastChunk) return (bytes / n / kLine + 1) * kLine;
  return std::clamp(bytes / (n * kChunksPerRank) / 4096 * 4096, kLeastChunk, kMostChunk);
}

}  // namespace

// The operation is complete when all chunks are finished; a rank that the scheduler kept away does
// not hold up the others.
void Engine::take_chunks(const Running& running, std::size_t bytes, const ChunkPart& part) {
  const std::size_t chunk = chunk_bytes(bytes, size_);
  const std::uint64_t chunks = (bytes + chunk - 1) / chunk;
  const std::uint64_t number = running.number;
  auto& claimed = group().claimed;
  auto& finished = group().finished;

  // The next chunk to work on; false: all are taken. Words of an earlier operation count as zero.
  const auto take = [&](std::uint64_t& index) {
    std::uint64_t seen = claimed.load(std::memory_order_relaxed);
    for (;;) {
      index = seen >> 32 == (number & 0xffffffff) ? seen & 0xffffffff : 0;
      if (index >= chunks) return false;
      if (claimed.compare_exchange_weak(seen, tagged(number, index + 1),
                                        std::memory_order_acq_rel)) {
        return true;
      }
    }
  };
  const auto finish = [&] {
    std::uint64_t seen = finished.load(std::memory_order_relaxed);
    std::uint64_t next = 0;
    do {
      const bool current = seen >> 32 == (number & 0xffffffff);
      next = current ? seen + 1 : tagged(number, 1);
    } while (!finished.compare_exchange_weak(seen, next, std::memory_order_acq_rel));
  };

  auto& taking = head(rank_).taking;
  taking.store(number << 1 | 1, std::memory_order_seq_cst);
  const auto work = [&](int) {
    for (std::uint64_t index = 0; take(index);) {
      const std::size_t begin = index * chunk;
      part(begin, std::min(chunk, bytes - begin));
      finish();
    }
  };
  if (workers_.threads() == 1) {
    work(0);
  } else {
    workers_.run(std::ref(work));
  }
  taking.store(number << 1, std::memory_order_seq_cst);

  const auto ready = [&] {
    return finished.load(std::memory_order_acquire) == tagged(number, chunks);
  };
  // A rank that died while it took chunks may have left one unfinished. That is known for certain
  // when every living rank has stopped taking.
  const auto blocker = [&] {
    int dead = -1;
    for (int r = 0; r < size_; ++r) {
      const std::uint64_t theirs = head(r).taking.load(std::memory_order_acquire);
      if (gone(r, number)) {
        if (theirs == (number << 1 | 1)) dead = r;
      } else if (theirs != number << 1) {
        return -1;
      }
    }
    return dead;
  };
  const auto lagging = [&] {
    std::vector<int> ranks;
    for (int r = 0; r < size_; ++r) {
      if (head(r).taking.load(std::memory_order_acquire) == (number << 1 | 1)) ranks.push_back(r);
    }
    return ranks;
  };
  wait(running, ready, blocker, lagging);
  ring_sleepers();
}

}  // namespace convoy::coll
