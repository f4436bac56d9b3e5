#include "coll/types.h"

#include "base/concat.h"

#include <array>

#include "base/error.h"

namespace convoy::coll {
namespace {

struct TypeInfo {
  std::string_view name;
  std::size_t size;
};

constexpr std::array<TypeInfo, kDataTypes> kTypes = {{
    {"f32", 4},
    {"f64", 8},
    {"f16", 2},
    {"bf16", 2},
    {"f8e4m3", 1},
    {"f8e5m2", 1},
    {"i8", 1},
    {"i16", 2},
    {"i32", 4},
    {"i64", 8},
    {"u8", 1},
    {"u16", 2},
    {"u32", 4},
    {"u64", 8},
    {"bool", 1},
    {"c64", 8},
    {"c128", 16},
}};

constexpr std::array<std::string_view, kReduceOps> kOps = {
    "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};

// Values may come from a peer or a cast, so they are checked.
const TypeInfo& info(DataType type) {
  const auto index = static_cast<std::size_t>(type);
  if (index >= kTypes.size()) {
    fail(ErrorKind::kInvalidArgument, "unknown data type ", index, " (known: 0 to ",
         kTypes.size() - 1, ")");
  }
  return kTypes[index];
}

}  // namespace

std::size_t size_of(DataType type) { return info(type).size; }
std::string_view to_string(DataType type) { return info(type).name; }

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
