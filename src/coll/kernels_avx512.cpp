#include <immintrin.h>

#include <cstdint>

#include "coll/kernel_table.h"

namespace convoy::coll {
namespace {

#define CONVOY_KERNEL_AVX512
constexpr std::size_t kVectorBytes = 64;
#include "coll/kernels.inc"

}  // namespace

constinit const KernelTable kAvx512Kernels = make_table();

}  // namespace convoy::coll
