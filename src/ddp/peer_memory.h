#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "convoy/window.h"

namespace convoy {

// A tensor of every rank in memory that this one sees: mapped for as long as this lives, whatever
// becomes of the others.
struct PeerMemory {
  at::Tensor mine;
  Window window;                // none: of this rank alone
  std::vector<at::Tensor> all;  // by rank; keep the window
  std::vector<std::byte*> data;

  // Of a tensor that is this rank's alone.
  static PeerMemory alone(at::Tensor tensor, int rank, int size);
  // Collective; kInvalidArgument on all ranks if one's tensor is not group memory. The group's
  // ranks share memory.
  static PeerMemory share(const ProcessGroup& group, at::Tensor tensor);
  // So many bytes of group memory, or of this rank's own. Collective; what one rank cannot have is
  // an error on all of them.
  enum class Kind { kShared, kOwn };
  static PeerMemory allocate(const ProcessGroup& group, std::size_t bytes, Kind kind);
};

}  // namespace convoy
