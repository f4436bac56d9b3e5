// The operations that combine: all_reduce, reduce, reduce_scatter.
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <span>

#include "coll/engine_wait.h"

namespace convoy::coll {
namespace {

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// The kernels' sum of a few elements, with their bits, where the way to a kernel takes longer than
// the sum. Integers are unsigned: those may overflow.
template <class T>
void sum_few(std::span<const std::byte* const> sources, std::byte* target, std::size_t count) {
  for (std::size_t at = 0; at < count * sizeof(T); at += sizeof(T)) {
    T total;
    std::memcpy(&total, sources[0] + at, sizeof(T));
    for (const std::byte* source : sources.subspan(1)) {
      T next;
      std::memcpy(&next, source + at, sizeof(T));
      total += next;
    }
    // Every NaN is the same one.
    if constexpr (std::numeric_limits<T>::has_quiet_NaN) {
      if (total != total) total = std::numeric_limits<T>::quiet_NaN();
    }
    std::memcpy(target + at, &total, sizeof(T));
  }
}

}  // namespace

// Which part of the buffer each rank combines, and who gets the result.
struct Engine::ReducePlan {
  ReducePlan(const Call& call, int rank, int size)
      : scatter(call.signature.op == OpKind::kReduceScatter ||
                call.signature.op == OpKind::kReduceScatterV),
        root(call.signature.op == OpKind::kReduce ? static_cast<int>(call.signature.root) : -1),
        me(rank) {
    const auto n = static_cast<std::size_t>(size);
    const std::size_t even = round_up((call.input_bytes + n - 1) / n, kLine);
    ends[0] = 0;
    for (std::size_t r = 0; r < n; ++r) {
      const std::size_t part = !scatter ? even
                               : call.signature.op == OpKind::kReduceScatter
                                   ? call.signature.count * call.element()
                                   : call.lists->send[r] * call.element();
      ends[r + 1] = std::min(call.input_bytes, ends[r] + part);
    }
  }

  std::size_t begin(int owner) const { return ends[static_cast<std::size_t>(owner)]; }
  std::size_t bytes(int owner) const {
    return ends[static_cast<std::size_t>(owner) + 1] - begin(owner);
  }
  // True if `rank` gets all that the others combine.
  bool collects(int rank) const { return !scatter && (root < 0 || root == rank); }
  // Where this rank's output has what stands at `offset` of the input.
  std::size_t in_output(std::size_t offset) const { return scatter ? offset - begin(me) : offset; }

  bool scatter;
  int root;  // -1: not only one gets it
  int me;
  std::array<std::size_t, kMaxRanks + 1> ends;
};

void Engine::combine(const Running& running) {
  const Call& call = *running.call;
  if (call.input_bytes == 0) return;
  if (call.signature.op == OpKind::kAllReduce && call.input_bytes <= kInlineBytes && call.output &&
      size_ > 1) {
    return combine_tiny(running);
  }
  const ReducePlan plan(call, rank_, size_);
  if (size_ == 1) {
    readable_[0] = call.input_view();
    writable_[0] = call.output_view();
    return reduce_range(running, plan, 0, call.input_bytes, StoreHint::kCached);
  }
  bool all_small = true;
  for (int r = 0; r < size_; ++r) {
    const Carrier carrier = carrier_of(running, r, call.input_bytes);
    all_small &= carrier == Carrier::kInline || carrier == Carrier::kPayload;
  }
  if (all_small) return combine_small(running, plan);

  check_members(running);
  const bool direct = find_buffers(running, plan);
  if (direct && !plan.scatter) {
    tuned(running, Route::kDirect,
          [&](Way way) { combine_in_place(running, plan, store_hint(way)); });
  } else {
    tuned(running, direct ? Route::kDirect : Route::kCombined,
          [&](Way way) { combine_staged(running, plan, way); });
  }
}

// Fills readable_ and writable_: every rank's input and, where it gets all results, output, as far
// as they can be reached from here. True if nothing has to be staged.
bool Engine::find_buffers(const Running& running, const ReducePlan& plan) {
  const Call& call = *running.call;
  bool direct = true;
  for (int r = 0; r < size_; ++r) {
    const Slot& theirs = slot(r, running.number);
    const auto i = static_cast<std::size_t>(r);
    readable_[i] = writable_[i] = View();
    const Carrier carrier = carrier_of(running, r, call.input_bytes);
    const bool reachable = carrier != Carrier::kPrivate;
    const bool target = plan.collects(r);
    const bool shared_target = target && theirs.shared_output != 0;
    direct &= reachable && (!target || shared_target);
    if (r == rank_) {
      readable_[i] = call.input_view();
      if (target || plan.scatter) writable_[i] = call.output_view();
      continue;
    }
    if (carrier == Carrier::kPayload) {
      readable_[i] = {layout_.payload(base_, r, running.number), call.input_bytes};
    } else if (reachable) {
      readable_[i] = peer_view(running, r, Side::kInput, call.input_view());
    }
    if (shared_target) writable_[i] = peer_view(running, r, Side::kOutput, call.input_view());
  }
  return direct;
}

// Combines [begin, begin + length) of all inputs that are readable into all outputs that are
// writable, cut where memory is.
void Engine::reduce_range(const Running& running, const ReducePlan& plan, std::size_t begin,
                          std::size_t length, StoreHint hint) {
  const Call& call = *running.call;
  const Reduction reduction = call.reduction(size_);
  const auto n = static_cast<std::size_t>(size_);
  std::array<const std::byte*, kMaxRanks> sources;
  std::array<std::byte*, kMaxRanks> targets;
  call.input_view().for_each(begin, length, [&](std::byte*, std::size_t done, std::size_t bytes) {
    const std::size_t at = begin + done;
    std::size_t count = 0;
    for (std::size_t r = 0; r < n; ++r) {
      sources[r] = readable_[r].at(at);
      if (writable_[r].reachable()) targets[count++] = writable_[r].at(plan.in_output(at));
    }
    reduce(reduction, {sources.data(), n}, {targets.data(), count}, bytes / call.element(), hint);
  });
}

// What combine_small does, where it would take longer to find out what there is to do.
void Engine::combine_tiny(const Running& running) {
  const Call& call = *running.call;
  std::array<const std::byte*, kMaxRanks> sources;
  for (int r = 0; r < size_; ++r) {
    sources[static_cast<std::size_t>(r)] = slot(r, running.number).small.data();
  }
  const std::span all(sources.data(), static_cast<std::size_t>(size_));
  const std::size_t count = call.signature.count;
  // What programs add up all the time: losses, counts.
  if (call.signature.reduce == ReduceOp::kSum && call.signature.rounding == Rounding::kNone) {
    switch (call.signature.type) {
      case DataType::kF32: return sum_few<float>(all, call.output, count);
      case DataType::kF64: return sum_few<double>(all, call.output, count);
      case DataType::kI32: return sum_few<std::uint32_t>(all, call.output, count);
      case DataType::kI64: return sum_few<std::uint64_t>(all, call.output, count);
      default: break;
    }
  }
  reduce(call.reduction(size_), all, {&call.output, 1}, count, StoreHint::kCached);
}

// From the slots, each rank for itself. No rank waits for another after this: the slots stay as
// they are until everyone has arrived at the next operation.
void Engine::combine_small(const Running& running, const ReducePlan& plan) {
  const Call& call = *running.call;
  if (!plan.scatter && !plan.collects(rank_)) return;
  const std::size_t begin = plan.scatter ? plan.begin(rank_) : 0;
  const std::size_t length = plan.scatter ? plan.bytes(rank_) : call.input_bytes;
  const bool tiny = call.input_bytes <= kInlineBytes;
  const Reduction reduction = call.reduction(size_);
  const auto n = static_cast<std::size_t>(size_);
  std::array<const std::byte*, kMaxRanks> sources;
  call.output_view().for_each(
      0, length, [&](std::byte* target, std::size_t done, std::size_t bytes) {
        for (int r = 0; r < size_; ++r) {
          const std::byte* data = tiny ? slot(r, running.number).small.data()
                                       : layout_.payload(base_, r, running.number);
          sources[static_cast<std::size_t>(r)] = data + begin + done;
        }
        reduce(reduction, {sources.data(), n}, {&target, 1}, bytes / call.element(),
               StoreHint::kCached);
      });
}

// All inputs and all outputs are within reach of all ranks: whoever takes a chunk combines it over
// all inputs and writes it to all outputs.
void Engine::combine_in_place(const Running& running, const ReducePlan& plan, StoreHint hint) {
  const auto part = [&](std::size_t begin, std::size_t length) {
    reduce_range(running, plan, begin, length, hint);
  };
  take_chunks(running, running.call->input_bytes, std::ref(part));
}

// Rounds of one slice of every rank's part. In round t rank r combines its slice: inputs within
// reach directly, the others' from their staging buffers; it writes the result to its own output,
// to outputs in shared memory, and to its result buffer if some output is private.
//
// Every iteration t makes two steps: A(t + 1), "my data for round t + 1 is staged", and B(t), "I
// have combined my slice of round t"; then it collects what the others have combined in round t
// - 1. So nobody waits for what another rank does right now, only for what it did one round before.
//
// Three buffers of each kind suffice. Staging for round t + 1 overwrites that of t - 2, which B(t -
// 2) of all ranks, awaited in the iteration before, has released. The result of round t overwrites
// that of t - 3, which everyone has collected before A(t), awaited before it is written.
void Engine::combine_staged(const Running& running, const ReducePlan& plan, Way way) {
  const Call& call = *running.call;
  const StoreHint staging = way == Way::kCached ? StoreHint::kCached : StoreHint::kStreaming;
  const StoreHint writing = store_hint(way);
  const std::size_t element = call.element();
  const auto n = static_cast<std::size_t>(size_);
  const auto me = static_cast<std::size_t>(rank_);
  const bool i_stage = carrier_of(running, rank_, call.input_bytes) == Carrier::kPrivate;
  const bool i_collect = plan.collects(rank_) && slot(rank_, running.number).shared_output == 0;
  bool anyone_stages = false, anyone_collects = false;
  std::size_t most = 0;
  for (int r = 0; r < size_; ++r) {
    anyone_stages |= carrier_of(running, r, call.input_bytes) == Carrier::kPrivate;
    anyone_collects |= plan.collects(r) && slot(r, running.number).shared_output == 0;
    most = std::max(most, plan.bytes(r));
  }
  // Without buffers there is no reason for rounds.
  const std::size_t slice = std::max(
      kLine, anyone_stages || anyone_collects ? std::min(layout_.slice_bytes(), most) : most);
  const std::uint64_t rounds = (most + slice - 1) / slice;
  const Reduction reduction = call.reduction(size_);
  const View input = call.input_view();
  const View output = call.output_view();

  const auto range = [&](std::uint64_t round, std::size_t owner) {
    const std::size_t bytes = plan.bytes(static_cast<int>(owner));
    const std::size_t skip = std::min(bytes, round * slice);
    return std::pair(plan.begin(static_cast<int>(owner)) + skip, std::min(slice, bytes - skip));
  };
  // Where `from`'s data for `owner` lies in its staging buffer: slices of the others, in order.
  const auto place = [&](std::size_t from, std::size_t owner) {
    return (owner < from ? owner : owner - 1) * slice;
  };
  const auto stage = [&](std::uint64_t round) {
    if (!i_stage || round >= rounds) return;
    std::byte* buffer = layout_.stage(base_, rank_, round);
    for (std::size_t owner = 0; owner < n; ++owner) {
      const auto [begin, length] = range(round, owner);
      if (owner == me || length == 0) continue;
      copy_from(input, begin, buffer + place(me, owner), length, staging);
    }
  };
  const auto combine_slice = [&](std::uint64_t round) {
    const auto [begin, length] = range(round, me);
    if (length == 0) return;
    workers_.split(length / element, kLine, [&, from = begin](std::size_t first, std::size_t last) {
      std::array<const std::byte*, kMaxRanks> sources;
      std::array<std::byte*, kMaxRanks + 1> targets;
      const std::size_t skip = first * element;
      input.for_each(from + skip, (last - first) * element,
                     [&](std::byte*, std::size_t done, std::size_t bytes) {
                       const std::size_t at = from + skip + done;
                       std::size_t count = 0;
                       for (std::size_t r = 0; r < n; ++r) {
                         sources[r] = readable_[r].reachable()
                                          ? readable_[r].at(at)
                                          : layout_.stage(base_, static_cast<int>(r), round) +
                                                place(r, me) + skip + done;
                         if (writable_[r].reachable())
                           targets[count++] = writable_[r].at(plan.in_output(at));
                       }
                       if (anyone_collects) {
                         targets[count++] = layout_.result(base_, rank_, round) + skip + done;
                       }
                       reduce(reduction, {sources.data(), n}, {targets.data(), count},
                              bytes / element, writing);
                     });
    });
  };
  const auto collect = [&](std::uint64_t round) {
    if (!i_collect) return;
    for (std::size_t owner = 0; owner < n; ++owner) {
      const auto [begin, length] = range(round, owner);
      if (owner == me || length == 0) continue;
      // What goes back to where it came from is in the cache already, if it fits.
      copy_to(output, begin, layout_.result(base_, static_cast<int>(owner), round), length,
              StoreHint::kCached);
    }
  };

  const std::uint64_t base = step_;
  stage(0);
  publish_step(base + 1);  // A(0)
  for (std::uint64_t t = 0; t < rounds; ++t) {
    stage(t + 1);
    publish_step(base + 2 * t + 2);                    // A(t + 1)
    wait_steps(running, base + (t == 0 ? 1 : 2 * t));  // A(t)
    combine_slice(t);
    publish_step(base + 2 * t + 3);  // B(t)
    if (t == 0) continue;
    wait_steps(running, base + 2 * t + 1);  // B(t - 1)
    collect(t - 1);
  }
  step_ = base + 2 * rounds + 1;
  wait_steps(running, step_);
  collect(rounds - 1);
}

}  // namespace convoy::coll
