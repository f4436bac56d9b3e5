#pragma once

#include "coll/kernel_table.h"

namespace convoy::coll {

// The kernels with vectors as wide as AVX-512's, put together from narrow ones by the compiler:
// tests of everything in the AVX-512 kernels but their few intrinsics, for CPUs without it.
extern const KernelTable kWideKernels;

}  // namespace convoy::coll
