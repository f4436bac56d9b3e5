#pragma once

#include <cstddef>
#include <cstdint>

namespace convoy {

// The step allocator: memory of CPU tensors comes from pools that keep what is freed. libtorch
// itself maps and faults in every large temporary anew, which is half of a big model's step.
//
//   convoy::install_allocator();   // the first line of main; or `convoy run --allocator`, which
//   init()
//                                  // and `import convoy` follow (CONVOY_ALLOCATOR=1)
//
// Pools are private memory of this process, with huge pages where the kernel has them (a forked
// child has its own copy, as of any memory). Only what a backward of a DistributedDataParallel
// makes in the sizes of its parameters' gradients comes from memory that the ranks share: such a
// `.grad` is reduced where it was made, without a copy, and a forked child sees it change. What is
// freed is kept for the next step: see
// allocator_stats(), trim_allocator(). All functions may be called from any thread.

// New tensors are allocated there; existing ones stay where they are. Calling it again does
// nothing. kUnsupported if another allocator with a higher priority is installed.
void install_allocator();

// install_allocator() if CONVOY_ALLOCATOR is 1; nothing if it is 0, empty or not set.
// kInvalidArgument for another text.
void install_allocator_if_asked();

// Restores the previous allocator. Tensors in the pools stay valid, also when resized.
void uninstall_allocator();

bool is_allocator_installed();

struct AllocatorStats {
  std::size_t used_bytes = 0;    // in tensors (and in the caches of threads, at most 2 MB in each)
  std::size_t cached_bytes = 0;  // free and kept, at most
  std::size_t peak_bytes = 0;    // most that both were together
  std::uint64_t allocations = 0;
  std::uint64_t refills = 0;  // small allocations that a thread's cache could not serve
};
AllocatorStats allocator_stats();

// Returns free memory to the system; returns the number of bytes. It is faulted in again on the
// next use: do not call it in a training loop.
std::size_t trim_allocator();

}  // namespace convoy
