// Tensors of all kinds in few messages.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "base/call_scope.h"
#include "base/error.h"
#include "ddp/agreement.h"
#include "ddp/bucket.h"
#include "ddp/module_parameters.h"

namespace convoy {
namespace {

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

// The tensor's elements as bytes: its own memory, if that is contiguous, or a copy.
at::Tensor packed(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().resolve_conj().resolve_neg();
  if (dense.is_contiguous()) return dense.view({-1}).view(at::kByte);
  return dense.contiguous().view({-1}).view(at::kByte);
}

enum class Notice { kAutograd, kNobody };

void write(const at::Tensor& tensor, const at::Tensor& bytes, Notice notice) {
  const at::Tensor values = bytes.view({-1}).view(tensor.scalar_type()).view(tensor.sizes());
  // tensor_data() shares memory and counter; a copy of it by variable_data() only the memory.
  const at::Tensor target =
      notice == Notice::kAutograd ? tensor.tensor_data() : tensor.variable_data();
  target.copy_(values);
}

// Bytes of the tensors from `first` on as far as a chunk goes; a tensor is not cut.
std::size_t end_of_chunk(at::TensorList tensors, std::size_t first, std::int64_t chunk) {
  std::int64_t bytes = 0;
  std::size_t end = first;
  while (end < tensors.size() && (end == first || bytes + bytes_of(tensors[end]) <= chunk)) {
    bytes += (bytes_of(tensors[end++]) + 15) / 16 * 16;
  }
  return end;
}

void broadcast_all(const ProcessGroup& group, at::TensorList tensors,
                   const BroadcastOptions& options, const std::unordered_set<const void*>& unseen,
                   at::Tensor& memory) {
  const at::NoGradGuard no_grad;
  const bool root = group.rank() == options.root;
  for (std::size_t first = 0; first < tensors.size();) {
    const std::size_t end = end_of_chunk(tensors, first, options.chunk_bytes);
    std::int64_t size = 0;
    for (std::size_t i = first; i < end; ++i) size += (bytes_of(tensors[i]) + 15) / 16 * 16;
    if (size > 0) {
      if (!memory.defined() || memory.numel() < size) memory = allocate_for(group, size, at::kByte);
      const at::Tensor flat = memory.narrow(0, 0, size);
      const auto each = [&](auto&& action) {
        std::int64_t offset = 0;
        for (std::size_t i = first; i < end; ++i) {
          const std::int64_t bytes = bytes_of(tensors[i]);
          if (bytes > 0) action(tensors[i], flat.narrow(0, offset, bytes));
          offset += (bytes + 15) / 16 * 16;
        }
      };
      if (root) {
        each(
            [](const at::Tensor& tensor, const at::Tensor& place) { place.copy_(packed(tensor)); });
      }
      group.broadcast(flat, {.root = options.root});
      if (!root) {
        each([&](const at::Tensor& tensor, const at::Tensor& place) {
          const bool notice = !unseen.contains(tensor.unsafeGetTensorImpl());
          write(tensor, place, notice ? Notice::kAutograd : Notice::kNobody);
        });
      }
    }
    first = end;
  }
}

}  // namespace

void broadcast_coalesced(const ProcessGroup& group, at::TensorList tensors,
                         const BroadcastOptions& options) {
  if (!group) {
    fail(ErrorKind::kInvalidArgument,
         "broadcast_coalesced: the group is empty; pass that of convoy::init() or new_group()");
  }
  const std::string head = head_of(group, "broadcast_coalesced");
  if (options.root < 0 || options.root >= group.size()) {
    fail(ErrorKind::kInvalidArgument, head, "the root is ", options.root,
         "; it must be a rank of the group, 0 to ", group.size() - 1);
  }
  if (options.chunk_bytes <= 0) {
    fail(ErrorKind::kInvalidArgument, head, "chunk_bytes is ", options.chunk_bytes,
         "; it must be positive");
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_meta()) continue;
    fail(ErrorKind::kInvalidArgument, head, "tensor ", i, " is ",
         !tensor.defined()  ? "undefined"
         : tensor.is_meta() ? "on device meta"
                            : "sparse",
         "; only dense tensors with values can be sent");
  }
  const PurposeScope scope(
      {.what = current_purpose().what ? current_purpose().what : "broadcast_coalesced"});
  at::Tensor memory;
  broadcast_all(group, tensors, options, {}, memory);
}

void broadcast_buffers(const ProcessGroup& group, const std::vector<at::Tensor>& buffers, int root,
                       const std::vector<at::Tensor>& unseen, at::Tensor& staging) {
  std::unordered_set<const void*> identities;
  for (const at::Tensor& tensor : unseen) identities.insert(tensor.unsafeGetTensorImpl());
  broadcast_all(group, buffers, {.root = root}, identities, staging);
}

}  // namespace convoy
