#include "tensor/elements.h"

#include "base/error.h"

namespace convoy {

coll::DataType element_type(c10::ScalarType type) {
  using coll::DataType;
  switch (type) {
    case c10::ScalarType::Float: return DataType::kF32;
    case c10::ScalarType::Double: return DataType::kF64;
    case c10::ScalarType::Half: return DataType::kF16;
    case c10::ScalarType::BFloat16: return DataType::kBF16;
    case c10::ScalarType::Float8_e4m3fn: return DataType::kF8E4M3;
    case c10::ScalarType::Float8_e5m2: return DataType::kF8E5M2;
    case c10::ScalarType::Char: return DataType::kI8;
    case c10::ScalarType::Short: return DataType::kI16;
    case c10::ScalarType::Int: return DataType::kI32;
    case c10::ScalarType::Long: return DataType::kI64;
    case c10::ScalarType::Byte: return DataType::kU8;
    case c10::ScalarType::UInt16: return DataType::kU16;
    case c10::ScalarType::UInt32: return DataType::kU32;
    case c10::ScalarType::UInt64: return DataType::kU64;
    case c10::ScalarType::Bool: return DataType::kBool;
    case c10::ScalarType::ComplexFloat: return DataType::kC64;
    case c10::ScalarType::ComplexDouble: return DataType::kC128;
    default: break;
  }
  fail(ErrorKind::kUnsupported, "tensors of type ", c10::toString(type),
       " cannot be sent; convert them first, for example with view(torch::kUInt8)");
}

}  // namespace convoy
