#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "coll/kernel_table.h"

namespace convoy::coll {
namespace {

#define CONVOY_KERNEL_AVX512
constexpr std::size_t kVectorBytes = 64;
// clang-format off: in this order
#include "coll/kernels.inc"
#include "coll/kernels_table.inc"
// clang-format on

}  // namespace

constinit const KernelTable kAvx512Kernels = make_table();

}  // namespace convoy::coll
