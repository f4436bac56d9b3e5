#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "convoy/mixed_precision.h"

namespace convoy {

// kInvalidArgument for types that are no real floats.
void check_mixed_precision(const MixedPrecision& wanted);
// A line for ranks to compare.
std::string describe(const MixedPrecision& wanted);
// Only floats that are not of this type already.
bool is_cast(const at::Tensor& tensor, c10::ScalarType type);

enum class CastGradients { kAll, kSparse };

// Parameters that are exchanged for copies in another type and back: the tensors stay the same
// ones, and everybody who holds them sees their data change. Autograd keeps, for a backward, the
// parameters themselves and not their data, so that the copies must be in place then, too.
class LowPrecisionCopies {
 public:
  LowPrecisionCopies(const std::vector<at::Tensor>& parameters, c10::ScalarType type);

  bool lowered() const { return lowered_; }
  // The parameters' own data, of all of them.
  std::vector<at::Tensor> originals() const;
  // Copies values, and puts the copies in place. False if they were.
  bool lower();
  // Puts copies in place as they are: the values of the last lower().
  void lower_again();
  // Puts the parameters' own data in place, and makes gradients of the copies' type theirs.
  void restore(CastGradients which = CastGradients::kAll);

 private:
  struct Pair {
    at::Tensor parameter;
    at::Tensor own, copy;  // data
  };
  const std::vector<at::Tensor> parameters_;
  std::vector<Pair> pairs_;
  bool lowered_ = false;
};

}  // namespace convoy
