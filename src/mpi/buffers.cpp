// MpiMedium: memory as MPI takes it.
#include <cstring>
#include <limits>

#include "mpi/medium.h"

namespace convoy::mpi {

using coll::Stretch;
using coll::View;

namespace {

// Where the stretches begin if they lie side by side; nullptr: they do not.
std::byte* side_by_side(std::span<const Stretch> stretches) {
  std::byte* first = nullptr;
  std::byte* next = nullptr;
  for (const Stretch& each : stretches) {
    if (each.bytes == 0) continue;
    if (!first) {
      first = each.data;
    } else if (each.data != next) {
      return nullptr;
    }
    next = each.data + each.bytes;
  }
  return first;
}

bool is_empty(std::span<const Stretch> stretches) {
  for (const Stretch& each : stretches) {
    if (each.bytes != 0) return false;
  }
  return true;
}

// In the order of the list: where `begin` counts within a rank's, a View would not do.
std::span<const Stretch> output_stretches(const coll::Call& call, const View& view) {
  if (call.lists && !call.lists->output.empty()) return call.lists->output;
  return view.stretches();
}

}  // namespace

std::byte* MpiMedium::scratch(Scratch& which, std::size_t bytes) {
  if (!which) which = std::make_shared<std::vector<std::byte>>();
  if (which->size() < bytes) which->resize(bytes);
  return which->data();
}

// Pieces that lie apart are gathered into one buffer; write_back() brings results to their places.
MpiMedium::Buffers MpiMedium::open(const coll::Call& call) {
  const View in = call.input_view(), out = call.output_view();
  const auto from = in.stretches();
  const auto to = output_stretches(call, out);
  Buffers buffers{side_by_side(from), side_by_side(to), false};
  if (!buffers.output && !is_empty(to)) buffers.output = scratch(output_, call.output_bytes);
  if (!buffers.input && !is_empty(from)) {
    std::byte* next = buffers.input = scratch(input_, call.input_bytes);
    for (const Stretch& each : from) {
      if (each.bytes != 0) std::memcpy(next, each.data, each.bytes);
      next += each.bytes;
    }
  }
  const auto* const input_end = buffers.input + call.input_bytes;
  const auto* const output_end = buffers.output + call.output_bytes;
  buffers.in_place =
      buffers.input && buffers.output && buffers.input < output_end && buffers.output < input_end;
  return buffers;
}

void MpiMedium::write_back(const coll::Call& call, const Buffers& buffers) {
  if (!output_ || buffers.output != output_->data()) return;
  const View out = call.output_view();
  const std::byte* next = buffers.output;
  for (const Stretch& each : output_stretches(call, out)) {
    if (each.bytes != 0) std::memcpy(each.data, next, each.bytes);
    next += each.bytes;
  }
}

int MpiMedium::to_count(const Running& running, std::size_t elements) const {
  if (elements <= static_cast<std::size_t>(std::numeric_limits<int>::max())) {
    return static_cast<int>(elements);
  }
  fail(ErrorKind::kUnsupported, operation_prefix(speaker(running)), elements,
       " elements together, but MPI counts them with an int; do it in parts");
}

const MpiMedium::Parts& MpiMedium::parts(const Running& running,
                                         std::span<const std::uint64_t> counts) {
  if (!parts_) parts_ = std::make_shared<std::deque<Parts>>();
  Parts& parts = parts_->emplace_back();
  std::size_t offset = 0;
  for (const auto count : counts) {
    parts.counts.push_back(to_count(running, count));
    parts.offsets.push_back(to_count(running, offset));
    offset += count;
  }
  to_count(running, offset);
  return parts;
}

// As even as can be.
const MpiMedium::Parts& MpiMedium::slices(const Running& running, std::size_t count) {
  const auto n = static_cast<std::size_t>(size_);
  std::vector<std::uint64_t> counts(n);
  for (std::size_t r = 0; r < n; ++r) counts[r] = count * (r + 1) / n - count * r / n;
  return parts(running, counts);
}

}  // namespace convoy::mpi
