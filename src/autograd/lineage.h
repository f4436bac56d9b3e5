#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "autograd/wire.h"

// What a message says of the messages before it that its tensors depend on, so that a backward pass
// need not ask.
namespace convoy::autograd::detail {

// A message between two workers, tensors of which others depend on.
struct Upstream {
  std::uint64_t message = 0;
  WorkerId sender = 0;
  WorkerId receiver = 0;
  std::uint32_t tensors = 0;  // bits: those of this message
  std::uint32_t of = 0;       // bits: the tensors of the later message that depend on these
};
static_assert(sizeof(Upstream) == 24);

// The context that a message was recorded in, on this worker. Numbers of messages mean something
// there only: two sessions have the same ones. `session` is Registry::serial(): a later session may
// have the address of one that has ended.
struct Origin {
  std::uint64_t session = 0;
  ContextId context = 0;

  friend bool operator==(const Origin&, const Origin&) = default;
};

// All of them, if there are few: then it is complete. Exact: tensor by tensor.
struct Lineage {
  static constexpr std::size_t kMost = 32;  // entries; most_upstream()
  static constexpr std::uint32_t kMostTensors = 32;
  static constexpr int kMostNodes = 64;  // that are looked at to find them

  bool complete = true;
  c10::SmallVector<Upstream, 2> all;

  // False: that is too many, and nothing was added.
  bool add(const Upstream& one);
};

// Of tensors with these edges, on worker `self`. Looks at few nodes. Not complete, if they depend
// on messages of another origin.
Lineage lineage_of(const std::vector<torch::autograd::Edge>& edges, WorkerId self,
                   const Origin& origin = {});

// For tests and benchmarks: entries that a lineage may have; 0: no message has one. For the
// process.
void set_most_upstream(std::size_t most);
std::size_t most_upstream();

// Tensor `number` and 1 << number.
inline std::uint32_t bit(std::uint32_t number) { return std::uint32_t{1} << number; }

}  // namespace convoy::autograd::detail
