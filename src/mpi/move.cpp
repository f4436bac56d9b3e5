// MpiMedium: operations that move.
#include <algorithm>
#include <cstring>

#include "mpi/complete.h"
#include "mpi/types.h"

namespace convoy::mpi {

using coll::OpKind;

void MpiMedium::broadcast(const Running& running, const Buffers& buffers) {
  const coll::Call& call = running.call;
  const std::size_t element = call.element();
  if (rank_ == call.signature.root && buffers.input != buffers.output && call.input_bytes != 0) {
    std::memcpy(buffers.output, buffers.input, call.input_bytes);
  }
  constexpr std::size_t kMostElements = std::size_t{1} << 30;
  std::size_t done = 0;
  do {
    const std::size_t count = std::min(kMostElements, call.signature.count - done);
    std::byte* const data = buffers.output + done * element;
    const MPI_Datatype type = datatype(call.signature.type);
    complete(
        running, count * element,
        [&](MPI_Request* request) {
          return MPI_Ibcast(data, static_cast<int>(count), type, call.signature.root, data_.get(),
                            request);
        },
        [&] {
          return MPI_Bcast(data, static_cast<int>(count), type, call.signature.root, data_.get());
        });
    done += count;
  } while (done < call.signature.count);
}

void MpiMedium::move(const Running& running) {
  const coll::Call& call = running.call;
  const auto& signature = call.signature;
  const MPI_Datatype type = datatype(signature.type);
  const Buffers buffers = open(call);
  const int root = signature.root;
  const bool is_root = rank_ == root;
  const MPI_Comm comm = data_.get();
  std::byte* const in = buffers.input;
  std::byte* const out = buffers.output;
  // MPI's word for the own part being where it belongs already.
  const void* const from = buffers.in_place ? MPI_IN_PLACE : in;
  void* const to = buffers.in_place ? MPI_IN_PLACE : out;
  const bool uneven = coll::has_table(signature.op);
  const int count = uneven ? 0 : to_count(running, signature.count);
  if (!uneven) {
    to_count(running, std::max(call.input_bytes, call.output_bytes) / call.element());
  }
  static const Parts none;
  const Parts& sent = uneven ? parts(running, call.lists->send) : none;
  const Parts& received = uneven ? parts(running, call.lists->receive) : none;
  const auto me = static_cast<std::size_t>(rank_);
  const auto begin = [&](MPI_Request* request) {
    switch (signature.op) {
      case OpKind::kAllGather:
        return MPI_Iallgather(from, count, type, out, count, type, comm, request);
      case OpKind::kGather:
        return MPI_Igather(is_root ? from : in, count, type, out, count, type, root, comm, request);
      case OpKind::kScatter:
        return MPI_Iscatter(in, count, type, is_root ? to : out, count, type, root, comm, request);
      case OpKind::kAllToAll:
        return MPI_Ialltoall(in, count, type, out, count, type, comm, request);
      case OpKind::kAllGatherV:
        return MPI_Iallgatherv(from, sent.counts[me], type, out, received.counts.data(),
                               received.offsets.data(), type, comm, request);
      case OpKind::kGatherV:
        return MPI_Igatherv(is_root ? from : in, sent.counts[static_cast<std::size_t>(root)], type,
                            out, received.counts.data(), received.offsets.data(), type, root, comm,
                            request);
      case OpKind::kScatterV:
        return MPI_Iscatterv(in, sent.counts.data(), sent.offsets.data(), type, is_root ? to : out,
                             received.counts[static_cast<std::size_t>(root)], type, root, comm,
                             request);
      case OpKind::kAllToAllV:
        return MPI_Ialltoallv(in, sent.counts.data(), sent.offsets.data(), type, out,
                              received.counts.data(), received.offsets.data(), type, comm, request);
      default: return static_cast<int>(MPI_ERR_UNSUPPORTED_OPERATION);
    }
  };
  const auto whole = [&] {  // of those that have the same size on all ranks
    switch (signature.op) {
      case OpKind::kAllGather: return MPI_Allgather(from, count, type, out, count, type, comm);
      case OpKind::kGather:
        return MPI_Gather(is_root ? from : in, count, type, out, count, type, root, comm);
      case OpKind::kScatter:
        return MPI_Scatter(in, count, type, is_root ? to : out, count, type, root, comm);
      case OpKind::kAllToAll: return MPI_Alltoall(in, count, type, out, count, type, comm);
      default: return static_cast<int>(MPI_ERR_UNSUPPORTED_OPERATION);
    }
  };
  if (signature.op == OpKind::kBroadcast) {
    broadcast(running, buffers);
  } else if (uneven) {
    complete(running, begin);
  } else {
    complete(running, signature.count * call.element(), begin, whole);
  }
  write_back(call, buffers);
}

}  // namespace convoy::mpi
