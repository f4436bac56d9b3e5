#include "operations.h"

#include <sys/uio.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace limit {
namespace {

// A multiple of kGrain; the last slices are shorter or empty.
struct Slice {
  std::size_t begin, bytes;
};
std::size_t rounded(std::size_t bytes) { return (bytes + kGrain - 1) / kGrain * kGrain; }
Slice slice(std::size_t bytes, int index, int parts) {
  const std::size_t each = rounded(bytes / static_cast<std::size_t>(parts));
  const std::size_t begin = std::min(rounded(bytes), each * static_cast<std::size_t>(index));
  return {begin, std::min(rounded(bytes) - begin, each)};
}

void publish(Counter& counter, std::uint64_t value) {
  counter.value.store(value, std::memory_order_release);
}

void read_from(const Rank& rank, std::byte* to, int peer, Slice part) {
  auto* theirs = static_cast<std::byte*>(rank.shared->private_buffers[peer]);
  const iovec local{to + part.begin, part.bytes}, remote{theirs + part.begin, part.bytes};
  const ssize_t got = process_vm_readv(rank.shared->pids[peer], &local, 1, &remote, 1, 0);
  if (got != static_cast<ssize_t>(part.bytes)) {
    std::perror("bench_limit: process_vm_readv");
    std::exit(1);
  }
}

void write_to(const Rank& rank, int peer, Slice part) {
  auto* theirs = static_cast<std::byte*>(rank.shared->private_buffers[peer]);
  const iovec local{rank.mine + part.begin, part.bytes}, remote{theirs + part.begin, part.bytes};
  const ssize_t put = process_vm_writev(rank.shared->pids[peer], &local, 1, &remote, 1, 0);
  if (put != static_cast<ssize_t>(part.bytes)) {
    std::perror("bench_limit: process_vm_writev");
    std::exit(1);
  }
}

// The chunks of staged(). Chunk c has a part of every rank's slice.
//
// Slots form a ring of kDepth. A rank stages c, reduces c - 1 and fetches c - 2, in this order, so
// that there is work to do while the others are behind. Whoever has staged chunk k has therefore
// fetched all up to k - 3: with kDepth >= 3, having waited for k to be staged is enough to reuse
// the result slot of k - kDepth. An input slot is free when all have reduced what lay there.
class Pipeline {
 public:
  Pipeline(Rank& rank, std::size_t bytes, const Staging& staging, Steps steps)
      : rank_(rank), bytes_(bytes), staging_(staging), steps_(steps) {
    first_ = slice(bytes, rank.id, rank.ranks);
    count_ = (slice(bytes, 0, rank.ranks).bytes + staging.chunk - 1) / staging.chunk;
  }

  void run() {
    for (std::size_t c = 0; c < count_ + 2; ++c) {
      if (c < count_) stage(c);
      if (c >= 1 && c - 1 < count_) reduce(c - 1);
      if (c >= 2) gather(c - 2);
    }
    rank_.chunks += count_;
  }

 private:
  static constexpr std::size_t kDepth = 4;

  Slice part(std::size_t c, int owner) const {
    const Slice whole = slice(bytes_, owner, rank_.ranks);
    const std::size_t offset = std::min(whole.bytes, c * staging_.chunk);
    return {whole.begin + offset, std::min(whole.bytes - offset, staging_.chunk)};
  }
  std::size_t slot(std::size_t c, int part_of) const {
    const std::size_t ring = (rank_.chunks + c) % kDepth;
    return (ring * static_cast<std::size_t>(rank_.ranks) + static_cast<std::size_t>(part_of)) *
           staging_.chunk;
  }
  std::uint64_t number(std::size_t c) const { return rank_.chunks + c + 1; }

  void stage(std::size_t c) {
    if (steps_.reduce) {
      if (number(c) > kDepth) rank_.await_all(rank_.shared->reduced, number(c) - kDepth);
      for (int r = 0; r < rank_.ranks; ++r) {
        if (r == rank_.id) continue;
        const Slice s = part(c, r);
        copy(rank_.slot_in[rank_.id] + slot(c, r), rank_.mine + s.begin, s.bytes, staging_.stores);
      }
    }
    publish(rank_.shared->staged[rank_.id], number(c));
  }

  void reduce(std::size_t c) {
    rank_.await_all(rank_.shared->staged, number(c));
    const Slice s = part(c, rank_.id);
    const std::byte* mine = rank_.mine + s.begin;
    std::byte* out = steps_.gather ? rank_.slot_out[rank_.id] + slot(c, 0) : nullptr;
    // An all-reduce works in place; the others have an output.
    std::byte* result = steps_.gather ? target() + s.begin : rank_.out + s.begin - first_.begin;
    if (!steps_.reduce) {
      copy(out, mine, s.bytes, staging_.stores);
      copy(result, mine, s.bytes, Stores::kPlain);
    }
    int left = steps_.reduce ? rank_.ranks - 1 : 0;
    for (int r = 0; left > 0; ++r) {
      if (r == rank_.id) continue;
      const bool is_first = left == rank_.ranks - 1;
      --left;
      add(result, is_first ? mine : result, rank_.slot_in[r] + slot(c, rank_.id),
          left == 0 ? out : nullptr, s.bytes, Stores::kPlain);
    }
    publish(rank_.shared->reduced[rank_.id], number(c));
  }

  void gather(std::size_t c) {
    if (!steps_.gather) return;
    rank_.await_all(rank_.shared->reduced, number(c));
    for (int r = 0; r < rank_.ranks; ++r) {
      if (r == rank_.id) continue;
      const Slice s = part(c, r);
      copy(target() + s.begin, rank_.slot_out[r] + slot(c, 0), s.bytes, Stores::kPlain);
    }
  }

  std::byte* target() const { return steps_.reduce ? rank_.mine : rank_.out; }

  Rank& rank_;
  std::size_t bytes_;
  Staging staging_;
  Steps steps_;
  Slice first_;  // this rank's
  std::size_t count_;
};

}  // namespace

void all_reduce_small(Rank& rank, std::byte* buffer, std::size_t bytes) {
  const std::uint64_t number = ++rank.messages;
  auto& lines = rank.shared->lines[number % 2];
  std::memcpy(lines[rank.id].payload, buffer, bytes);
  lines[rank.id].sequence.store(number, std::memory_order_release);
  float sum[kSmall / sizeof(float)] = {};
  for (int r = 0; r < rank.ranks; ++r) {
    if (r != rank.id) rank.await(lines[r].sequence, number);
    float theirs[kSmall / sizeof(float)];
    std::memcpy(theirs, lines[r].payload, bytes);
    for (std::size_t i = 0; i < bytes / sizeof(float); ++i) sum[i] += theirs[i];
  }
  std::memcpy(buffer, sum, bytes);
}

void all_reduce_group(Rank& rank, std::size_t bytes, Stores stores) {
  rank.barrier();
  const int peer = 1 - rank.id;
  const Slice s = slice(bytes, rank.id, 2);
  std::byte* mine = rank.group[rank.id] + s.begin;
  std::byte* theirs = rank.group[peer] + s.begin;
  add(mine, mine, theirs, theirs, s.bytes, stores);
  rank.barrier();
}

void all_reduce_flat(Rank& rank, std::size_t bytes, Stores stores) {
  const std::uint64_t number = ++rank.messages;
  const int peer = 1 - rank.id;
  const std::size_t at = number % 2 * (kSlot / 2);
  copy(rank.slot_in[rank.id] + at, rank.mine, rounded(bytes), stores);
  publish(rank.shared->flat[rank.id], number);
  rank.await(rank.shared->flat[peer].value, number);
  add(rank.mine, rank.mine, rank.slot_in[peer] + at, nullptr, rounded(bytes), Stores::kPlain);
}

void staged(Rank& rank, std::size_t bytes, const Staging& staging, Steps steps) {
  Pipeline(rank, bytes, staging, steps).run();
}

void reduce_scatter_group(Rank& rank, std::size_t bytes, Stores stores) {
  rank.barrier();
  const Slice s = slice(bytes, rank.id, rank.ranks);
  const std::byte* sum = rank.group[rank.id] + s.begin;
  for (int r = 0; r < rank.ranks; ++r) {
    if (r == rank.id) continue;
    add(rank.out, sum, rank.group[r] + s.begin, nullptr, s.bytes, stores);
    sum = rank.out;
  }
  rank.barrier();
}

void all_gather_group(Rank& rank, std::size_t bytes, Stores stores) {
  rank.barrier();
  for (int r = 0; r < rank.ranks; ++r) {
    const Slice s = slice(bytes, r, rank.ranks);
    copy(rank.out + s.begin, rank.group[r] + s.begin, s.bytes, stores);
  }
  rank.barrier();
}

void broadcast_group(Rank& rank, std::size_t bytes, Stores stores) {
  rank.barrier();
  const Slice s = slice(bytes, rank.id, 2);
  copy(rank.group[1] + s.begin, rank.group[0] + s.begin, s.bytes, stores);
  rank.barrier();
}

void broadcast_staged(Rank& rank, std::size_t bytes, const Staging& staging) {
  constexpr std::size_t kDepth = 4;
  for (std::size_t at = 0; at < rounded(bytes); at += staging.chunk) {
    const std::uint64_t number = ++rank.chunks;
    const std::size_t part = std::min(rounded(bytes) - at, staging.chunk);
    std::byte* slot = rank.slot_in[0] + number % kDepth * staging.chunk;
    if (rank.id == 0) {
      if (number > kDepth) rank.await_all(rank.shared->reduced, number - kDepth);
      copy(slot, rank.mine + at, part, staging.stores);
      publish(rank.shared->staged[0], number);
    } else {
      publish(rank.shared->staged[rank.id], number);
      rank.await(rank.shared->staged[0].value, number);
      copy(rank.mine + at, slot, part, Stores::kPlain);
    }
    publish(rank.shared->reduced[rank.id], number);
  }
}

void broadcast_vm(Rank& rank, std::size_t bytes) {
  rank.barrier();
  const Slice s = slice(bytes, rank.id, 2);
  if (rank.id == 0) write_to(rank, 1, s);
  if (rank.id == 1) read_from(rank, rank.mine, 0, s);
  rank.barrier();
}

void all_gather_vm(Rank& rank, std::size_t bytes) {
  rank.barrier();
  for (int r = 0; r < rank.ranks; ++r) {
    const Slice s = slice(bytes, r, rank.ranks);
    if (r == rank.id) {
      copy(rank.out + s.begin, rank.mine + s.begin, s.bytes, Stores::kPlain);
    } else {
      read_from(rank, rank.out, r, s);
    }
  }
  rank.barrier();
}

bool vm_works(Rank& rank) {
  rank.barrier();
  const int peer = (rank.id + 1) % rank.ranks;
  std::byte there{};
  const iovec local{&there, 1}, remote{rank.shared->private_buffers[peer], 1};
  const bool works = process_vm_readv(rank.shared->pids[peer], &local, 1, &remote, 1, 0) == 1;
  rank.barrier();
  return works;
}

}  // namespace limit
