#include "convoy/sharded_optimizer.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "base/error.h"
#include "base/id.h"
#include "base/log.h"
#include "ddp/agreement.h"
#include "ddp/join_context.h"
#include "ddp/sharded_optimizer_impl.h"

namespace convoy {
namespace {

template <class... Text>
[[noreturn]] void refuse(const Text&... text) {
  fail(ErrorKind::kInvalidArgument, kShardedName, ": ", text...);
}

// What libtorch's options mean for our kernels.
OptimizerRule rule_of(const torch::optim::OptimizerOptions& options) {
  namespace optim = torch::optim;
  if (const auto* o = dynamic_cast<const optim::SGDOptions*>(&options)) {
    return Sgd{.lr = o->lr(),
               .momentum = o->momentum(),
               .dampening = o->dampening(),
               .weight_decay = o->weight_decay(),
               .nesterov = o->nesterov()};
  }
  const auto adam = [](auto rule, const auto& o) -> OptimizerRule {
    rule.lr = o.lr();
    rule.beta1 = std::get<0>(o.betas());
    rule.beta2 = std::get<1>(o.betas());
    rule.eps = o.eps();
    rule.weight_decay = o.weight_decay();
    rule.amsgrad = o.amsgrad();
    return rule;
  };
  if (const auto* o = dynamic_cast<const optim::AdamOptions*>(&options)) return adam(Adam(), *o);
  if (const auto* o = dynamic_cast<const optim::AdamWOptions*>(&options)) return adam(AdamW(), *o);
  if (const auto* o = dynamic_cast<const optim::AdagradOptions*>(&options)) {
    return Adagrad{.lr = o->lr(),
                   .lr_decay = o->lr_decay(),
                   .weight_decay = o->weight_decay(),
                   .initial_accumulator_value = o->initial_accumulator_value(),
                   .eps = o->eps()};
  }
  if (const auto* o = dynamic_cast<const optim::RMSpropOptions*>(&options)) {
    return RmsProp{.lr = o->lr(),
                   .alpha = o->alpha(),
                   .eps = o->eps(),
                   .weight_decay = o->weight_decay(),
                   .momentum = o->momentum(),
                   .centered = o->centered()};
  }
  refuse("a group has options of another optimizer");
}

void check(const ShardedOptimizerOptions& options) {
  if (!(options.max_norm >= 0)) refuse("a largest norm of ", options.max_norm);
  if (options.norm_type != 2 && options.norm_type != std::numeric_limits<double>::infinity()) {
    refuse("a norm of ", options.norm_type);
  }
}

}  // namespace

// --- construction ---

ShardedOptimizerBase::Impl::Impl(ShardedOptimizerBase& owner, Reducer& reducer,
                                 const ShardedOptimizerOptions& options)
    : owner_(&owner), options_(options), group_(reducer.group()) {
  std::string error;
  std::vector<std::string> lines;
  try {
    check(options_);
    find_members(reducer, lines);
  } catch (const Error& e) {
    error = e.what();
  }
  agree(group_, "sharded optimizer", lines, error, 0);
  shares_ = group_.size() == 1 || group_.can_round();
  rules_ = rules();
  move_in();
  make_state(items(rules_));
}

void ShardedOptimizerBase::Impl::find_members(Reducer& reducer, std::vector<std::string>& lines) {
  std::map<const void*, std::size_t> known;
  const auto& all = reducer.parameters();
  for (std::size_t i = 0; i < all.size(); ++i) known[all[i].unsafeGetTensorImpl()] = i;
  std::map<std::size_t, Member> found;
  const auto& groups = owner_->param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const OptimizerRule rule = rule_of(groups[g].options());
    check_rule(kShardedName, rule);
    lines.push_back(concat("group ", g, ": ", describe(rule), " (", hash_of(rule, 0), ")"));
    for (const at::Tensor& parameter : groups[g].params()) {
      const auto place = known.find(parameter.unsafeGetTensorImpl());
      if (place == known.end()) refuse("a tensor of group ", g, " is no parameter of the reducer");
      const std::size_t index = place->second;
      const auto type = at::toRealValueType(parameter.scalar_type());
      if (type != at::kFloat && type != at::kDouble) {
        fail(ErrorKind::kUnsupported, kShardedName, ": parameter ", index, " is of ",
             parameter.scalar_type(), ", which is too coarse to add small steps to; keep it in ",
             "f32 and let DdpOptions::mixed_precision compute with less");
      }
      const Member member{.index = index,
                          .group = g,
                          .parameter = parameter,
                          .type = parameter.scalar_type(),
                          .numbers = parameter.numel() * (parameter.is_complex() ? 2 : 1),
                          .number_bytes = c10::elementSize(type)};
      if (!found.try_emplace(index, member).second) {
        refuse("parameter ", index, " is in two groups, or twice in one");
      }
      lines.push_back(concat("parameter ", index, " is in group ", g));
    }
  }
  if (found.empty()) refuse("there is no parameter");
  takes_.resize(all.size());
  for (auto& [index, member] : found) {
    takes_[index] = true;
    members_.push_back(member);
  }
  done_.resize(members_.size());
  ReducerAccess::impl(reducer)->check_port(takes_);
  lines.push_back(concat("norm ", options_.max_norm, " of type ", options_.norm_type,
                         ", skip_nonfinite ", options_.skip_nonfinite, ", in_backward ",
                         options_.in_backward));
}

ShardedOptimizerBase::Impl::~Impl() = default;

void ShardedOptimizerBase::Impl::attach(const std::shared_ptr<Reducer::Impl>& reducer) {
  reducer_ = reducer;
  // One thread of each rank computes while another updates: all of them, or none.
  const bool wants = options_.in_backward && shares_ && options_.max_norm == 0 &&
                     !options_.skip_nonfinite && !reducer->is_late();
  const at::Tensor all = at::full({1}, wants ? 1 : 0, at::kByte);
  group_.all_reduce(all, {.op = ReduceOp::kMin});
  overlaps_ = all.item<std::uint8_t>() != 0;
  if (overlaps_ && !thread_.joinable()) {
    thread_ = std::jthread([this](const std::stop_token& stop) { work(stop); });
  }
  reducer->attach(shared_from_this());
}

void ShardedOptimizerBase::Impl::detach() noexcept {
  owner_ = nullptr;
  if (const auto reducer = reducer_.lock()) reducer->detach(*this);
}

std::string ShardedOptimizerBase::Impl::name_of(const Member& member) const {
  const auto reducer = reducer_.lock();
  return reducer ? reducer->name_of(member.index) : concat("#", member.index);
}

// --- options ---

std::vector<OptimizerRule> ShardedOptimizerBase::Impl::rules() const {
  std::vector<OptimizerRule> made;
  for (const auto& group : owner_->param_groups()) made.push_back(rule_of(group.options()));
  return made;
}

std::uint64_t ShardedOptimizerBase::Impl::options_hash() const {
  std::uint64_t hash = 0;
  for (const OptimizerRule& rule : rules_) hash = hash_of(rule, hash);
  return hash;
}

std::vector<ShardLayout::Item> ShardedOptimizerBase::Impl::items(
    const std::vector<OptimizerRule>& rules) const {
  std::vector<ShardLayout::Item> made;
  for (std::size_t m = 0; m < members_.size(); ++m) {
    // What was kept once is kept: options may change back.
    const unsigned before = m < layout_.items().size() ? layout_.items()[m].states : 0;
    made.push_back({.numbers = members_[m].numbers,
                    .number_bytes = members_[m].number_bytes,
                    .states = before | states_of(rules[members_[m].group])});
  }
  return made;
}

// --- a step ---

// What ranks tell each other:
//   0  1: ready, 2: not
//   1  hash of the options
//   9  for each member 1 if it has a gradient
void ShardedOptimizerBase::Impl::meet(const std::vector<bool>& has) {
  std::string error;
  try {
    if (owner_->param_groups().size() != rules_.size()) {
      refuse("groups cannot be added to it; make another one");
    }
    rules_ = rules();
    for (const OptimizerRule& rule : rules_) check_rule(kShardedName, rule);
    for (Member& member : members_) hold(member);
  } catch (const Error& e) {
    error = e.what();
  }
  constexpr std::int64_t kHead = 9;
  const at::Tensor mine = at::zeros({kHead + static_cast<std::int64_t>(has.size())}, at::kByte);
  auto* const bytes = mine.mutable_data_ptr<std::uint8_t>();
  bytes[0] = error.empty() ? 1 : 2;
  const std::uint64_t hash = options_hash();
  std::memcpy(bytes + 1, &hash, sizeof(hash));
  for (std::size_t m = 0; m < has.size(); ++m) bytes[kHead + static_cast<std::int64_t>(m)] = has[m];
  const at::Tensor all = group_.all_gather(mine);
  if (!error.empty()) throw Error(ErrorKind::kInvalidArgument, error);
  for (int r = 0; r < group_.size(); ++r) {
    const auto* const theirs = all[r].const_data_ptr<std::uint8_t>();
    if (theirs[0] != 1) refuse("rank ", r, " has refused the step: see its own error");
    if (std::memcmp(theirs + 1, bytes + 1, sizeof(hash)) != 0) {
      refuse("rank ", r, " has other options in its groups than rank ", group_.rank());
    }
    for (std::size_t m = 0; m < has.size(); ++m) {
      if ((theirs[kHead + static_cast<std::int64_t>(m)] != 0) == has[m]) continue;
      refuse("rank ", has[m] ? r : group_.rank(), " has no gradient for ", name_of(members_[m]),
             ", but rank ", has[m] ? group_.rank() : r, " has");
    }
  }
}

void ShardedOptimizerBase::Impl::step() {
  const auto reducer = reducer_.lock();
  if (!reducer) refuse("step: its reducer is no more");
  if (options_.in_backward) refuse("step: backward() is the step, by in_backward");
  if (reducer->is_busy()) refuse("step: inside of a backward");
  const at::NoGradGuard no_grad;
  std::vector<bool> has(members_.size());
  for (bool again = false;; again = true) {
    bool homeless = false;  // before the first backward that is reduced, for example
    for (std::size_t m = 0; m < members_.size(); ++m) {
      const at::Tensor& gradient = members_[m].parameter.grad();
      has[m] = gradient.defined() && members_[m].parameter.requires_grad();
      if (!has[m]) continue;
      const auto place = reducer->place_of(members_[m].index);
      homeless |= place.bucket == nullptr;
      if (place.bucket == nullptr || !place.bucket->deferred) continue;
      const at::Tensor& slot = place.bucket->slots[place.slot];
      if (!is_alias(gradient, slot)) slot.copy_(gradient);
    }
    meet(has);
    if (!homeless) break;
    CONVOY_CHECK(!again, "a gradient without a place in a bucket");
    reducer->sync_gradients();
  }
  run(has);
}

std::vector<ShardedOptimizerBase::Impl::Gradient> ShardedOptimizerBase::Impl::gradients(
    const std::vector<bool>& has) {
  const auto reducer = reducer_.lock();
  const bool sums = reducer->options().reduce.kind() == GradReduce::Kind::kSum;
  const ReduceOp op = sums ? ReduceOp::kSum : ReduceOp::kAvg;
  if (op_ != op) op_ = op;  // not while a thread reads it: it stays the same in a round
  std::vector<Gradient> found;
  for (std::size_t m = 0; m < members_.size(); ++m) {
    if (!has[m]) continue;
    const auto [bucket, slot] = reducer->place_of(members_[m].index);
    CONVOY_CHECK(bucket != nullptr);
    const at::Tensor& place = bucket->slots[slot];
    Gradient gradient{.member = m, .sources = {}, .deferred = bucket->deferred, .kept = {}};
    if (bucket->deferred) {
      const auto offset =
          static_cast<std::size_t>(place.storage_offset() - bucket->buffer.storage_offset()) *
          place.element_size();
      for (const std::byte* data : bucket->peers->data) gradient.sources.push_back(data + offset);
    } else {
      const at::Tensor& home = members_[m].home;
      at::Tensor tensor = options_.in_backward ? place : members_[m].parameter.grad();
      if (tensor.scalar_type() != home.scalar_type() || !tensor.strides().equals(home.strides())) {
        tensor = at::empty_like(home).copy_(tensor);
      }
      gradient.sources = {static_cast<const std::byte*>(tensor.const_data_ptr())};
      gradient.kept = tensor;
    }
    found.push_back(std::move(gradient));
  }
  return found;
}

// After meet().
void ShardedOptimizerBase::Impl::run(const std::vector<bool>& has) {
  try {
    if (must_grow()) make_state(items(rules_));
    auto all = gradients(has);
    double scale = 1;
    bool skips = false;
    if (options_.max_norm > 0 || options_.skip_nonfinite) {
      reduce_in_place(all);
      stats_.norm = norm(all);
      skips = options_.skip_nonfinite && !std::isfinite(stats_.norm);
      scale = clip_scale(stats_.norm, options_.max_norm);
    }
    for (const Gradient& gradient : all) {
      Member& member = members_[gradient.member];
      if (!skips) member.parameter.unsafeGetTensorImpl()->bump_version();
    }
    if (skips) {
      ++stats_.skipped;
    } else {
      count(all);
      ++stats_.steps;
      update(all, scale, Threads::kAll);
    }
    // In backward they are the reducer's.
    for (const Gradient& gradient : all) {
      if (!options_.in_backward) members_[gradient.member].parameter.mutable_grad().reset();
    }
    part(has);
  } catch (...) {
    give_up();
    throw;
  }
}

void ShardedOptimizerBase::Impl::part(const std::vector<bool>& has) {
  if (!shares_) gather_results(has);
  group_.barrier();
}

// In a handler: others wait for this rank. A lost or late one has ended the group already.
void ShardedOptimizerBase::Impl::give_up() noexcept {
  try {
    throw;
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kPeerLost || e.kind() == ErrorKind::kTimeout) return;
  } catch (...) {
  }
  try {
    group_.abort();
  } catch (...) {
  }
}

ShardedOptimizerBase::Stats ShardedOptimizerBase::Impl::stats() const {
  Stats all = stats_;
  all.numbers = static_cast<std::uint64_t>(layout_.numbers_of(group_.rank()));
  all.state_bytes = layout_.state_bytes_of(group_.rank());
  return all;
}

// --- rounds of the reducer ---

void ShardedOptimizerBase::Impl::finish(const std::vector<bool>& used) {
  if (!options_.in_backward) return;
  const at::NoGradGuard no_grad;
  std::vector<bool> has(members_.size());
  bool some = false;
  for (std::size_t m = 0; m < members_.size(); ++m) {
    has[m] = used[members_[m].index] && !done_[m] && members_[m].parameter.requires_grad();
    some |= has[m];
  }
  if (!some && some_done_) {
    ++stats_.steps;
    return;
  }
  meet(has);
  run(has);
}

void ShardedOptimizerBase::Impl::closed() noexcept {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
    trouble_ = nullptr;
  }
  std::fill(done_.begin(), done_.end(), false);
  some_done_ = in_round_ = false;
}

// --- the public class ---

ShardedOptimizerBase::ShardedOptimizerBase(
    Reducer& reducer, const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::unique_ptr<torch::optim::OptimizerOptions> defaults,
    const ShardedOptimizerOptions& options)
    : Optimizer(groups, std::move(defaults)) {
  impl_ = std::make_shared<Impl>(*this, reducer, options);
  impl_->attach(ReducerAccess::impl(reducer));
}

ShardedOptimizerBase::~ShardedOptimizerBase() { impl_->detach(); }

at::Tensor ShardedOptimizerBase::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  notify_join_context();
  impl_->step();
  return loss;
}

ShardedOptimizerBase::Stats ShardedOptimizerBase::stats() const { return impl_->stats(); }
void ShardedOptimizerBase::save(torch::serialize::OutputArchive& archive) const {
  impl_->save(archive);
}
void ShardedOptimizerBase::load(torch::serialize::InputArchive& archive) { impl_->load(archive); }
const ProcessGroup& ShardedOptimizerBase::join_process_group() const { return impl_->group(); }

// A rank without inputs has gradients of zeros from its part in the backward, and goes on to update
// its shard.
class ShardedJoinHook final : public JoinHook {
 public:
  explicit ShardedJoinHook(ShardedOptimizerBase& optimizer) : optimizer_(optimizer) {}
  void main_hook(const JoinStep& /*step*/) override {
    if (optimizer_.impl_->is_in_backward()) return;
    try {
      optimizer_.impl_->step();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInvalidArgument) throw;
      log_warn("while this rank has no inputs: ", error.what());
      throw JoinStepFailed();
    }
  }

 private:
  ShardedOptimizerBase& optimizer_;
};

std::unique_ptr<JoinHook> ShardedOptimizerBase::join_hook(const JoinOptions& /*options*/) {
  return std::make_unique<ShardedJoinHook>(*this);
}

}  // namespace convoy
