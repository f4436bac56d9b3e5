// ShardedOptimizer: where parameters and states lie, checkpoints, change of group.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Storage.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "base/error.h"
#include "convoy/allocator.h"
#include "ddp/hook_state.h"
#include "optim/sharded_optimizer_impl.h"

namespace convoy {
namespace {

std::uint64_t* word_of(const PeerMemory& memory, int rank, std::size_t index) {
  return reinterpret_cast<std::uint64_t*>(memory.data[static_cast<std::size_t>(rank)]) + index;
}

std::uint64_t read(std::uint64_t* word) {
  return std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_acquire);
}

// Calls function(word, begin, end) for each chunk of a block.
template <class Function>
void for_each_chunk(const ShardLayout::Block& block, const Function& function) {
  std::size_t word = block.word;
  for (std::int64_t begin = block.begin; begin < block.end; begin += ShardLayout::kChunk) {
    function(word++, begin, std::min(begin + ShardLayout::kChunk, block.end));
  }
}

// A state of one item from the memory of all owners, also of one that died while it changed it.
void gather_state(const ShardLayout& layout, const PeerMemory& memory, std::size_t item,
                  std::size_t state, std::byte* whole) {
  const std::size_t size = layout.items()[item].number_bytes;
  const auto [first, last] = layout.blocks_of(item);
  for (std::size_t b = first; b < last; ++b) {
    const auto& block = layout.blocks()[b];
    const std::byte* const base = memory.data[static_cast<std::size_t>(block.owner)];
    if (base == nullptr) continue;
    for_each_chunk(block, [&](std::size_t index, std::int64_t begin, std::int64_t end) {
      const std::uint64_t word = read(word_of(memory, block.owner, index));
      copy_whole_state(
          word, base + block.states[state] + static_cast<std::size_t>(begin - block.begin) * size,
          CommitWord::is_changing(word, state)
              ? base + layout.journal(block.owner, CommitWord::journal_of(word), state)
              : nullptr,
          static_cast<std::size_t>(end - begin), size,
          whole + static_cast<std::size_t>(begin) * size);
    });
  }
}

// A tensor like this one in a part of that memory, with a storage of its own: who saves it shall
// not save all the memory with it.
at::Tensor home_of(const at::Tensor& flat, std::size_t offset, const at::Tensor& like) {
  auto* const data = static_cast<std::byte*>(flat.mutable_data_ptr()) + offset;
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(), like.nbytes(),
      c10::DataPtr(
          data, new at::Tensor(flat), [](void* kept) { delete static_cast<at::Tensor*>(kept); },
          c10::Device(c10::DeviceType::CPU)),
      nullptr, false);
  c10::DimVector strides(like.strides());
  if (!like.is_non_overlapping_and_dense()) strides = c10::contiguous_strides(like.sizes());
  at::Tensor made = at::empty({0}, at::TensorOptions().dtype(like.scalar_type()));
  made.set_(storage, 0, like.sizes(), strides);
  return made;
}

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

}  // namespace

std::uint64_t* ShardedOptimizerBase::Impl::word(int rank, std::size_t index) const {
  return word_of(state_, rank, index);
}

// --- parameters ---

// Collective.
void ShardedOptimizerBase::Impl::move_in() {
  const at::NoGradGuard no_grad;
  std::size_t bytes = 0;
  for (ShardedParameter& member : members_) {
    member.offset = bytes;
    bytes +=
        (static_cast<std::size_t>(member.numbers) * member.number_bytes + kShardAlignment - 1) /
        kShardAlignment * kShardAlignment;
  }
  memory_ = PeerMemory::allocate(group_, std::max(bytes, kShardAlignment), memory_kind());
  for (ShardedParameter& member : members_) {
    member.home = home_of(memory_.mine, member.offset, member.parameter);
    hold(member);
  }
  // What the parameters left is as large as they are, and nothing may ever need it again.
  if (is_allocator_installed()) trim_allocator();
}

// The parameter's data may have been replaced, as torch::load does.
void ShardedOptimizerBase::Impl::hold(ShardedParameter& member) {
  const at::Tensor& parameter = member.parameter;
  if (parameter.scalar_type() != member.type || parameter.numel() == 0) return;  // a copy of it
  if (parameter.const_data_ptr() == member.home.const_data_ptr() &&
      parameter.strides().equals(member.home.strides())) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (!parameter.sizes().equals(member.home.sizes())) {
    fail(ErrorKind::kInvalidArgument, kShardedName, ": ", name_of(member), " has sizes ",
         parameter.sizes(), " now, and had ", member.home.sizes());
  }
  const auto needs =
      at::detail::computeStorageNbytes(parameter.sizes(), parameter.strides(), parameter.itemsize(),
                                       static_cast<std::size_t>(parameter.storage_offset()));
  if (parameter.storage().nbytes() < needs) {
    fail(ErrorKind::kInvalidArgument, kShardedName, ": the memory of ", name_of(member),
         " was freed");
  }
  member.home.copy_(parameter.detach());
  parameter.set_data(member.home);
}

// --- states ---

bool ShardedOptimizerBase::Impl::must_grow() const { return items(rules_) != layout_.items(); }

bool ShardedOptimizerBase::Impl::is_kept(std::size_t member, std::size_t state) const {
  return (layout_.items()[member].states >> state & 1) != 0;
}

// Collective. What is there already is kept.
void ShardedOptimizerBase::Impl::make_state(const std::vector<ShardLayout::Item>& items) {
  const ShardLayout layout(items, group_.size());
  const int me = group_.rank();
  PeerMemory memory =
      PeerMemory::allocate(group_, std::max(layout.bytes_of(me), kShardAlignment), memory_kind());
  std::byte* const base = memory.data[static_cast<std::size_t>(me)];
  std::memset(base, 0, layout.bytes_of(me));
  for (std::size_t b = 0; b < layout.blocks().size(); ++b) {
    const auto& block = layout.blocks()[b];
    if (block.owner != me) continue;
    const ShardedParameter& member = members_[block.item];
    const auto numbers = static_cast<std::size_t>(block.end - block.begin);
    const bool known = !layout_.blocks().empty();
    for (std::size_t k = 0; k < kMostStates; ++k) {
      if (block.states[k] == ShardLayout::kNoState) continue;
      std::byte* const to = base + block.states[k];
      if (known && is_kept(block.item, k)) {
        std::memcpy(to, state_.data[static_cast<std::size_t>(me)] + layout_.blocks()[b].states[k],
                    numbers * member.number_bytes);
      } else if (k == 0) {
        fill_initial(member, to, numbers);
      }
    }
  }
  group_.barrier();  // if a rank dies before it is there, all keep what they had
  state_ = std::move(memory);
  layout_ = layout;
}

void ShardedOptimizerBase::Impl::fill_initial(const ShardedParameter& member, std::byte* to,
                                              std::size_t numbers) const {
  const double value = initial_state(rules_[member.group]);
  if (member.number_bytes == 4) {
    std::fill_n(reinterpret_cast<float*>(to), numbers, static_cast<float>(value));
  } else {
    std::fill_n(reinterpret_cast<double*>(to), numbers, value);
  }
}

// This rank's part of it; an undefined one: as in the beginning.
void ShardedOptimizerBase::Impl::put_state(std::size_t m, std::size_t state,
                                           const at::Tensor& whole) {
  const ShardedParameter& member = members_[m];
  const auto [first, last] = layout_.blocks_of(m);
  for (std::size_t b = first; b < last; ++b) {
    const auto& block = layout_.blocks()[b];
    if (block.owner != group_.rank()) continue;
    const auto numbers = static_cast<std::size_t>(block.end - block.begin);
    std::byte* const to = state_.data[static_cast<std::size_t>(block.owner)] + block.states[state];
    if (whole.defined()) {
      std::memcpy(
          to, bytes_of(whole).data() + static_cast<std::size_t>(block.begin) * member.number_bytes,
          numbers * member.number_bytes);
    } else if (state == 0) {
      fill_initial(member, to, numbers);
    } else {
      std::memset(to, 0, numbers * member.number_bytes);
    }
  }
}

// Laid out as the parameter. Collective unless memory is shared.
at::Tensor ShardedOptimizerBase::Impl::whole_state(std::size_t m, std::size_t state) const {
  at::Tensor whole = at::zeros_like(members_[m].home);
  gather_state(layout_, state_, m, state, static_cast<std::byte*>(whole.mutable_data_ptr()));
  if (!shares_) {
    // Bits that one rank has, and the others as zeros.
    const at::Tensor bits =
        at::from_blob(whole.mutable_data_ptr(),
                      {static_cast<std::int64_t>(whole.nbytes() / sizeof(std::int32_t))}, at::kInt);
    group_.all_reduce(bits);
  }
  return whole;
}

// --- checkpoints ---

ShardedOptimizerBase::States ShardedOptimizerBase::Impl::states() const {
  const at::NoGradGuard no_grad;
  group_.barrier();  // nobody updates any more
  States found;
  for (std::size_t m = 0; m < members_.size(); ++m) {
    const ShardedParameter& member = members_[m];
    ParameterState& state = found[member.index];
    state.steps = member.steps;
    if (member.steps == 0) continue;
    for (std::size_t k = 0; k < kMostStates; ++k) {
      if (is_kept(m, k) && (k != 0 || member.begun)) state.states[k] = whole_state(m, k);
    }
  }
  group_.barrier();  // nor before all have read
  return found;
}

void ShardedOptimizerBase::Impl::load_states(const States& states) {
  const at::NoGradGuard no_grad;
  const auto refuse = [](const auto&... text) {
    fail(ErrorKind::kInvalidArgument, kShardedName, ": ", text...);
  };
  if (states.size() != members_.size()) {
    refuse("states of ", states.size(), " parameters, not ", members_.size());
  }
  for (const ShardedParameter& member : members_) {
    const auto found = states.find(member.index);
    if (found == states.end()) refuse("there is no state of parameter ", member.index);
    for (const at::Tensor& state : found->second.states) {
      if (state.defined()) {
        check_state(state, member.parameter.numel(), member.index, kShardedName);
      }
    }
  }
  std::int64_t most = 0;
  for (std::size_t m = 0; m < members_.size(); ++m) {
    ShardedParameter& member = members_[m];
    const ParameterState& state = states.at(member.index);
    member.steps = state.steps;
    member.begun = state.states[0].defined();
    most = std::max(most, state.steps);
    for (std::size_t k = 0; k < kMostStates; ++k) {
      if (!is_kept(m, k)) continue;
      at::Tensor whole;
      if (state.states[k].defined()) {
        whole = at::empty_like(member.home).copy_(state.states[k].reshape(member.home.sizes()));
      }
      put_state(m, k, whole);
    }
  }
  stats_.steps = static_cast<std::uint64_t>(most);
}

// --- change of group ---

// The dead have written their own parameters first: what they finished is there, whether or not
// this rank was told. What they were about to change, this rank still has.
void ShardedOptimizerBase::Impl::leave_group() {
  if (!shares_) return;
  std::byte* const mine = memory_.data[static_cast<std::size_t>(group_.rank())];
  for (const auto& block : layout_.blocks()) {
    if (block.owner == group_.rank()) continue;
    const ShardedParameter& member = members_[block.item];
    const std::byte* const theirs = memory_.data[static_cast<std::size_t>(block.owner)];
    for_each_chunk(block, [&](std::size_t index, std::int64_t begin, std::int64_t end) {
      if (read(word(block.owner, index)) != CommitWord::kWhole) return;
      const std::size_t at = member.offset + static_cast<std::size_t>(begin) * member.number_bytes;
      std::memcpy(mine + at, theirs + at,
                  static_cast<std::size_t>(end - begin) * member.number_bytes);
    });
  }
  for (const ShardedParameter& member : members_)
    member.parameter.unsafeGetTensorImpl()->bump_version();
}

// If it fails, the shards of the group before are still there, for the next one.
void ShardedOptimizerBase::Impl::enter_group(const std::shared_ptr<Reducer::Impl>& reducer,
                                             int root) {
  const auto members = members_;
  const auto layout = layout_;
  const auto state = state_, memory = memory_;
  const auto group = group_;
  const auto shares = shares_;
  const auto stats = stats_;
  const auto before = reducer_;
  try {
    move_shards(reducer, root);
  } catch (...) {
    members_ = members;
    layout_ = layout;
    state_ = state;
    memory_ = memory;
    group_ = group;
    shares_ = shares;
    stats_ = stats;
    reducer_ = before;
    throw;
  }
}

// Ranks that are not in the new group need not come; their memory is still mapped.
void ShardedOptimizerBase::Impl::move_shards(const std::shared_ptr<Reducer::Impl>& reducer,
                                             int root) {
  const at::NoGradGuard no_grad;
  const ShardLayout old_layout = std::exchange(layout_, {});
  const PeerMemory old_state = std::exchange(state_, {});
  const PeerMemory old_memory = std::exchange(memory_, {});
  const bool complete = shares_ || stats_.steps == 0;
  group_ = reducer->group();
  shares_ = group_.size() == 1 || group_.can_round();
  const bool gives = group_.rank() == root;

  // What the root knows: counts of steps; by member steps, whether begun, which states.
  const auto n = static_cast<std::int64_t>(members_.size());
  const at::Tensor facts = at::zeros({3 + 3 * n}, at::kLong);
  auto* const numbers = facts.mutable_data_ptr<std::int64_t>();
  numbers[0] = complete ? 1 : 0;
  numbers[1] = static_cast<std::int64_t>(stats_.steps);
  numbers[2] = static_cast<std::int64_t>(stats_.skipped);
  for (std::int64_t m = 0; m < n; ++m) {
    const ShardedParameter& member = members_[static_cast<std::size_t>(m)];
    numbers[3 + 3 * m] = member.steps;
    numbers[4 + 3 * m] = member.begun ? 1 : 0;
    numbers[5 + 3 * m] = old_layout.items()[static_cast<std::size_t>(m)].states;
  }
  group_.broadcast(facts, {.root = root});
  if (numbers[0] == 0) {
    fail(ErrorKind::kUnsupported, kShardedName,
         ": ranks that do not share memory lose their shards when the group changes; save the "
         "state before, and load it afterwards");
  }
  stats_.steps = static_cast<std::uint64_t>(numbers[1]);
  stats_.skipped = static_cast<std::uint64_t>(numbers[2]);
  auto& groups = owner_->param_groups();
  const at::Tensor rates = at::zeros({static_cast<std::int64_t>(groups.size())}, at::kDouble);
  auto* const rate = rates.mutable_data_ptr<double>();
  for (std::size_t g = 0; g < groups.size(); ++g) rate[g] = groups[g].options().get_lr();
  group_.broadcast(rates, {.root = root});
  for (std::size_t g = 0; g < groups.size(); ++g) groups[g].options().set_lr(rate[g]);
  rules_ = rules();

  move_in();
  std::vector<ShardLayout::Item> wanted = items(rules_);
  for (std::int64_t m = 0; m < n; ++m) {
    ShardedParameter& member = members_[static_cast<std::size_t>(m)];
    member.steps = numbers[3 + 3 * m];
    member.begun = numbers[4 + 3 * m] != 0;
    wanted[static_cast<std::size_t>(m)].states = static_cast<unsigned>(numbers[5 + 3 * m]);
  }
  make_state(wanted);
  for (std::size_t m = 0; m < members_.size(); ++m) {
    for (std::size_t k = 0; k < kMostStates; ++k) {
      if (!is_kept(m, k) || members_[m].steps == 0 || members_[m].numbers == 0) continue;
      const at::Tensor whole = at::empty_like(members_[m].home);
      auto* const bytes = static_cast<std::byte*>(whole.mutable_data_ptr());
      if (gives) gather_state(old_layout, old_state, m, k, bytes);
      group_.broadcast(at::from_blob(bytes, {static_cast<std::int64_t>(whole.nbytes())}, at::kByte),
                       {.root = root});
      put_state(m, k, whole);
    }
  }
  attach(reducer);
  left_behind_.clear();  // all are here: nobody reads them any more
}

}  // namespace convoy
