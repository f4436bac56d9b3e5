#pragma once

#include <c10/core/ScalarType.h>

#include "coll/types.h"

namespace convoy {

// A tensor's element type as the collectives know it. Throws kUnsupported for what they do not
// (quantized types, complex32, packed 4-bit types).
coll::DataType element_type(c10::ScalarType type);

}  // namespace convoy
