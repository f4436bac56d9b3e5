#include "exercise.h"

#include "base/concat.h"

namespace convoy::coll::test {
namespace {

constexpr std::array kNames = {"Barrier",
                               "MonitoredBarrier",
                               "AllReduce",
                               "Reduce",
                               "ReduceScatter",
                               "Broadcast",
                               "AllGather",
                               "Gather",
                               "Scatter",
                               "AllToAll",
                               "ReduceScatterV",
                               "AllGatherV",
                               "GatherV",
                               "ScatterV",
                               "AllToAllV",
                               "AllReduceCoalesced",
                               "ReduceScatterCoalesced",
                               "BroadcastCoalesced",
                               "AllGatherCoalesced"};
static_assert(kNames.size() == kOps);

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a + 0x9e3779b97f4a7c15 * (b + 1);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

void append(Buffer& to, const Buffer& more) { to.insert(to.end(), more.begin(), more.end()); }

// What a coalesced operation's buffers are as long as.
std::vector<std::size_t> coalesced_counts(std::size_t count) {
  if (count % 2 == 1) return {0, count, count / 2 + 1};
  return {count, 0, count / 2 + 1};
}

// As torch has it: an empty tensor has no memory.
Piece piece_of(Region& region, DataType type) {
  return {region.size() == 0 ? nullptr : region.data(), region.size() / size_of(type)};
}

}  // namespace

std::string_view name_of(Op op) { return kNames[static_cast<std::size_t>(op)]; }

bool reduces(Op op) {
  return op == Op::kAllReduce || op == Op::kReduce || op == Op::kReduceScatter ||
         op == Op::kReduceScatterV || op == Op::kAllReduceCoalesced ||
         op == Op::kReduceScatterCoalesced;
}

Exercise::Exercise(Group& group, const Step& step)
    : group_(group), step_(step), rank_(group.rank()), size_(group.size()) {
  switch (step.op) {
    case Op::kBarrier:
    case Op::kMonitoredBarrier: break;
    case Op::kAllReduce:
    case Op::kReduce:
    case Op::kReduceScatter:
    case Op::kBroadcast:
    case Op::kAllGather:
    case Op::kGather:
    case Op::kScatter:
    case Op::kAllToAll: prepare_plain(); break;
    case Op::kReduceScatterV:
    case Op::kAllGatherV:
    case Op::kGatherV:
    case Op::kScatterV:
    case Op::kAllToAllV: prepare_pieces(); break;
    case Op::kAllReduceCoalesced:
    case Op::kReduceScatterCoalesced:
    case Op::kBroadcastCoalesced:
    case Op::kAllGatherCoalesced: prepare_coalesced(); break;
  }
}

// Elements that rank `from` has for rank `to`.
std::size_t Exercise::elements(int from, int to) const {
  const auto vary = [&](std::uint64_t by) { return mix(step_.salt, by) % (2 * step_.count + 1); };
  switch (step_.op) {
    case Op::kReduceScatterV: return vary(static_cast<std::uint64_t>(to));
    case Op::kAllGatherV: return vary(static_cast<std::uint64_t>(from));
    case Op::kGatherV:
    case Op::kScatterV:
    case Op::kAllToAllV:
      return vary(static_cast<std::uint64_t>(64) * static_cast<std::uint64_t>(from) +
                  static_cast<std::uint64_t>(to));
    default: return step_.count;
  }
}

Buffer Exercise::data(int from, int to) const {
  return input_of(64 * from + to, step_.salt, step_.type, elements(from, to));
}

Buffer Exercise::combined(int to) const {
  std::vector<Buffer> inputs;
  for (int r = 0; r < size_; ++r) inputs.push_back(data(r, to));
  return reference::reduce({.type = step_.type, .op = step_.reduce, .ranks = size_}, inputs);
}

Place Exercise::next_place() {
  const int bit = (rank_ * 7 + placed_++) % 64;
  return step_.places >> bit & 1 ? Place::kShared : Place::kPrivate;
}

Region& Exercise::add_region(std::size_t bytes) {
  regions_.push_back(std::make_unique<Region>(group_, next_place(), bytes));
  return *regions_.back();
}

// One buffer in, one out.
void Exercise::prepare_plain() {
  const bool root = rank_ == step_.root;
  const std::size_t part = step_.count * size_of(step_.type);
  const auto me = static_cast<std::size_t>(rank_);
  Buffer in, out;
  bool reads = true, writes = true;
  std::size_t own_in = 0, own_out = 0;  // parts that are the same in place
  const auto all_for = [&](auto&& get) {
    Buffer all;
    for (int r = 0; r < size_; ++r) append(all, get(r));
    return all;
  };
  switch (step_.op) {
    case Op::kAllReduce:
    case Op::kReduce:
      in = data(rank_, 0);
      writes = step_.op == Op::kAllReduce || root;
      if (writes) out = combined(0);
      break;
    case Op::kReduceScatter:
      in = all_for([&](int r) { return data(rank_, r); });
      out = combined(rank_);
      own_in = me;
      break;
    case Op::kBroadcast:
      in = data(step_.root, 0);
      reads = root;
      out = in;
      break;
    case Op::kAllGather:
    case Op::kGather:
      in = data(rank_, 0);
      writes = step_.op == Op::kAllGather || root;
      if (writes) out = all_for([&](int r) { return data(r, 0); });
      own_out = me;
      break;
    case Op::kScatter:
      reads = root;
      if (reads) in = all_for([&](int r) { return data(rank_, r); });
      out = data(step_.root, rank_);
      own_in = me;
      break;
    default:  // kAllToAll
      in = all_for([&](int r) { return data(rank_, r); });
      out = all_for([&](int r) { return data(r, rank_); });
      break;
  }
  const bool in_place = step_.in_place && step_.op != Op::kAllToAll && reads && writes;
  if (in_place) {
    const bool outer_is_input = in.size() > out.size();
    Region& region = add_region(std::max(in.size(), out.size()));
    input_ = outer_is_input ? region.data() : region.data() + own_out * part;
    output_ = outer_is_input ? region.data() + own_in * part : region.data();
    if (!in.empty()) std::memcpy(input_, in.data(), in.size());
    checks_.push_back({&region, outer_is_input ? own_in * part : 0, out});
    return;
  }
  if (reads) {
    Region& region = add_region(in.size());
    region.fill(in);
    input_ = region.data();
    checks_.push_back({&region, 0, in});
  }
  if (writes) {
    Region& region = add_region(out.size());
    output_ = region.data();
    checks_.push_back({&region, 0, out});
  }
}

// A buffer for each rank.
void Exercise::prepare_pieces() {
  const bool root = rank_ == step_.root;
  const bool to_all = step_.op == Op::kAllGatherV;
  const auto input = [&](const Buffer& content) {
    Region& region = add_region(content.size());
    region.fill(content);
    inputs_.push_back(piece_of(region, step_.type));
    checks_.push_back({&region, 0, content});
  };
  const auto output = [&](const Buffer& content) {
    Region& region = add_region(content.size());
    outputs_.push_back(piece_of(region, step_.type));
    checks_.push_back({&region, 0, content});
  };
  const bool many_in = step_.op == Op::kReduceScatterV || step_.op == Op::kAllToAllV ||
                       (step_.op == Op::kScatterV && root);
  const bool many_out = to_all || step_.op == Op::kAllToAllV || (step_.op == Op::kGatherV && root);
  if (many_in) {
    for (int r = 0; r < size_; ++r) input(data(rank_, r));
  } else if (step_.op != Op::kScatterV) {
    input(data(rank_, to_all ? 0 : step_.root));
  }
  if (many_out) {
    for (int r = 0; r < size_; ++r) output(data(r, to_all ? 0 : rank_));
  } else if (step_.op == Op::kReduceScatterV) {
    output(combined(rank_));
  } else if (step_.op == Op::kScatterV) {
    output(data(step_.root, rank_));
  }
}

// Several buffers, each of them as in the plain operation.
void Exercise::prepare_coalesced() {
  const std::uint64_t salt = step_.salt;
  for (const std::size_t count : coalesced_counts(step_.count)) {
    ++step_.salt;
    step_.count = count;
    Buffer in, out;
    switch (step_.op) {
      case Op::kAllReduceCoalesced:
        in = data(rank_, 0);
        out = combined(0);
        break;
      case Op::kReduceScatterCoalesced:
        for (int r = 0; r < size_; ++r) append(in, data(rank_, r));
        out = combined(rank_);
        break;
      case Op::kBroadcastCoalesced:
        in = data(rank_, 0);
        out = data(step_.root, 0);
        break;
      default:  // kAllGatherCoalesced
        in = data(rank_, 0);
        for (int r = 0; r < size_; ++r) append(out, data(r, 0));
        break;
    }
    const bool one = step_.op == Op::kBroadcastCoalesced ||
                     (step_.in_place && step_.op == Op::kAllReduceCoalesced);
    Region& source = add_region(in.size());
    source.fill(in);
    Region& target = one ? source : add_region(out.size());
    inputs_.push_back(piece_of(source, step_.type));
    outputs_.push_back(piece_of(target, step_.type));
    if (!one) checks_.push_back({&source, 0, in});
    checks_.push_back({&target, 0, out});
  }
  step_.salt = salt;
}

Call Exercise::call() const {
  const CallMaker& make = group_.calls();
  const ReduceOptions reduce{.op = step_.reduce};
  const std::size_t count = step_.count;
  const DataType type = step_.type;
  const int root = step_.root;
  const Piece one_in = inputs_.empty() ? Piece{} : inputs_.front();
  const Piece one_out = outputs_.empty() ? Piece{} : outputs_.front();
  switch (step_.op) {
    case Op::kBarrier: return make.barrier();
    case Op::kMonitoredBarrier: return make.monitored_barrier();
    case Op::kAllReduce: return make.all_reduce(input_, output_, count, type, reduce);
    case Op::kReduce: return make.reduce(input_, output_, count, type, root, reduce);
    case Op::kReduceScatter: return make.reduce_scatter(input_, output_, count, type, reduce);
    case Op::kBroadcast: return make.broadcast(input_, output_, count, type, root);
    case Op::kAllGather: return make.all_gather(input_, output_, count, type);
    case Op::kGather: return make.gather(input_, output_, count, type, root);
    case Op::kScatter: return make.scatter(input_, output_, count, type, root);
    case Op::kAllToAll: return make.all_to_all(input_, output_, count, type);
    case Op::kReduceScatterV: return make.reduce_scatter_v(inputs_, one_out, type, reduce);
    case Op::kAllGatherV: return make.all_gather_v(one_in, outputs_, type);
    case Op::kGatherV: return make.gather_v(one_in, outputs_, type, root);
    case Op::kScatterV: return make.scatter_v(inputs_, one_out, type, root);
    case Op::kAllToAllV: return make.all_to_all_v(inputs_, outputs_, type);
    case Op::kAllReduceCoalesced: return make.all_reduce_coalesced(inputs_, outputs_, type, reduce);
    case Op::kReduceScatterCoalesced:
      return make.reduce_scatter_coalesced(inputs_, outputs_, type, reduce);
    case Op::kBroadcastCoalesced: return make.broadcast_coalesced(inputs_, type, root);
    case Op::kAllGatherCoalesced: return make.all_gather_coalesced(inputs_, outputs_, type);
  }
  return make.barrier();
}

void Exercise::run() { group_.run(call()); }

Work Exercise::start(const Group::Callback& done) { return group_.start(call(), done); }

void Exercise::check() const {
  for (const Part& part : checks_) {
    const Buffer all = part.region->content();
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(part.offset);
    const auto size = static_cast<std::ptrdiff_t>(part.expected.size());
    EXPECT_TRUE(same(Buffer(begin, begin + size), part.expected))
        << name_of(step_.op) << " of " << step_.count << " x " << to_string(step_.type) << ", "
        << to_string(step_.reduce) << ", root " << step_.root << ", places " << step_.places
        << (step_.in_place ? ", in place" : "") << ", rank " << rank_ << " of " << size_
        << ", buffer " << &part - checks_.data();
  }
}

}  // namespace convoy::coll::test
