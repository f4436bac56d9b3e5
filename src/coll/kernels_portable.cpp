#include <cstdint>

#include "coll/kernel_table.h"

#if defined(__SSE2__)
#include <emmintrin.h>  // every x86-64 has it
#endif

namespace convoy::coll {
namespace {

constexpr std::size_t kVectorBytes = 16;
#include "coll/kernels.inc"

}  // namespace

constinit const KernelTable kPortableKernels = make_table();

}  // namespace convoy::coll
