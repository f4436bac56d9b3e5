#include <algorithm>
#include <cstring>

#include "base/error.h"
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
  const std::size_t even = bytes / (static_cast<std::size_t>(ranks) * kChunksPerRank);
  return std::clamp(even / 4096 * 4096, kLeastChunk, kMostChunk);
}

}  // namespace

void Engine::all_reduce(const Running& running) {
  const Call& call = *running.call;
  const std::size_t bytes = call.bytes();
  if (size_ == 1) {
    if (bytes == 0) return;
    const std::byte* const source = call.input;
    std::byte* const target = call.output;
    return reduce(call.reduction(1), {&source, 1}, {&target, 1}, call.signature.count,
                  StoreHint::kCached);
  }
  if (bytes == 0) return;
  if (bytes <= layout_.eager_bytes()) return reduce_small(running);

  bool all_shared = true;
  for (int r = 0; r < size_; ++r) {
    const Slot& theirs = slot(r, running.number);
    const auto i = static_cast<std::size_t>(r);
    inputs_[i] = r == rank_     ? const_cast<std::byte*>(call.input)
                 : theirs.input ? peer_memory(running, r, theirs.input, bytes)
                                : nullptr;
    outputs_[i] = r == rank_      ? call.output
                  : theirs.output ? peer_memory(running, r, theirs.output, bytes)
                                  : nullptr;
    all_shared &= theirs.input && theirs.output;
  }
  if (all_shared) {
    tuned(running, Route::kDirect, [&](StoreHint hint) { reduce_in_place(running, hint); });
  } else {
    tuned(running, Route::kStaged, [&](StoreHint hint) { reduce_staged(running, hint); });
  }
}

// From the slots, each rank for itself. No rank waits for another after this: the slots stay as
// they are until everyone has arrived at the next operation.
void Engine::reduce_small(const Running& running) {
  const Call& call = *running.call;
  const bool tiny = call.bytes() <= kInlineBytes;
  for (int r = 0; r < size_; ++r) {
    sources_[static_cast<std::size_t>(r)] =
        tiny ? slot(r, running.number).small.data() : layout_.payload(base_, r, running.number);
  }
  std::byte* const target = call.output;
  reduce(call.reduction(size_), sources_, {&target, 1}, call.signature.count, StoreHint::kCached);
}

// All inputs and outputs are visible to all ranks: whoever takes a chunk reduces it over all inputs
// and writes it to all outputs. The operation is complete when all chunks are finished; a rank that
// the scheduler kept away does not hold up the others.
void Engine::reduce_in_place(const Running& running, StoreHint hint) {
  const Call& call = *running.call;
  const std::size_t element = size_of(call.signature.type);
  const std::size_t bytes = call.bytes();
  const std::size_t chunk = chunk_bytes(bytes, size_);
  const std::uint64_t chunks = (bytes + chunk - 1) / chunk;
  const std::uint64_t number = running.number;
  const Reduction reduction = call.reduction(size_);
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
    std::array<const std::byte*, kMaxRanks> sources;
    std::array<std::byte*, kMaxRanks> targets;
    const auto n = static_cast<std::size_t>(size_);
    for (std::uint64_t index = 0; take(index);) {
      const std::size_t begin = index * chunk;
      const std::size_t length = std::min(chunk, bytes - begin);
      for (std::size_t r = 0; r < n; ++r) {
        sources[r] = inputs_[r] + begin;
        targets[r] = outputs_[r] + begin;
      }
      reduce(reduction, {sources.data(), n}, {targets.data(), n}, length / element, hint);
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

// Rounds of one slice a rank. In round t rank r reduces slice r: its own input directly, inputs in
// shared memory directly, the others' from their staging buffers; it writes the result to its own
// output, to outputs in shared memory, and to its result buffer if some output is private.
//
// Every iteration t makes two steps: A(t + 1), "my data for round t + 1 is staged", and B(t), "I
// have reduced my slice of round t". Two buffers of each kind suffice: staging for round t + 1
// overwrites that of t - 1, which B(t - 1) of all ranks, awaited before, has released; the result
// of round t overwrites that of t - 2, which everyone has copied before A(t), also awaited before.
void Engine::reduce_staged(const Running& running, StoreHint staging) {
  const Call& call = *running.call;
  const std::size_t element = size_of(call.signature.type);
  const std::size_t bytes = call.bytes();
  const auto n = static_cast<std::size_t>(size_);
  const auto me = static_cast<std::size_t>(rank_);
  // Small operations are cut so that every rank has a slice.
  const std::size_t even = ((bytes + n - 1) / n + kLine - 1) / kLine * kLine;
  const std::size_t slice = std::min(layout_.slice_bytes(), even);
  const std::size_t round_bytes = slice * n;
  const std::uint64_t rounds = (bytes + round_bytes - 1) / round_bytes;
  const Reduction reduction = call.reduction(size_);
  // Results that go back to where they came from are in the cache already, if they fit.
  const StoreHint writing = StoreHint::kCached;
  const bool private_input = !slot(rank_, running.number).input;
  const bool private_output = !slot(rank_, running.number).output;
  bool any_private_output = false;
  for (int r = 0; r < size_; ++r) any_private_output |= !slot(r, running.number).output;

  const auto range = [&](std::uint64_t round, std::size_t owner) {
    const std::size_t begin = std::min(bytes, round * round_bytes + owner * slice);
    return std::pair(begin, std::min(slice, bytes - begin));
  };
  // Where `from`'s data for `owner` lies in its staging buffer: slices of the others, in order.
  const auto place = [&](std::size_t from, std::size_t owner) {
    return (owner < from ? owner : owner - 1) * slice;
  };
  const auto stage = [&](std::uint64_t round) {
    if (!private_input || round >= rounds) return;
    std::byte* buffer = layout_.stage(base_, rank_, round);
    for (std::size_t owner = 0; owner < n; ++owner) {
      const auto [begin, length] = range(round, owner);
      if (owner == me || length == 0) continue;
      workers_.split(length, kLine, [&, from = begin](std::size_t first, std::size_t last) {
        copy(buffer + place(me, owner) + first, call.input + from + first, last - first, staging);
      });
    }
  };
  const auto reduce_slice = [&](std::uint64_t round) {
    const auto [begin, length] = range(round, me);
    if (length == 0) return;
    workers_.split(length / element, kLine, [&, from = begin](std::size_t first, std::size_t last) {
      std::array<const std::byte*, kMaxRanks> sources;
      std::array<std::byte*, kMaxRanks + 1> targets;
      std::size_t count = 0;
      const std::size_t skip = first * element;
      for (std::size_t r = 0; r < n; ++r) {
        sources[r] = inputs_[r]
                         ? inputs_[r] + from + skip
                         : layout_.stage(base_, static_cast<int>(r), round) + place(r, me) + skip;
        if (outputs_[r]) targets[count++] = outputs_[r] + from + skip;
      }
      if (any_private_output) targets[count++] = layout_.result(base_, rank_, round) + skip;
      reduce(reduction, {sources.data(), n}, {targets.data(), count}, last - first, staging);
    });
  };
  const auto collect = [&](std::uint64_t round) {
    if (!private_output) return;
    for (std::size_t owner = 0; owner < n; ++owner) {
      const auto [begin, length] = range(round, owner);
      if (owner == me || length == 0) continue;
      workers_.split(length, kLine, [&, to = begin](std::size_t first, std::size_t last) {
        copy(call.output + to + first,
             layout_.result(base_, static_cast<int>(owner), round) + first, last - first, writing);
      });
    }
  };

  const std::uint64_t base = step_;
  stage(0);
  publish_step(base + 1);  // A(0)
  for (std::uint64_t t = 0; t < rounds; ++t) {
    if (t > 0) {
      wait_steps(running, base + 2 * t + 1);  // B(t - 1)
      collect(t - 1);
    }
    stage(t + 1);
    publish_step(base + 2 * t + 2);                    // A(t + 1)
    wait_steps(running, base + (t == 0 ? 1 : 2 * t));  // A(t)
    reduce_slice(t);
    publish_step(base + 2 * t + 3);  // B(t)
  }
  step_ = base + 2 * rounds + 1;
  wait_steps(running, step_);
  collect(rounds - 1);
}

}  // namespace convoy::coll
