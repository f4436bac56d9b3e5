#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "convoy/detail/rpc_values.h"
#include "transport/endpoint.h"

namespace convoy::rpc {

// Tensors of up to so many bytes go with the message itself.
inline constexpr std::size_t kMostInline = 2048;
// So many pieces at most; what is beyond goes with the message.
inline constexpr std::size_t kMostTensorPieces = 240;

// The pieces of a message. Those that stay must be kept: they are added to `kept`.
std::vector<transport::Piece> pieces_of(const detail::TensorsOut& tensors,
                                        std::vector<at::Tensor>& kept);

// Memory for something large that arrives; a tensor takes it over. Throws kResource.
struct TensorMemory {
  std::span<std::byte> bytes;
  std::shared_ptr<void> hold;
};
TensorMemory allocate_for_tensor(std::size_t bytes);

}  // namespace convoy::rpc
