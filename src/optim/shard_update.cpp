// ShardedOptimizer: adding up gradients and updating blocks.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/loop.h"
#include "base/wire.h"
#include "coll/control.h"
#include "coll/kernels.h"
#include "ddp/agreement.h"
#include "ddp/reduce_bucket.h"
#include "optim/sharded_optimizer_impl.h"

namespace convoy {
namespace {

constexpr std::int64_t kChunk = ShardLayout::kChunk;

// Of one thread: gradients of a chunk, added up. On the heap: every thread of the program would
// have to have so many bytes more.
template <class T>
T* scratch() {
  struct alignas(64) Chunk {
    T numbers[kChunk];
  };
  thread_local const auto chunk = std::make_unique_for_overwrite<Chunk>();
  return chunk->numbers;
}

template <class T>
constexpr coll::DataType kTypeOf = sizeof(T) == 4 ? coll::DataType::kF32 : coll::DataType::kF64;

template <class T>
T* at_number(std::byte* base, std::size_t offset, std::int64_t number) {
  return reinterpret_cast<T*>(base + offset) + number;
}

}  // namespace

std::vector<ShardedOptimizerBase::Impl::Task> ShardedOptimizerBase::Impl::tasks(
    const std::vector<Gradient>& gradients) const {
  std::vector<Task> made;
  for (const Gradient& gradient : gradients) {
    const auto [first, last] = layout_.blocks_of(gradient.member);
    for (std::size_t b = first; b < last; ++b) {
      if (layout_.blocks()[b].owner == group_.rank()) made.push_back({&gradient, b});
    }
  }
  return made;
}

// In the order of ranks, as an all-reduce does it: the same bits.
template <class T>
void ShardedOptimizerBase::Impl::add_up(const Gradient& gradient, std::int64_t begin,
                                        std::int64_t end, T* target) const {
  static_assert(kMostRanks >= coll::kMaxRanks);
  std::array<const std::byte*, kMostRanks> sources;
  for (std::size_t r = 0; r < gradient.sources.size(); ++r) {
    sources[r] = gradient.sources[r] + static_cast<std::size_t>(begin) * sizeof(T);
  }
  auto* const to = reinterpret_cast<std::byte*>(target);
  coll::reduce({.type = kTypeOf<T>, .op = op_, .ranks = group_.size()},
               {sources.data(), gradient.sources.size()}, {&to, 1},
               static_cast<std::size_t>(end - begin), coll::StoreHint::kCached);
}

// For norms: sums of this rank's blocks into its own bucket, whose numbers there nobody else reads.
void ShardedOptimizerBase::Impl::reduce_in_place(std::vector<Gradient>& gradients) {
  const auto me = static_cast<std::size_t>(group_.rank());
  for (Gradient& gradient : gradients) {
    if (!gradient.deferred) continue;
    const auto [first, last] = layout_.blocks_of(gradient.member);
    const auto add = [&](auto number, const ShardLayout::Block& block) {
      using T = decltype(number);
      auto* const own = const_cast<std::byte*>(gradient.sources[me]);
      add_up<T>(gradient, block.begin, block.end, reinterpret_cast<T*>(own) + block.begin);
    };
    at::parallel_for(static_cast<std::int64_t>(first), static_cast<std::int64_t>(last), 1,
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t b = begin; b < end; ++b) {
                         const auto& block = layout_.blocks()[static_cast<std::size_t>(b)];
                         if (block.owner != group_.rank()) continue;
                         members_[gradient.member].number_bytes == 4 ? add(float{}, block)
                                                                     : add(double{}, block);
                       }
                     });
    gradient.sources = {gradient.sources[me]};
    gradient.deferred = false;
  }
}

// Collective. Parts of blocks in the order of parameters, as OptimizerInBackward adds them.
double ShardedOptimizerBase::Impl::norm(const std::vector<Gradient>& gradients) {
  const auto blocks = static_cast<std::int64_t>(layout_.blocks().size());
  const at::Tensor parts = at::zeros({blocks}, at::kDouble);
  auto* const values = parts.mutable_data_ptr<double>();
  const auto mine = tasks(gradients);
  at::parallel_for(0, static_cast<std::int64_t>(mine.size()), 1, [&](auto begin, auto end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const Task& task = mine[static_cast<std::size_t>(t)];
      const auto& block = layout_.blocks()[task.block];
      const auto count = static_cast<std::size_t>(block.end - block.begin);
      const std::byte* const from = task.gradient->sources[0];
      values[task.block] = members_[block.item].number_bytes == 4
                               ? norm_of(reinterpret_cast<const float*>(from) + block.begin, count,
                                         options_.norm_type)
                               : norm_of(reinterpret_cast<const double*>(from) + block.begin, count,
                                         options_.norm_type);
    }
  });
  group_.all_reduce(parts);  // each part is one rank's: the others add zeros
  double total = 0;
  for (const Gradient& gradient : gradients) {
    const auto [first, last] = layout_.blocks_of(gradient.member);
    double sum = 0;
    for (std::size_t b = first; b < last; ++b) sum = join_norms(sum, values[b], options_.norm_type);
    total = join_norms(total, sum, options_.norm_type);
  }
  return options_.norm_type == 2 ? std::sqrt(total) : total;
}

// The same on all ranks.
void ShardedOptimizerBase::Impl::count(const std::vector<Gradient>& gradients) {
  for (const Gradient& gradient : gradients) ++members_[gradient.member].steps;
}

void ShardedOptimizerBase::Impl::update(const std::vector<Gradient>& gradients, double scale,
                                        Threads threads) {
  const auto mine = tasks(gradients);
  const auto number = static_cast<std::int64_t>(mine.size());
  if (threads == Threads::kOne) {
    for (const Task& task : mine) update_block(task, scale, 0);
  } else {
    // Not more threads than there are journals.
    constexpr auto kJournals = static_cast<std::int64_t>(ShardLayout::kJournals);
    const std::int64_t grain = std::max<std::int64_t>(1, (number + kJournals - 1) / kJournals);
    at::parallel_for(0, number, grain, [&](std::int64_t begin, std::int64_t end) {
      const auto journal = static_cast<std::size_t>(begin / grain) % ShardLayout::kJournals;
      for (std::int64_t t = begin; t < end; ++t) {
        update_block(mine[static_cast<std::size_t>(t)], scale, journal);
      }
    });
  }
  for (const Gradient& gradient : gradients) {
    ShardedParameter& member = members_[gradient.member];
    member.begun |= (states_of(rules_[member.group]) & 1) != 0;
  }
}

void ShardedOptimizerBase::Impl::update_block(const Task& task, double scale, std::size_t journal) {
  const auto& block = layout_.blocks()[task.block];
  const bool wide = members_[block.item].number_bytes == 8;
  for (std::int64_t begin = block.begin; begin < block.end; begin += kChunk) {
    if (wide) {
      update_chunk<double>(task, begin, scale, journal);
    } else {
      update_chunk<float>(task, begin, scale, journal);
    }
  }
}

template <class T>
void ShardedOptimizerBase::Impl::update_chunk(const Task& task, std::int64_t begin, double scale,
                                              std::size_t journal) {
  const auto& block = layout_.blocks()[task.block];
  const ShardedParameter& member = members_[block.item];
  const OptimizerRule& rule = rules_[member.group];
  const int me = group_.rank();
  const std::int64_t end = std::min(begin + kChunk, block.end);
  const auto numbers = static_cast<std::size_t>(end - begin);
  const std::size_t bytes = numbers * sizeof(T);

  std::uint64_t* const commit =
      word(me, block.word + static_cast<std::size_t>((begin - block.begin) / kChunk));
  RuleMemory<T> memory{
      .parameter = at_number<T>(memory_.data[static_cast<std::size_t>(me)], member.offset, begin),
      .gradient = nullptr,
      .states = {},
      .passage = {.word = commit, .journal = journal}};
  const Gradient& gradient = *task.gradient;
  const auto gradient_of = [&](std::size_t source) {
    return reinterpret_cast<const T*>(gradient.sources[source]) + begin;
  };
  if (!gradient.deferred || gradient.sources.size() == 1) {
    memory.gradient = gradient_of(0);
  } else if (gradient.sources.size() == 2) {  // as add_up() does, but for a NaN's bits
    memory.gradient = gradient_of(0);
    memory.passage.second_gradient = gradient_of(1);
    memory.passage.share = op_ == ReduceOp::kAvg ? T{0.5} : T{1};
  } else {
    add_up<T>(gradient, begin, end, scratch<T>());
    memory.gradient = scratch<T>();
  }
  const unsigned used = states_of(rule);
  std::byte* const base = state_.data[static_cast<std::size_t>(me)];
  for (std::size_t k = 0; k < kMostStates; ++k) {
    if ((used >> k & 1) == 0) continue;
    memory.states[k] = at_number<T>(base, block.states[k], begin - block.begin);
    memory.passage.copies[k] = reinterpret_cast<T*>(base + layout_.journal(me, journal, k));
  }
  apply_rule(rule, {.number = member.steps, .first = !member.begun, .gradient_scale = scale},
             memory, numbers);
  std::atomic_ref<std::uint64_t>(*commit).store(CommitWord::kWhole, std::memory_order_release);

  for (std::size_t r = 0; r < memory_.data.size(); ++r) {
    if (static_cast<int>(r) == me || memory_.data[r] == nullptr) continue;
    auto* const to =
        reinterpret_cast<std::byte*>(at_number<T>(memory_.data[r], member.offset, begin));
    coll::copy(to, reinterpret_cast<const std::byte*>(memory.parameter), bytes,
               coll::hint_for_output(memory_.mine.nbytes()));
  }
}

// Where ranks do not share memory: all get the results of all.
void ShardedOptimizerBase::Impl::gather_results(const std::vector<bool>& has) {
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(group_.size()));
  const auto for_each = [&](const auto& function) {
    std::fill(bytes.begin(), bytes.end(), 0);
    for (const auto& block : layout_.blocks()) {
      if (!has[block.item]) continue;
      const ShardedParameter& member = members_[block.item];
      const auto length =
          static_cast<std::int64_t>(member.number_bytes) * (block.end - block.begin);
      auto& place = bytes[static_cast<std::size_t>(block.owner)];
      function(block,
               memory_.data[static_cast<std::size_t>(group_.rank())] + member.offset +
                   static_cast<std::size_t>(block.begin) * member.number_bytes,
               place, static_cast<std::size_t>(length));
      place += length;
    }
  };
  for_each([](const auto&, std::byte*, std::int64_t, std::size_t) {});
  const std::int64_t most = *std::max_element(bytes.begin(), bytes.end());
  if (most == 0) return;
  const at::Tensor all = at::zeros({group_.size(), most}, at::kByte);
  const at::Tensor mine = all[group_.rank()].clone();
  auto* const packed = static_cast<std::byte*>(mine.mutable_data_ptr());
  for_each([&](const auto& block, std::byte* data, std::int64_t place, std::size_t length) {
    if (block.owner == group_.rank()) std::memcpy(packed + place, data, length);
  });
  group_.all_gather_single(all.view({-1}), mine);
  const auto* const from = static_cast<const std::byte*>(all.const_data_ptr());
  for_each([&](const auto& block, std::byte* data, std::int64_t place, std::size_t length) {
    if (block.owner != group_.rank()) {
      std::memcpy(data, from + block.owner * most + place, length);
    }
  });
}

// --- while a backward goes on ---

// A message for each bucket:
//   0  1: go, 2: something has gone wrong on this rank, 3: not yet
//   1  hash of the options
//   9  by place in the bucket: used by this rank
void ShardedOptimizerBase::Impl::launched(std::size_t index, bool good,
                                          const std::vector<bool>& used) {
  const at::NoGradGuard no_grad;
  constexpr std::int64_t kHead = 9;
  Launched item;
  item.mine = at::zeros({kHead + static_cast<std::int64_t>(used.size())}, at::kByte);
  item.all = at::empty({group_.size() * item.mine.numel()}, at::kByte);
  std::exception_ptr error;  // the message goes all the same: the others wait for it
  if (good) {
    try {
      prepare(index, item);
    } catch (...) {
      error = std::current_exception();
      good = false;
    }
  }
  WireWriter out(wire_bytes(item.mine));
  out.put(static_cast<std::uint8_t>(!good ? 2 : must_grow() ? 3 : 1));
  out.put(options_hash());
  for (const bool one : used) out.put(std::uint8_t{one});
  item.work = group_.all_gather_single_async(item.all, item.mine);
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(item));
    changed_.notify_all();
  }
  if (error) std::rethrow_exception(error);
}

// What the thread needs for this bucket.
void ShardedOptimizerBase::Impl::prepare(std::size_t index, Launched& item) {
  if (stuck_)
    fail(ErrorKind::kTimeout, kShardedName,
         ": the update thread of an earlier step is still running");
  if (!round_.begun) take_rules();  // before the thread has work
  round_.begun = true;
  const auto reducer = reducer_.lock();
  const Bucket& bucket = reducer->buckets()[index];
  std::vector<bool> has(members_.size());
  for (std::size_t m = 0; m < members_.size(); ++m) {
    const auto place = reducer->place_of(members_[m].index);
    if (place.bucket != &bucket || !members_[m].parameter.requires_grad()) continue;
    has[m] = true;
    hold(members_[m]);
    item.places.push_back(place.slot);
    // From here on others may write into it; a graph that still needs it must not be followed.
    members_[m].parameter.unsafeGetTensorImpl()->bump_version();
  }
  item.gradients = gradients(has);
}

void ShardedOptimizerBase::Impl::work(const std::stop_token& stop) {
  set_thread_name("convoy-shard");
  for (;;) {
    Launched item;
    bool broken = false;
    {
      std::unique_lock lock(mutex_);
      if (!changed_.wait(lock, stop, [&] { return !queue_.empty(); })) return;
      item = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      broken = trouble_ != nullptr;
    }
    std::exception_ptr error;
    try {
      item.work.wait();
      if (!broken) update_launched(item);
    } catch (...) {
      error = std::current_exception();
    }
    item = {};
    const std::lock_guard lock(mutex_);
    busy_ = false;
    if (error && !trouble_) trouble_ = error;
    changed_.notify_all();
  }
}

// Every rank has all gradients of this bucket.
void ShardedOptimizerBase::Impl::update_launched(Launched& item) {
  const auto stride = static_cast<std::size_t>(item.mine.numel());
  const auto* const mine = item.mine.const_data_ptr<std::uint8_t>();
  const auto* const all = item.all.const_data_ptr<std::uint8_t>();
  const auto ranks = static_cast<std::size_t>(group_.size());
  for (std::size_t r = 0; r < ranks; ++r) {
    if (all[r * stride] != 1) return;
  }
  for (std::size_t r = 0; r < ranks; ++r) {
    if (std::memcmp(all + r * stride + 1, mine + 1, sizeof(std::uint64_t)) == 0) continue;
    throw AgreedError(ErrorKind::kInvalidArgument,
                      concat(kShardedName, ": rank ", r,
                             " has other options in its groups than rank ", group_.rank()));
  }
  constexpr std::size_t kHead = 9;
  std::vector<Gradient> used;
  for (std::size_t k = 0; k < item.gradients.size(); ++k) {
    for (std::size_t r = 0; r < ranks; ++r) {
      if (all[r * stride + kHead + item.places[k]] == 0) continue;
      used.push_back(std::move(item.gradients[k]));
      break;
    }
  }
  count(used);
  update(used, 1, Threads::kOne);
  for (const Gradient& gradient : used) round_.done[gradient.member] = round_.some_done = true;
}

}  // namespace convoy
