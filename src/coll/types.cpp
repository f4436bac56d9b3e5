#include "coll/types.h"

#include "base/concat.h"

#include <array>

#include "base/error.h"

namespace convoy::coll {
namespace {

constexpr std::array<std::string_view, kDataTypes> kTypes = {
    "f32", "f64", "f16", "bf16", "f8e4m3", "f8e5m2", "i8",  "i16", "i32",
    "i64", "u8",  "u16", "u32",  "u64",    "bool",   "c64", "c128"};

constexpr std::array<std::string_view, kReduceOps> kOps = {
    "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};

}  // namespace

void refuse_type(DataType type) {
  fail(ErrorKind::kInvalidArgument, "unknown data type ", static_cast<int>(type), " (known: 0 to ",
       kTypes.size() - 1, ")");
}

std::string_view to_string(DataType type) {
  const auto index = static_cast<std::size_t>(type);
  if (index >= kTypes.size()) refuse_type(type);
  return kTypes[index];
}

std::string_view to_string(ReduceOp op) {
  const auto index = static_cast<std::size_t>(op);
  if (index >= kOps.size()) {
    fail(ErrorKind::kInvalidArgument, "unknown reduce operation ", index, " (known: 0 to ",
         kOps.size() - 1, ")");
  }
  return kOps[index];
}

std::string_view to_string(Rounding rounding) {
  constexpr std::array<std::string_view, kRoundings> kNames = {"none", "f16", "bf16"};
  const auto index = static_cast<std::size_t>(rounding);
  if (index >= kNames.size()) {
    fail(ErrorKind::kInvalidArgument, "unknown rounding ", index, " (known: 0 to ",
         kNames.size() - 1, ")");
  }
  return kNames[index];
}

std::string describe_elements(std::size_t bytes, DataType type) {
  return concat(bytes / size_of(type), " x ", to_string(type));
}

}  // namespace convoy::coll
