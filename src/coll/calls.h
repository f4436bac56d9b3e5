#pragma once

#include <span>
#include <string>

#include "coll/call.h"
#include "coll/options.h"

namespace convoy::coll {

// Makes a Call of what a user asked for. Every argument is checked here, before the operation gets
// a number: throws kInvalidArgument that names the argument, the operation, group and rank.
class CallMaker {
 public:
  CallMaker(std::string group, int rank, int size)
      : group_(std::move(group)), rank_(rank), size_(size) {}

  // Where input and output are one buffer, or one is the other's part as said below, the operation
  // works in place; any other overlap is an error.

  // output[k] = op over all ranks of input[k].
  Call all_reduce(const void* input, void* output, std::size_t count, DataType type,
                  const ReduceOptions& options = {}) const;
  // The same, only into the root's output; others' is not used.
  Call reduce(const void* input, void* output, std::size_t count, DataType type, int root,
              const ReduceOptions& options = {}) const;
  // Inputs have `count` elements for each rank, in order; output[k] = op over all ranks of what
  // they have for this one. In place: `output` is this rank's part of `input`.
  Call reduce_scatter(const void* input, void* output, std::size_t count, DataType type,
                      const ReduceOptions& options = {}) const;
  // The root's input to every rank's output. Only the root's input is read.
  Call broadcast(const void* input, void* output, std::size_t count, DataType type, int root,
                 const CallOptions& options = {}) const;
  // Every rank's `count` elements, in order, to every output. In place: `input` is this rank's part
  // of `output`.
  Call all_gather(const void* input, void* output, std::size_t count, DataType type,
                  const CallOptions& options = {}) const;
  // The same, only to the root's output.
  Call gather(const void* input, void* output, std::size_t count, DataType type, int root,
              const CallOptions& options = {}) const;
  // The root's input has `count` elements for each rank, in order; each gets its own.
  Call scatter(const void* input, void* output, std::size_t count, DataType type, int root,
               const CallOptions& options = {}) const;
  // Every rank's input has `count` elements for each rank, in order; every output gets them by
  // sender.
  Call all_to_all(const void* input, void* output, std::size_t count, DataType type,
                  const CallOptions& options = {}) const;

  // The same with buffers and counts of their own for each rank, by rank. Where only the root has
  // them, others pass an empty span. What two ranks say of each other must agree.
  Call reduce_scatter_v(std::span<const Piece> inputs, Piece output, DataType type,
                        const ReduceOptions& options = {}) const;
  Call all_gather_v(Piece input, std::span<const Piece> outputs, DataType type,
                    const CallOptions& options = {}) const;
  Call gather_v(Piece input, std::span<const Piece> outputs, DataType type, int root,
                const CallOptions& options = {}) const;
  Call scatter_v(std::span<const Piece> inputs, Piece output, DataType type, int root,
                 const CallOptions& options = {}) const;
  Call all_to_all_v(std::span<const Piece> inputs, std::span<const Piece> outputs, DataType type,
                    const CallOptions& options = {}) const;

  // The same for several buffers at once, in one pass: they count as one operation, and meet the
  // other ranks once.
  Call all_reduce_coalesced(std::span<const Piece> inputs, std::span<const Piece> outputs,
                            DataType type, const ReduceOptions& options = {}) const;
  Call reduce_scatter_coalesced(std::span<const Piece> inputs, std::span<const Piece> outputs,
                                DataType type, const ReduceOptions& options = {}) const;
  Call broadcast_coalesced(std::span<const Piece> pieces, DataType type, int root,
                           const CallOptions& options = {}) const;
  Call all_gather_coalesced(std::span<const Piece> inputs, std::span<const Piece> outputs,
                            DataType type, const CallOptions& options = {}) const;

  Call barrier(const CallOptions& options = {}) const;
  // A barrier to find out who is missing: at the deadline the error names every rank that has not
  // come, on all that have.
  Call monitored_barrier(const CallOptions& options = {}) const;

 private:
  class Builder;

  std::string group_;
  int rank_;
  int size_;
};

}  // namespace convoy::coll
