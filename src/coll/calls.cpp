#include "coll/calls.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/error.h"

namespace convoy::coll {

// Builds one Call, checking as it goes.
class CallMaker::Builder {
 public:
  template <class Options>
  Builder(const CallMaker& maker, OpKind op, DataType type, const Options& options)
      : maker_(maker) {
    call_.signature.op = op;
    call_.signature.type = type;
    call_.timeout = options.timeout;
    call_.purpose = current_purpose();
    call_.signature.tag = options.tag ^ call_.purpose.tag;
    shape(options.shape);
    if (static_cast<int>(type) >= kDataTypes) refuse("unknown element type");
  }

  // Ranks compare it in the tag; it is kept for what is told if it differs.
  void shape(const Shape& shape) {
    if (!shape.given) return;
    call_.shape = shape;
    call_.signature.tag = hash_shape(shape, call_.signature.tag) | Signature::kHashed;
  }
  void reduction(const ReduceOptions& options) {
    try {
      check_reduction(call_.signature.type, options.op, options.rounding);
    } catch (const Error& e) {
      refuse(e.what());
    }
    call_.signature.reduce = options.op;
    call_.signature.rounding = options.rounding;
    call_.signature.factor = std::bit_cast<std::uint64_t>(options.factor);
  }
  void root(int root) {
    if (root < 0 || root >= maker_.size_)
      refuse("there is no root ", root, "; ranks are 0 to ", maker_.size_ - 1);
    call_.signature.root = static_cast<std::uint16_t>(root);
  }
  void count(std::size_t count) { call_.signature.count = count; }

  // Contiguous memory of `parts` times the count; what a rank does not read or write is ignored.
  void input(const void* data, std::size_t parts, bool used = true) {
    if (!used) return;
    call_.input_bytes = bytes(call_.signature.count, parts);
    call_.input = static_cast<const std::byte*>(data);
    if (call_.input_bytes != 0 && !data) refuse("the input is null");
  }
  void output(void* data, std::size_t parts, bool used = true) {
    if (!used) return;
    call_.output_bytes = bytes(call_.signature.count, parts);
    call_.output = static_cast<std::byte*>(data);
    if (call_.output_bytes != 0 && !data) refuse("the output is null");
  }
  // Input and output may be apart, or one may be exactly the own part of the other.
  void allow_in_place(std::size_t own_input_part, std::size_t own_output_part) {
    const std::size_t part = bytes(call_.signature.count, 1);
    if (call_.input_bytes == 0 || call_.output_bytes == 0) return;
    if (call_.input + own_input_part * part == call_.output + own_output_part * part) return;
    no_overlap();
  }
  void no_overlap() {
    if (overlap({const_cast<std::byte*>(call_.input), call_.input_bytes},
                {call_.output, call_.output_bytes})) {
      refuse(
          "input and output overlap; they must be separate, or the same buffer where the operation "
          "allows it");
    }
  }

  // --- several pieces ---
  Stretch piece(const Piece& piece, const char* what) {
    const Stretch stretch{static_cast<std::byte*>(piece.data), bytes(piece.count, 1), 0};
    if (stretch.bytes != 0 && !piece.data) refuse("the ", what, " is null");
    return stretch;
  }
  // `groups` times as many stretches as there are pieces: a piece of n times a count is cut into n.
  // `restart`: begin counts within a group.
  std::vector<Stretch> stretches(std::span<const Piece> pieces, std::size_t groups, bool restart,
                                 const char* what) {
    std::vector<Stretch> list;
    std::size_t begin = 0;
    for (std::size_t g = 0; g < groups; ++g) {
      if (restart) begin = 0;
      for (const Piece& each : pieces) {
        Stretch stretch = piece(each, what);
        if (each.count % groups != 0) {
          refuse("an ", what, " of ", each.count, " elements cannot be divided among ", groups,
                 " ranks");
        }
        stretch.bytes /= groups;
        stretch.data += g * stretch.bytes;
        stretch.begin = begin;
        begin += stretch.bytes;
        list.push_back(stretch);
      }
    }
    return list;
  }
  void single_input(const Piece& input) {
    const Stretch stretch = piece(input, "input");
    call_.input = stretch.data;
    call_.input_bytes = stretch.bytes;
  }
  void single_output(const Piece& output) {
    const Stretch stretch = piece(output, "output");
    call_.output = stretch.data;
    call_.output_bytes = stretch.bytes;
  }
  void inputs(std::span<const Piece> pieces, std::size_t groups = 1) {
    lists().input = stretches(pieces, groups, false, "input");
    call_.input_bytes = total(lists().input);
  }
  void outputs(std::span<const Piece> pieces, std::size_t groups = 1, bool restart = false) {
    lists().output = stretches(pieces, groups, restart, "output");
    call_.output_bytes = total(lists().output);
  }
  void one_for_each_rank(std::span<const Piece> pieces, const char* what) {
    if (pieces.size() != ranks()) {
      refuse(pieces.size(), " ", what, "s for ", maker_.size_, " ranks");
    }
  }
  std::vector<std::uint64_t>& send() { return counts(lists().send); }
  std::vector<std::uint64_t>& receive() { return counts(lists().receive); }
  void send_to_each(std::span<const Piece> pieces) {
    for (std::size_t r = 0; r < ranks(); ++r) send()[r] = pieces[r].count;
    by_rank(lists().send_shapes, [&](std::size_t r) { return pieces[r].shape; });
  }
  void receive_from_each(std::span<const Piece> pieces) {
    for (std::size_t r = 0; r < ranks(); ++r) receive()[r] = pieces[r].count;
    by_rank(lists().receive_shapes, [&](std::size_t r) { return pieces[r].shape; });
  }
  // The same to or from all ranks.
  void send_to_all(const Piece& piece) {
    for (auto& count : send()) count = piece.count;
    by_rank(lists().send_shapes, [&](std::size_t) { return piece.shape; });
  }
  void receive_from_all(const Piece& piece) {
    for (auto& count : receive()) count = piece.count;
    by_rank(lists().receive_shapes, [&](std::size_t) { return piece.shape; });
  }
  // Only to or from the root.
  void send_to_root(const Piece& piece) {
    send()[call_.signature.root] = piece.count;
    by_rank(lists().send_shapes, [&](std::size_t r) { return is_root(r) ? piece.shape : Shape(); });
  }
  void receive_from_root(const Piece& piece) {
    receive()[call_.signature.root] = piece.count;
    by_rank(lists().receive_shapes,
            [&](std::size_t r) { return is_root(r) ? piece.shape : Shape(); });
  }
  // Coalesced: outputs[i] has `outer` elements for `inner` of inputs[i].
  void coalesced(std::span<const Piece> inputs, std::span<const Piece> outputs,
                 std::size_t input_parts, std::size_t output_parts,
                 std::span<const Piece> compared) {
    if (inputs.size() != outputs.size()) {
      refuse(inputs.size(), " inputs, but ", outputs.size(), " outputs");
    }
    if (inputs.empty()) refuse("there is no buffer");
    if (inputs.size() > std::numeric_limits<std::uint16_t>::max()) refuse("too many buffers");
    std::uint64_t hash = call_.signature.tag;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].count * output_parts != outputs[i].count * input_parts) {
        refuse("input ", i, " has ", inputs[i].count,
               " elements, which does not fit its output of ", outputs[i].count);
      }
      hash = (hash ^ inputs[i].count) * 0x9e3779b97f4a7c15;  // how a total is divided counts, too
      call_.signature.count += inputs[i].count;
    }
    if (inputs.size() > 1) call_.signature.tag = hash | Signature::kHashed;
    // Those of what ranks combine or send, which are the inputs.
    if (compared[0].shape.given) {
      for (const Piece& piece : compared) {
        lists().shapes.add(piece.shape);
        call_.signature.tag = hash_shape(piece.shape, call_.signature.tag) | Signature::kHashed;
      }
    }
    call_.signature.pieces = static_cast<std::uint16_t>(inputs.size());
  }
  // Stretches that are written must be apart from each other and from what is read; same(i, j) says
  // that input i may be output j.
  template <class Same>
  void check_lists(const Same& same) {
    const View input = call_.input_view();
    const View output = call_.output_view();
    const auto from = input.stretches();
    const auto to = output.stretches();
    std::vector<std::size_t> sorted;  // outputs by address
    for (std::size_t i = 0; i < to.size(); ++i) {
      if (to[i].bytes != 0) sorted.push_back(i);
    }
    std::sort(sorted.begin(), sorted.end(),
              [&](std::size_t a, std::size_t b) { return std::less<>()(to[a].data, to[b].data); });
    for (std::size_t i = 1; i < sorted.size(); ++i) {
      if (overlap(to[sorted[i - 1]], to[sorted[i]])) refuse("two outputs overlap");
    }
    for (std::size_t i = 0; i < from.size(); ++i) {
      // Only the neighbours can overlap it.
      const Stretch& in = from[i];
      const auto next = std::upper_bound(
          sorted.begin(), sorted.end(), in.data,
          [&](const std::byte* a, std::size_t b) { return std::less<>()(a, to[b].data); });
      for (auto near = next == sorted.begin() ? next : next - 1; near != sorted.end(); ++near) {
        const Stretch& out = to[*near];
        if (!std::less<>()(out.data, in.data + in.bytes)) break;
        const bool exact = in.data == out.data && in.bytes == out.bytes;
        if (overlap(in, out) && !(exact && same(i, *near))) {
          refuse(
              "input and output overlap; they must be separate, or the same buffer where the "
              "operation allows it");
        }
      }
    }
  }

  std::size_t ranks() const { return static_cast<std::size_t>(maker_.size_); }
  std::size_t me() const { return static_cast<std::size_t>(maker_.rank_); }
  bool is_root() const { return maker_.rank_ == static_cast<int>(call_.signature.root); }
  bool is_root(std::size_t rank) const { return rank == call_.signature.root; }

  Call build() { return std::move(call_); }

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail(ErrorKind::kInvalidArgument, call_.signature.to_string(), ", group \"", maker_.group_,
         "\", rank ", maker_.rank_, " of ", maker_.size_, ": ", parts...);
  }

 private:
  std::size_t bytes(std::size_t count, std::size_t parts) const {
    std::size_t result = 0;
    if (__builtin_mul_overflow(count, size_of(call_.signature.type) * parts, &result) ||
        result > SIZE_MAX / 2) {
      refuse("the count is too large");
    }
    return result;
  }
  static std::size_t total(const std::vector<Stretch>& list) {
    std::size_t sum = 0;
    for (const Stretch& each : list) sum += each.bytes;
    return sum;
  }
  static bool overlap(const Stretch& a, const Stretch& b) {
    return a.bytes != 0 && b.bytes != 0 && std::less<>()(a.data, b.data + b.bytes) &&
           std::less<>()(b.data, a.data + a.bytes);
  }
  template <class ShapeOf>
  void by_rank(ShapeList& list, const ShapeOf& shape_of) {
    bool given = false;
    for (std::size_t r = 0; r < ranks(); ++r) given |= shape_of(r).given;
    for (std::size_t r = 0; given && r < ranks(); ++r) list.add(shape_of(r));
  }
  CallLists& lists() {
    if (!lists_) call_.lists = lists_ = std::make_shared<CallLists>();
    return *lists_;
  }
  std::vector<std::uint64_t>& counts(std::vector<std::uint64_t>& list) {
    if (list.empty()) list.resize(ranks());
    return list;
  }

  const CallMaker& maker_;
  Call call_;
  std::shared_ptr<CallLists> lists_;  // the call's own
};

Call CallMaker::barrier(const CallOptions& options) const {
  return Builder(*this, OpKind::kBarrier, DataType::kU8, options).build();
}

Call CallMaker::monitored_barrier(const CallOptions& options) const {
  return Builder(*this, OpKind::kMonitoredBarrier, DataType::kU8, options).build();
}

Call CallMaker::all_reduce(const void* input, void* output, std::size_t count, DataType type,
                           const ReduceOptions& options) const {
  Builder builder(*this, OpKind::kAllReduce, type, options);
  builder.reduction(options);
  builder.count(count);
  builder.input(input, 1);
  builder.output(output, 1);
  builder.allow_in_place(0, 0);
  return builder.build();
}

Call CallMaker::reduce(const void* input, void* output, std::size_t count, DataType type, int root,
                       const ReduceOptions& options) const {
  Builder builder(*this, OpKind::kReduce, type, options);
  builder.reduction(options);
  builder.root(root);
  builder.count(count);
  builder.input(input, 1);
  builder.output(output, 1, builder.is_root());
  builder.allow_in_place(0, 0);
  return builder.build();
}

Call CallMaker::reduce_scatter(const void* input, void* output, std::size_t count, DataType type,
                               const ReduceOptions& options) const {
  Builder builder(*this, OpKind::kReduceScatter, type, options);
  builder.reduction(options);
  builder.count(count);
  builder.input(input, builder.ranks());
  builder.output(output, 1);
  builder.allow_in_place(builder.me(), 0);
  return builder.build();
}

Call CallMaker::broadcast(const void* input, void* output, std::size_t count, DataType type,
                          int root, const CallOptions& options) const {
  Builder builder(*this, OpKind::kBroadcast, type, options);
  builder.root(root);
  builder.count(count);
  builder.input(input, 1, builder.is_root());
  builder.output(output, 1);
  builder.allow_in_place(0, 0);
  return builder.build();
}

Call CallMaker::all_gather(const void* input, void* output, std::size_t count, DataType type,
                           const CallOptions& options) const {
  Builder builder(*this, OpKind::kAllGather, type, options);
  builder.count(count);
  builder.input(input, 1);
  builder.output(output, builder.ranks());
  builder.allow_in_place(0, builder.me());
  return builder.build();
}

Call CallMaker::gather(const void* input, void* output, std::size_t count, DataType type, int root,
                       const CallOptions& options) const {
  Builder builder(*this, OpKind::kGather, type, options);
  builder.root(root);
  builder.count(count);
  builder.input(input, 1);
  builder.output(output, builder.ranks(), builder.is_root());
  builder.allow_in_place(0, builder.me());
  return builder.build();
}

Call CallMaker::scatter(const void* input, void* output, std::size_t count, DataType type, int root,
                        const CallOptions& options) const {
  Builder builder(*this, OpKind::kScatter, type, options);
  builder.root(root);
  builder.count(count);
  builder.input(input, builder.ranks(), builder.is_root());
  builder.output(output, 1);
  builder.allow_in_place(builder.me(), 0);
  return builder.build();
}

Call CallMaker::all_to_all(const void* input, void* output, std::size_t count, DataType type,
                           const CallOptions& options) const {
  Builder builder(*this, OpKind::kAllToAll, type, options);
  builder.count(count);
  builder.input(input, builder.ranks());
  builder.output(output, builder.ranks());
  builder.no_overlap();
  return builder.build();
}

Call CallMaker::reduce_scatter_v(std::span<const Piece> inputs, Piece output, DataType type,
                                 const ReduceOptions& options) const {
  Builder builder(*this, OpKind::kReduceScatterV, type, options);
  builder.reduction(options);
  builder.one_for_each_rank(inputs, "input");
  builder.inputs(inputs);
  builder.single_output(output);
  builder.send_to_each(inputs);
  builder.receive_from_all(output);
  builder.check_lists([&](std::size_t in, std::size_t) { return in == builder.me(); });
  return builder.build();
}

Call CallMaker::all_gather_v(Piece input, std::span<const Piece> outputs, DataType type,
                             const CallOptions& options) const {
  Builder builder(*this, OpKind::kAllGatherV, type, options);
  builder.one_for_each_rank(outputs, "output");
  builder.single_input(input);
  builder.outputs(outputs, 1, false);
  builder.send_to_all(input);
  builder.receive_from_each(outputs);
  builder.check_lists([&](std::size_t, std::size_t out) { return out == builder.me(); });
  return builder.build();
}

Call CallMaker::gather_v(Piece input, std::span<const Piece> outputs, DataType type, int root,
                         const CallOptions& options) const {
  Builder builder(*this, OpKind::kGatherV, type, options);
  builder.root(root);
  builder.single_input(input);
  builder.send_to_root(input);
  builder.receive();
  if (builder.is_root()) {
    builder.one_for_each_rank(outputs, "output");
    builder.outputs(outputs);
    builder.receive_from_each(outputs);
    builder.check_lists([&](std::size_t, std::size_t out) { return out == builder.me(); });
  }
  return builder.build();
}

Call CallMaker::scatter_v(std::span<const Piece> inputs, Piece output, DataType type, int root,
                          const CallOptions& options) const {
  Builder builder(*this, OpKind::kScatterV, type, options);
  builder.root(root);
  builder.single_output(output);
  builder.send();
  builder.receive_from_root(output);
  if (builder.is_root()) {
    builder.one_for_each_rank(inputs, "input");
    builder.inputs(inputs);
    builder.send_to_each(inputs);
    builder.check_lists([&](std::size_t in, std::size_t) { return in == builder.me(); });
  }
  return builder.build();
}

Call CallMaker::all_to_all_v(std::span<const Piece> inputs, std::span<const Piece> outputs,
                             DataType type, const CallOptions& options) const {
  Builder builder(*this, OpKind::kAllToAllV, type, options);
  builder.one_for_each_rank(inputs, "input");
  builder.one_for_each_rank(outputs, "output");
  builder.inputs(inputs);
  builder.outputs(outputs);
  builder.send_to_each(inputs);
  builder.receive_from_each(outputs);
  builder.check_lists([](std::size_t, std::size_t) { return false; });
  return builder.build();
}

Call CallMaker::all_reduce_coalesced(std::span<const Piece> inputs, std::span<const Piece> outputs,
                                     DataType type, const ReduceOptions& options) const {
  Builder builder(*this, OpKind::kAllReduce, type, options);
  builder.reduction(options);
  builder.coalesced(inputs, outputs, 1, 1, inputs);
  builder.inputs(inputs);
  builder.outputs(outputs);
  builder.check_lists([](std::size_t in, std::size_t out) { return in == out; });
  return builder.build();
}

Call CallMaker::reduce_scatter_coalesced(std::span<const Piece> inputs,
                                         std::span<const Piece> outputs, DataType type,
                                         const ReduceOptions& options) const {
  Builder builder(*this, OpKind::kReduceScatter, type, options);
  builder.reduction(options);
  builder.coalesced(outputs, inputs, 1, builder.ranks(), inputs);
  builder.inputs(inputs, builder.ranks());
  builder.outputs(outputs);
  builder.check_lists(
      [&](std::size_t in, std::size_t out) { return in == builder.me() * outputs.size() + out; });
  return builder.build();
}

Call CallMaker::broadcast_coalesced(std::span<const Piece> pieces, DataType type, int root,
                                    const CallOptions& options) const {
  Builder builder(*this, OpKind::kBroadcast, type, options);
  builder.root(root);
  builder.coalesced(pieces, pieces, 1, 1, pieces);
  if (builder.is_root()) builder.inputs(pieces);
  builder.outputs(pieces);
  builder.check_lists([](std::size_t in, std::size_t out) { return in == out; });
  return builder.build();
}

Call CallMaker::all_gather_coalesced(std::span<const Piece> inputs, std::span<const Piece> outputs,
                                     DataType type, const CallOptions& options) const {
  Builder builder(*this, OpKind::kAllGather, type, options);
  builder.coalesced(inputs, outputs, 1, builder.ranks(), inputs);
  builder.inputs(inputs);
  builder.outputs(outputs, builder.ranks(), true);
  builder.check_lists(
      [&](std::size_t in, std::size_t out) { return out == builder.me() * inputs.size() + in; });
  return builder.build();
}

}  // namespace convoy::coll
