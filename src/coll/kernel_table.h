#pragma once

#include <cstddef>

#include "coll/isa.h"
#include "coll/types.h"

// Between kernels.cpp and the units that are compiled for one instruction set each. What those
// units include must not bring in inline functions that they would compile for their CPU and the
// linker might then keep for all: plain data only here.
namespace convoy::coll {

struct ReduceJob {
  const std::byte* const* sources;
  std::size_t source_count;  // at least 1
  std::byte* const* targets;
  std::size_t target_count;
  std::size_t bytes;  // of each source and target
  std::size_t element;
  int ranks;
  double factor;
  bool stream;
};

using ReduceFunction = void (*)(const ReduceJob& job);

struct KernelTable {
  ReduceFunction reduce[kDataTypes][kReduceOps];   // null: no meaning
  ReduceFunction rounded[kRoundings][kReduceOps];  // of f32; the first row is empty
  void (*stream_copy)(std::byte* target, const std::byte* source, std::size_t bytes);
};

extern const KernelTable kPortableKernels;
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;

// The table of the active instruction set.
const KernelTable& active_kernels();
// Throws kUnsupported if this CPU cannot run it.
const KernelTable& kernels_of(Isa isa);
// For tests: makes a table, which may be their own, the active one.
void select_kernels(const KernelTable& table);

}  // namespace convoy::coll
