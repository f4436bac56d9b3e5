#include <immintrin.h>

#include <cstdint>

#include "coll/kernel_table.h"

namespace convoy::coll {
namespace {

#define CONVOY_KERNEL_AVX2
constexpr std::size_t kVectorBytes = 32;
#include "coll/kernels.inc"

}  // namespace

constinit const KernelTable kAvx2Kernels = make_table();

}  // namespace convoy::coll
