// MpiMedium: operations that combine.
#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"
#include "coll/kernels.h"
#include "mpi/complete.h"
#include "mpi/types.h"

namespace convoy::mpi {

using coll::OpKind;
using coll::ReduceOp;

namespace {

// Of one call of MPI's; operations on single elements are done in as many as it takes.
constexpr std::size_t kMostElements = std::size_t{1} << 30;
// Up to here every rank combines everything: one exchange instead of two.
constexpr std::size_t kSmallBytes = 4096;
// Of what is combined in slices at a time.
constexpr std::size_t kPieceBytes = std::size_t{64} << 20;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

// target[k] = what becomes of a single source: of a group of one.
void scale(const coll::Reduction& reduction, const std::byte* source, std::byte* target,
           std::size_t count) {
  const std::byte* const sources[] = {source};
  std::byte* const targets[] = {target};
  coll::reduce(reduction, sources, targets, count, coll::StoreHint::kCached);
}

}  // namespace

void MpiMedium::combine(const Running& running) {
  const coll::Call& call = running.call;
  if (call.signature.rounding != coll::Rounding::kNone) {
    fail(ErrorKind::kUnsupported, running.call.signature.to_string(),
         ": MPI cannot round inside of a sum; reduce tensors of that type");
  }
  const Buffers buffers = open(call);
  if (size_ == 1) {
    const std::size_t count = call.input_bytes / call.element();
    if (count != 0) scale(call.reduction(1), buffers.input, buffers.output, count);
  } else if (coll::has_table(call.signature.op) || call.bytes() != 0) {
    if (call.signature.op == OpKind::kAllReduce && call.bytes() <= kMostSwapped &&
        size_ <= kFewRanks) {
      exchange(running, buffers);
    } else if (combines_in_pairs(call.signature.type, call.signature.reduce)) {
      combine_in_pairs(running, buffers);
    } else {
      combine_slices(running, buffers);
    }
  } else {
    meet_all(running);  // nothing to combine
  }
  write_back(call, buffers);
}

// Every rank sends what it has to every other and combines all of it, in the order of ranks:
// messages take less time than MPI's non-blocking collectives.
void MpiMedium::exchange(const Running& running, const Buffers& buffers) {
  const coll::Call& call = running.call;
  const std::size_t bytes = call.bytes();
  std::byte* const work = scratch(work_, static_cast<std::size_t>(size_) * bytes);
  // The input may be the output, or the program's: what is sent must stay when the operation fails.
  std::memcpy(work + static_cast<std::size_t>(rank_) * bytes, buffers.input, bytes);
  swap_blocks(running, work, bytes);
  std::array<const std::byte*, kFewRanks> sources;
  const auto ranks = static_cast<std::size_t>(size_);
  for (std::size_t r = 0; r < ranks; ++r) sources[r] = work + r * bytes;
  std::byte* const targets[] = {buffers.output};
  coll::reduce(call.reduction(size_), {sources.data(), ranks}, targets, call.signature.count,
               coll::StoreHint::kCached);
}

// MPI's own collectives, with our operation.
void MpiMedium::combine_in_pairs(const Running& running, const Buffers& buffers) {
  const coll::Call& call = running.call;
  const auto& signature = call.signature;
  const MPI_Datatype type = datatype(signature.type);
  const MPI_Op op = operation(signature.type, signature.reduce);
  const std::size_t element = call.element();
  const std::byte* const input = buffers.input;
  const bool in_place = buffers.in_place;
  if (signature.op == OpKind::kAllReduce || signature.op == OpKind::kReduce) {
    const bool all = signature.op == OpKind::kAllReduce;
    const int root = signature.root;
    for (std::size_t done = 0; done < signature.count; done += kMostElements) {
      const int count = static_cast<int>(std::min(kMostElements, signature.count - done));
      std::byte* const output = buffers.output ? buffers.output + done * element : nullptr;
      const void* const from = in_place ? MPI_IN_PLACE : input + done * element;
      complete(
          running, static_cast<std::size_t>(count) * element,
          [&](MPI_Request* request) {
            return all ? MPI_Iallreduce(from, output, count, type, op, data_.get(), request)
                       : MPI_Ireduce(from, output, count, type, op, root, data_.get(), request);
          },
          [&] {
            return all ? MPI_Allreduce(from, output, count, type, op, data_.get())
                       : MPI_Reduce(from, output, count, type, op, root, data_.get());
          });
    }
    return;
  }
  // Reduce-scatter. Where the output is the own part of the input MPI would want another place.
  const std::size_t count = call.output_bytes / element;
  std::byte* output = buffers.output;
  if (in_place) output = scratch(output_, call.output_bytes);
  if (signature.op == OpKind::kReduceScatter) {
    const int each = to_count(running, count);
    complete(
        running, call.output_bytes,
        [&](MPI_Request* request) {
          return MPI_Ireduce_scatter_block(input, output, each, type, op, data_.get(), request);
        },
        [&] { return MPI_Reduce_scatter_block(input, output, each, type, op, data_.get()); });
  } else {
    const Parts& by_rank = parts(running, call.lists->send);
    complete(running, [&](MPI_Request* request) {
      return MPI_Ireduce_scatter(input, output, by_rank.counts.data(), type, op, data_.get(),
                                 request);
    });
  }
  if (output != buffers.output) std::copy_n(output, call.output_bytes, buffers.output);
}

// What depends on the order: all sources of an element come to one rank, and are combined there in
// the order of ranks, as in shared memory, to the same bits. MPI's own order depends on the size of
// the operation and on where ranks are, and floats of 8 and 16 bits would be rounded after every
// pair.
void MpiMedium::combine_slices(const Running& running, const Buffers& buffers) {
  const auto& signature = running.call.signature;
  const std::size_t element = running.call.element();
  if (signature.op == OpKind::kReduceScatter || signature.op == OpKind::kReduceScatterV) {
    const auto n = static_cast<std::size_t>(size_);
    const Parts& out = coll::has_table(signature.op) ? parts(running, running.call.lists->send)
                                                     : slices(running, n * signature.count);
    // Where counts differ, ranks know only their own.
    collect_slice(running, buffers.input, out,
                  coll::has_table(signature.op) ? 0 : running.call.bytes());
    return reduce_slice(running, static_cast<std::size_t>(out.counts[at(rank_)]), buffers.output);
  }
  // In pieces, each of which needs as much memory again.
  const std::size_t most = kPieceBytes / element;
  for (std::size_t done = 0; done < signature.count; done += most) {
    const std::size_t offset = done * element;
    combine_piece(running, buffers.input + offset,
                  buffers.output ? buffers.output + offset : nullptr,
                  std::min(most, signature.count - done));
  }
}

// The slices that all ranks have for this one come to `work_`, by rank. `bytes`: as of complete().
void MpiMedium::collect_slice(const Running& running, const std::byte* input, const Parts& out,
                              std::size_t bytes) {
  const MPI_Datatype type = datatype(running.call.signature.type);
  const int mine = out.counts[at(rank_)];
  const auto n = static_cast<std::size_t>(size_);
  const std::vector<std::uint64_t> alike(n, static_cast<std::uint64_t>(mine));
  const Parts& in = parts(running, alike);
  std::byte* const work =
      scratch(work_, std::max<std::size_t>(1, n * at(mine) * running.call.element()));
  complete(
      running, bytes,
      [&](MPI_Request* request) {
        return MPI_Ialltoallv(input, out.counts.data(), out.offsets.data(), type, work,
                              in.counts.data(), in.offsets.data(), type, data_.get(), request);
      },
      [&] {
        return MPI_Alltoallv(input, out.counts.data(), out.offsets.data(), type, work,
                             in.counts.data(), in.offsets.data(), type, data_.get());
      });
}

// Of `count` elements of each rank, in `work_`.
void MpiMedium::reduce_slice(const Running& running, std::size_t count, std::byte* target) {
  if (count == 0) return;
  std::vector<const std::byte*> sources(static_cast<std::size_t>(size_));
  for (std::size_t r = 0; r < sources.size(); ++r) {
    sources[r] = work_->data() + r * count * running.call.element();
  }
  std::byte* const targets[] = {target};
  coll::reduce(running.call.reduction(size_), sources, targets, count, coll::StoreHint::kCached);
}

// Of an all_reduce or a reduce.
void MpiMedium::combine_piece(const Running& running, const std::byte* input, std::byte* output,
                              std::size_t count) {
  const auto& signature = running.call.signature;
  const MPI_Datatype type = datatype(signature.type);
  const std::size_t bytes = count * running.call.element();
  const bool all = signature.op == OpKind::kAllReduce;
  if (bytes <= kSmallBytes) {
    const int each = static_cast<int>(count);
    std::byte* const work = scratch(work_, static_cast<std::size_t>(size_) * bytes);
    complete(running, [&](MPI_Request* request) {
      return all ? MPI_Iallgather(input, each, type, work, each, type, data_.get(), request)
                 : MPI_Igather(input, each, type, work, each, type, signature.root, data_.get(),
                               request);
    });
    if (all || rank_ == signature.root) reduce_slice(running, count, output);
    return;
  }
  const Parts& out = slices(running, count);
  collect_slice(running, input, out, bytes);
  // The own slice goes where it belongs, or through the memory that it came to.
  const int mine = out.counts[at(rank_)];
  const std::size_t offset = at(out.offsets[at(rank_)]) * running.call.element();
  if (all) {
    reduce_slice(running, at(mine), output + offset);
    return complete(
        running, bytes,
        [&](MPI_Request* request) {
          return MPI_Iallgatherv(MPI_IN_PLACE, 0, type, output, out.counts.data(),
                                 out.offsets.data(), type, data_.get(), request);
        },
        [&] {
          return MPI_Allgatherv(MPI_IN_PLACE, 0, type, output, out.counts.data(),
                                out.offsets.data(), type, data_.get());
        });
  }
  const bool root = rank_ == signature.root;
  std::byte* const result = root ? output + offset : work_->data();
  reduce_slice(running, at(mine), result);
  complete(running, [&](MPI_Request* request) {
    return MPI_Igatherv(root ? MPI_IN_PLACE : result, mine, type, output, out.counts.data(),
                        out.offsets.data(), type, signature.root, data_.get(), request);
  });
}

}  // namespace convoy::mpi
