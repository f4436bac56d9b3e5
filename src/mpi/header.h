#pragma once

// MPI's C interface, without the C++ bindings of old, which need a library of their own.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
