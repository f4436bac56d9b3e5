#pragma once

#include <cstddef>
#include <cstdint>

namespace convoy {

// The step allocator: a CPU allocator for libtorch that keeps freed memory in pools. libtorch's own
// allocator maps every large temporary anew and page-faults it in. With a big model that takes half
// of a step.
//
//   convoy::install_allocator();  // the first line of main
//
// `convoy run --allocator` does the same without a change of the program: it sets
// CONVOY_ALLOCATOR=1, which init() and Python's `import convoy` obey.
//
// Pools are private memory of this process. They use huge pages if the kernel offers them. A forked
// child has its own copy, as of any memory. There is one exception: tensors that the backward of a
// DistributedDataParallel allocates in the size of a parameter's gradient. The ranks share that
// memory, so such a `.grad` is reduced in place, without a copy. A forked child sees it change.
//
// Freed memory is kept for the next step: see allocator_stats() and trim_allocator(). All functions
// are thread-safe.

// New CPU tensors are allocated in the pools. Existing tensors stay where they are. A second call
// does nothing. Throws kUnsupported if another allocator with a higher priority is installed.
void install_allocator();

// Calls install_allocator() if the environment variable CONVOY_ALLOCATOR is 1. Does nothing if it
// is 0, empty or not set. Throws kInvalidArgument for any other value.
void install_allocator_if_asked();

// Restores the previous allocator; does nothing if this one is not installed. Tensors in the pools
// stay valid, and can still be resized.
void uninstall_allocator();

bool is_allocator_installed();

struct AllocatorStats {
  std::size_t used_bytes = 0;     // in tensors, and in the caches of threads (at most 2 MB each)
  std::size_t cached_bytes = 0;   // free memory that the pools keep (an upper bound)
  std::size_t peak_bytes = 0;     // highest sum of used_bytes and cached_bytes so far
  std::uint64_t allocations = 0;  // so far
  std::uint64_t refills = 0;      // small allocations that the thread's cache could not serve
};
AllocatorStats allocator_stats();

// Returns free memory to the system, and the number of bytes that were returned. The next use
// page-faults that memory in again: do not call it in a training loop.
std::size_t trim_allocator();

}  // namespace convoy
