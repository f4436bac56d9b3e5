#pragma once

#include <cstddef>

#include "loops.h"
#include "team.h"

// The limits: each operation for one path and a few settings, of which the best counts.
//
// "group": the buffers lie in the shared mapping. "private": they do not, and data passes through
// staging memory in chunks.
namespace limit {

struct Staging {
  std::size_t chunk;  // bytes of each rank's slice in one step
  Stores stores;
};

// Up to kSmall bytes: data and flag in one line.
void all_reduce_small(Rank& rank, std::byte* buffer, std::size_t bytes);

// Rank r reduces slice r over all buffers into all of them. Two ranks.
void all_reduce_group(Rank& rank, std::size_t bytes, Stores stores);
// Everybody stages everything and adds the other's. Two ranks, up to a slot.
void all_reduce_flat(Rank& rank, std::size_t bytes, Stores stores);
// Chunk by chunk: stage what the others reduce, reduce one's own part, fetch the other parts. Which
// of the steps are done makes it an all-reduce, a reduce-scatter or an all-gather.
struct Steps {
  bool reduce = true;
  bool gather = true;
};
void staged(Rank& rank, std::size_t bytes, const Staging& staging, Steps steps);

void reduce_scatter_group(Rank& rank, std::size_t bytes, Stores stores);
void all_gather_group(Rank& rank, std::size_t bytes, Stores stores);

// From rank 0. Two ranks: each copies a half.
void broadcast_group(Rank& rank, std::size_t bytes, Stores stores);
void broadcast_staged(Rank& rank, std::size_t bytes, const Staging& staging);
// process_vm_writev from one end, process_vm_readv from the other; the same for an all-gather.
void broadcast_vm(Rank& rank, std::size_t bytes);
void all_gather_vm(Rank& rank, std::size_t bytes);
// True if this kernel lets the ranks do so.
bool vm_works(Rank& rank);

}  // namespace limit
