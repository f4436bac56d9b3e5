#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "convoy/group.h"

namespace convoy {

// What is in the variable CONVOY_DEBUG, or else TORCH_DISTRIBUTED_DEBUG. kInvalidArgument for
// another word in the first.
enum class DebugLevel { kOff, kInfo, kDetail };
DebugLevel debug_level();

// True if all values are finite. Reads them once.
bool is_finite(const at::Tensor& values);
// True if all values are zero. Reads them once.
bool is_zero(const at::Tensor& values);
// "3 of 40 values are not finite, the first is nan at 7".
std::string describe_nonfinite(const at::Tensor& values);

std::uint64_t hash_of(const at::Tensor& tensor);  // of its bytes; as fast as memory

// Collective: compares tensors between the ranks that have `counts`, by a hash of their bytes.
// Empty, or what is wrong with the first one that differs: "parameter fc.weight: rank 2 has other
// values than ranks 0, 1, 3". The same on all ranks.
std::string compare_replicas(const ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                             const std::vector<std::string>& names, bool counts);

}  // namespace convoy
