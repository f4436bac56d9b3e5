#include "mpi/types.h"

#include <array>
#include <utility>

#include "coll/kernels.h"
#include "mpi/library.h"

namespace convoy::mpi {

using coll::DataType;
using coll::ReduceOp;

namespace {

// MPI tells its function neither: there is one for each pair.
template <int Type, int Op>
void combine(void* input, void* inout, int* count, MPI_Datatype*) {
  const std::byte* const sources[] = {static_cast<std::byte*>(input),
                                      static_cast<std::byte*>(inout)};
  std::byte* const targets[] = {static_cast<std::byte*>(inout)};
  coll::reduce({.type = static_cast<DataType>(Type), .op = static_cast<ReduceOp>(Op)}, sources,
               targets, static_cast<std::size_t>(*count), coll::StoreHint::kCached);
}

using Functions = std::array<MPI_User_function*, coll::kDataTypes * coll::kReduceOps>;

template <std::size_t... I>
constexpr Functions make_functions(std::index_sequence<I...>) {
  return {
      &combine<static_cast<int>(I) / coll::kReduceOps, static_cast<int>(I) % coll::kReduceOps>...};
}

constexpr Functions kFunctions =
    make_functions(std::make_index_sequence<coll::kDataTypes * coll::kReduceOps>());

std::size_t index(DataType type, ReduceOp op) {
  return static_cast<std::size_t>(type) * coll::kReduceOps + static_cast<std::size_t>(op);
}

// Made once for all: MPI frees them when it ends. None is MPI's own: what those do with an overflow
// depends on the size of the operation (Open MPI's vectorised sums of small integers saturate).
std::array<MPI_Op, coll::kDataTypes * coll::kReduceOps> make_operations() {
  std::array<MPI_Op, coll::kDataTypes * coll::kReduceOps> all;
  for (int t = 0; t < coll::kDataTypes; ++t) {
    for (int o = 0; o < coll::kReduceOps; ++o) {
      const auto type = static_cast<DataType>(t);
      const auto op = static_cast<ReduceOp>(o);
      MPI_Op& one = all[index(type, op)];
      one = MPI_OP_NULL;
      if (!combines_in_pairs(type, op)) continue;
      const Library::Turn turn;
      check(MPI_Op_create(kFunctions[index(type, op)], 1, &one), "MPI_Op_create");
    }
  }
  return all;
}

}  // namespace

MPI_Datatype datatype(DataType type) {
  switch (type) {
    case DataType::kF32: return MPI_FLOAT;
    case DataType::kF64: return MPI_DOUBLE;
    case DataType::kF16:
    case DataType::kBF16:
    case DataType::kU16: return MPI_UINT16_T;
    case DataType::kF8E4M3:
    case DataType::kF8E5M2:
    case DataType::kBool:
    case DataType::kU8: return MPI_UINT8_T;
    case DataType::kI8: return MPI_INT8_T;
    case DataType::kI16: return MPI_INT16_T;
    case DataType::kI32: return MPI_INT32_T;
    case DataType::kI64: return MPI_INT64_T;
    case DataType::kU32: return MPI_UINT32_T;
    case DataType::kU64: return MPI_UINT64_T;
    case DataType::kC64: return MPI_C_FLOAT_COMPLEX;
    case DataType::kC128: return MPI_C_DOUBLE_COMPLEX;
  }
  return MPI_DATATYPE_NULL;
}

MPI_Op operation(DataType type, ReduceOp op) {
  static const auto all = make_operations();
  return all[index(type, op)];
}

bool combines_in_pairs(DataType type, ReduceOp op) {
  return (coll::is_integer(type) && op != ReduceOp::kAvg) || type == DataType::kBool;
}

}  // namespace convoy::mpi
