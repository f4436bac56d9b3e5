#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "convoy/reduce_op.h"

namespace convoy {

// How a Rounding gets through c10d's interface to our backend. Backends of others would ignore it:
// they must not be given one.
struct RoundingSupplement : c10d::_SupplementBase {
  explicit RoundingSupplement(Rounding kind) : rounding(kind) {}
  const Rounding rounding;
};

}  // namespace convoy
