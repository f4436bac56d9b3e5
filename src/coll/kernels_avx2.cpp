#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "coll/kernel_table.h"

namespace convoy::coll {
namespace {

#define CONVOY_KERNEL_AVX2
constexpr std::size_t kVectorBytes = 32;
// clang-format off: in this order
#include "coll/kernels.inc"
#include "coll/kernels_table.inc"
// clang-format on

}  // namespace

constinit const KernelTable kAvx2Kernels = make_table();

}  // namespace convoy::coll
