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

  Call barrier(OpKind kind, const CallOptions& options) const;

  Call all_reduce(const void* input, void* output, std::size_t count, DataType type,
                  const ReduceOptions& options) const;
  Call reduce(const void* input, void* output, std::size_t count, DataType type, int root,
              const ReduceOptions& options) const;
  Call reduce_scatter(const void* input, void* output, std::size_t count, DataType type,
                      const ReduceOptions& options) const;
  Call broadcast(const void* input, void* output, std::size_t count, DataType type, int root,
                 const CallOptions& options) const;
  Call all_gather(const void* input, void* output, std::size_t count, DataType type,
                  const CallOptions& options) const;
  Call gather(const void* input, void* output, std::size_t count, DataType type, int root,
              const CallOptions& options) const;
  Call scatter(const void* input, void* output, std::size_t count, DataType type, int root,
               const CallOptions& options) const;
  Call all_to_all(const void* input, void* output, std::size_t count, DataType type,
                  const CallOptions& options) const;

  Call reduce_scatter_v(std::span<const Piece> inputs, Piece output, DataType type,
                        const ReduceOptions& options) const;
  Call all_gather_v(Piece input, std::span<const Piece> outputs, DataType type,
                    const CallOptions& options) const;
  Call gather_v(Piece input, std::span<const Piece> outputs, DataType type, int root,
                const CallOptions& options) const;
  Call scatter_v(std::span<const Piece> inputs, Piece output, DataType type, int root,
                 const CallOptions& options) const;
  Call all_to_all_v(std::span<const Piece> inputs, std::span<const Piece> outputs, DataType type,
                    const CallOptions& options) const;

  Call all_reduce_coalesced(std::span<const Piece> inputs, std::span<const Piece> outputs,
                            DataType type, const ReduceOptions& options) const;
  Call reduce_scatter_coalesced(std::span<const Piece> inputs, std::span<const Piece> outputs,
                                DataType type, const ReduceOptions& options) const;
  Call broadcast_coalesced(std::span<const Piece> pieces, DataType type, int root,
                           const CallOptions& options) const;
  Call all_gather_coalesced(std::span<const Piece> inputs, std::span<const Piece> outputs,
                            DataType type, const CallOptions& options) const;

 private:
  class Builder;

  std::string group_;
  int rank_;
  int size_;
};

}  // namespace convoy::coll
