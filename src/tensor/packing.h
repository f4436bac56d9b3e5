#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "coll/types.h"

namespace convoy {

// Tensors as the plain memory that collectives work on, whatever their strides. What is contiguous
// is used where it is; other tensors are copied, and results are copied back by unpack(). Keeps all
// of them alive. Not thread-safe.
class Packing {
 public:
  // Memory with the tensor's elements in order, to be read.
  coll::Piece input(const at::Tensor& tensor);
  // Memory for the tensor's elements, to be written.
  coll::Piece output(const at::Tensor& tensor);
  // Both at once, for operations that work in place.
  coll::Piece in_out(const at::Tensor& tensor);
  // The same memory, counted in bytes.
  static coll::Piece bytes(const coll::Piece& piece, const at::Tensor& tensor);

  // Copies results to where they belong; to be called once, when the operation is done.
  void unpack();

 private:
  const at::Tensor& keep(at::Tensor tensor);

  std::vector<at::Tensor> kept_;
  struct Pair {
    at::Tensor target;
    at::Tensor packed;
  };
  std::vector<Pair> pairs_;
};

}  // namespace convoy
