#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "convoy/slots.h"

namespace convoy::share {

// Where tensors lie in a piece of memory, side by side. Immutable.
class TensorLayout {
 public:
  explicit TensorLayout(std::vector<TensorSpec> tensors);
  // What encode() made. Throws kInvalidArgument.
  static TensorLayout parse(std::string_view bytes);
  std::string encode() const;

  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  std::size_t bytes() const { return bytes_; }
  // kInvalidArgument if there is none.
  std::size_t index_of(std::string_view name) const;
  std::size_t offset(std::size_t i) const { return offsets_.at(i); }
  // Tensor i of memory that begins at `base` and lives as long as `keep`.
  at::Tensor view(std::size_t i, std::byte* base, std::shared_ptr<void> keep) const;

 private:
  std::vector<TensorSpec> tensors_;
  std::vector<std::size_t> offsets_;
  std::size_t bytes_ = 0;
};

// A tensor of so many bytes in shared memory; they are contiguous.
at::Tensor shared_bytes(std::size_t bytes);
// The bytes of a handle that another process sent. Throws kInvalidArgument.
std::span<std::byte> bytes_of(const at::Tensor& handle);

}  // namespace convoy::share
