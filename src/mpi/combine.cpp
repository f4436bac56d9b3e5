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

// target[k] = what becomes of a single source: scaled by the factor, or divided by the ranks.
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
    } else if (combines_in_pairs(call.signature.type)) {
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

// MPI's own collectives, with its operation or ours.
void MpiMedium::combine_in_pairs(const Running& running, const Buffers& buffers) {
  const coll::Call& call = running.call;
  const auto& signature = call.signature;
  const MPI_Datatype type = datatype(signature.type);
  const MPI_Op op = operation(signature.type, signature.reduce);
  const std::size_t element = call.element();
  std::byte* input = buffers.input;
  bool in_place = buffers.in_place;
  if (signature.reduce == ReduceOp::kPremulSum && call.input_bytes != 0) {
    input = scratch(work_, call.input_bytes);
    scale(call.reduction(size_), buffers.input, input, call.input_bytes / element);
    in_place = false;
  }
  const auto average = [&](std::byte* output, std::size_t count) {
    if (signature.reduce == ReduceOp::kAvg && count != 0) {
      scale(call.reduction(size_), output, output, count);
    }
  };
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
    if (all || rank_ == root) average(buffers.output, signature.count);
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
  average(output, count);
  if (output != buffers.output) std::copy_n(output, call.output_bytes, buffers.output);
}

// Floats of 8 and 16 bits: all sources of an element come to one rank, are summed in f32 in the
// order of ranks and rounded once, as in shared memory, to the same bits. MPI's own way would round
// after every pair.
void MpiMedium::combine_slices(const Running& running, const Buffers& buffers) {
  const coll::Call& call = running.call;
  const auto& signature = call.signature;
  const MPI_Datatype type = datatype(signature.type);
  const std::size_t element = call.element();
  const auto n = static_cast<std::size_t>(size_);
  const auto me = static_cast<std::size_t>(rank_);
  std::vector<const std::byte*> sources(n);
  // What all ranks have for this one lies in `work_`, by rank.
  const auto reduce = [&](std::size_t count, std::byte* target) {
    for (std::size_t r = 0; r < n; ++r) sources[r] = work_->data() + r * count * element;
    std::byte* const targets[] = {target};
    coll::reduce(call.reduction(size_), sources, targets, count, coll::StoreHint::kCached);
  };
  const bool scatters =
      signature.op == OpKind::kReduceScatter || signature.op == OpKind::kReduceScatterV;
  const bool all = signature.op == OpKind::kAllReduce;
  if (!scatters && signature.count * element <= kSmallBytes) {
    const int count = static_cast<int>(signature.count);
    std::byte* const work = scratch(work_, n * signature.count * element);
    complete(running, [&](MPI_Request* request) {
      return all ? MPI_Iallgather(buffers.input, count, type, work, count, type, data_.get(),
                                  request)
                 : MPI_Igather(buffers.input, count, type, work, count, type, signature.root,
                               data_.get(), request);
    });
    if (all || rank_ == signature.root) reduce(signature.count, buffers.output);
    return;
  }
  const Parts& out = !scatters                       ? slices(running, signature.count)
                     : coll::has_table(signature.op) ? parts(running, call.lists->send)
                                                     : slices(running, n * signature.count);
  const int mine = out.counts[me];
  const std::vector<std::uint64_t> alike(n, static_cast<std::uint64_t>(mine));
  const Parts& in = parts(running, alike);
  const auto count = static_cast<std::size_t>(mine);
  std::byte* const work = scratch(work_, std::max<std::size_t>(1, n * count * element));
  complete(running, [&](MPI_Request* request) {
    return MPI_Ialltoallv(buffers.input, out.counts.data(), out.offsets.data(), type, work,
                          in.counts.data(), in.offsets.data(), type, data_.get(), request);
  });
  if (scatters) return reduce(count, buffers.output);
  // The own slice goes where it belongs, or through the input, which has been sent.
  const std::size_t offset = static_cast<std::size_t>(out.offsets[me]) * element;
  if (all) {
    reduce(count, buffers.output + offset);
    complete(running, [&](MPI_Request* request) {
      return MPI_Iallgatherv(MPI_IN_PLACE, 0, type, buffers.output, out.counts.data(),
                             out.offsets.data(), type, data_.get(), request);
    });
    return;
  }
  const bool root = rank_ == signature.root;
  std::byte* const result = root ? buffers.output + offset : work;
  reduce(count, result);
  complete(running, [&](MPI_Request* request) {
    return MPI_Igatherv(root ? MPI_IN_PLACE : result, mine, type, buffers.output, out.counts.data(),
                        out.offsets.data(), type, signature.root, data_.get(), request);
  });
}

}  // namespace convoy::mpi
