#pragma once

#include "coll/types.h"
#include "mpi/header.h"

namespace convoy::mpi {

// As which MPI type elements are moved; one that MPI does not know (floats of 8 and 16 bits, bool)
// as unsigned words of its size.
MPI_Datatype datatype(coll::DataType type);

// MPI's operation for pairs of elements: its own where it gives what our kernels give, otherwise
// one that calls them. kAvg and kPremulSum are sums here, their scaling is the caller's.
MPI_Op operation(coll::DataType type, coll::ReduceOp op);

// True if elements can be combined two by two. Floats of 8 and 16 bits would be rounded each time.
bool combines_in_pairs(coll::DataType type);

}  // namespace convoy::mpi
