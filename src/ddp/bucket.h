#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "convoy/reducer.h"
#include "ddp/peer_memory.h"

namespace convoy {

// Gradients of so many bytes are reduced where they are; smaller ones are copied into buckets.
inline constexpr std::size_t kLeastPiece = std::size_t{64} << 10;

// A tensor shaped and strided like `like` (contiguous, if that overlaps or has holes) in the memory
// of a flat one. Autograd does not see it as a view: optimizers detach gradients in place.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like);
// True if the tensor is that one: same memory, same strides.
bool is_alias(const at::Tensor& tensor, const at::Tensor& slot);

// Gradients in one piece of memory, and the places of the single ones in it.
struct Bucket {
  std::vector<std::size_t> parameters;  // their numbers in the reducer
  at::Tensor buffer;
  std::vector<at::Tensor> slots;    // by parameter, made by alias(); nobody else's
  std::vector<at::Tensor> handles;  // the same once more, to be gradients: users may move those

  const at::Tensor& handle(std::size_t slot);

  // With a sharded optimizer: the buffers of all ranks.
  std::shared_ptr<const PeerMemory> peers;
  bool private_memory = false;  // some rank's buffer cannot be shared
  // The last round left it as it was: gradients are this rank's own. See ShardPort.
  bool deferred = false;
  // No round has ended with it. Shared memory has its pages from the start: those of slots that are
  // not used are given back.
  bool fresh = true;

  // In a backward:
  std::size_t pending = 0;  // parameters whose gradient is not there yet
  bool launched = false;
  bool skipped = false;
  std::optional<HookResult> result;
};

// Group memory, or ordinary memory if there is no more of it: that is slower, but works.
at::Tensor allocate_for(const ProcessGroup& group, std::int64_t elements,
                        const at::TensorOptions& options);
// Memory for the gradients of these of the parameters.
Bucket make_bucket(const ProcessGroup& group, const std::vector<at::Tensor>& parameters,
                   std::vector<std::size_t> indices, at::ScalarType type);

// Fills a GradBucket, whose members are nobody else's.
struct BucketAccess {
  static GradBucket make(const std::vector<Bucket>& buckets, std::size_t index,
                         const std::vector<at::Tensor>& parameters, const ProcessGroup& group,
                         std::uint64_t backward);
};

}  // namespace convoy
