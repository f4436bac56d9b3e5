#pragma once

#include "coll/types.h"
#include "mpi/header.h"

namespace convoy::mpi {

// As which MPI type elements are moved; one that MPI does not know (floats of 8 and 16 bits, bool)
// as unsigned words of its size.
MPI_Datatype datatype(coll::DataType type);

// An operation of MPI's that calls our kernels for pairs of elements, where combines_in_pairs().
MPI_Op operation(coll::DataType type, coll::ReduceOp op);

// True if elements can be combined two by two, in any order, without a change of the result's bits.
// Floats would be rounded each time, and the sum for an average of integers must not wrap.
bool combines_in_pairs(coll::DataType type, coll::ReduceOp op);

}  // namespace convoy::mpi
