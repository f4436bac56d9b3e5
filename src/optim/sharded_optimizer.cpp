#include "convoy/sharded_optimizer.h"

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <limits>
#include <map>
#include <optional>

#include "base/error.h"
#include "base/id.h"
#include "base/log.h"
#include "base/thread.h"
#include "ddp/agreement.h"
#include "ddp/hook_state.h"
#include "ddp/join_context.h"
#include "optim/sharded_optimizer_impl.h"

namespace convoy {
namespace {

void check(const ShardedOptimizerOptions& options) {
  if (!(options.max_norm >= 0)) refuse_sharded("max_norm must be >= 0, got ", options.max_norm);
  if (options.norm_type != 2 && options.norm_type != std::numeric_limits<double>::infinity()) {
    refuse_sharded("norm_type must be 2 or infinity, got ", options.norm_type);
  }
}

}  // namespace

// --- construction ---

ShardedOptimizerBase::Impl::Impl(ShardedOptimizerBase& owner, Reducer& reducer,
                                 const ShardedOptimizerOptions& options)
    : owner_(&owner), options_(options), group_(reducer.group()) {
  std::optional<Error> error;
  std::vector<std::string> lines;
  try {
    check(options_);
    find_members(reducer);
    lines = describe_with(rules());
  } catch (const Error& e) {  // others wait in agree()
    error = e;
  } catch (const std::exception& e) {
    error.emplace(ErrorKind::kInvalidArgument, e.what());
  }
  agree(group_, "sharded optimizer", lines, error);
  shares_ = group_.size() == 1 || group_.can_round();
  rules_ = rules();
  move_in();
  make_state(items(rules_));
}

void ShardedOptimizerBase::Impl::find_members(Reducer& reducer) {
  std::map<const void*, std::size_t> known;
  const auto& all = reducer.parameters();
  for (std::size_t i = 0; i < all.size(); ++i) known[all[i].unsafeGetTensorImpl()] = i;
  std::map<std::size_t, ShardedParameter> found;
  const auto& groups = owner_->param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const OptimizerRule rule = rule_of(groups[g].options());
    check_rule(kShardedName, rule);
    for (const at::Tensor& parameter : groups[g].params()) {
      const auto place = known.find(parameter.unsafeGetTensorImpl());
      if (place == known.end())
        refuse_sharded("a tensor of group ", g, " is not a parameter of the reducer");
      const std::size_t index = place->second;
      const auto type = at::toRealValueType(parameter.scalar_type());
      if (type != at::kFloat && type != at::kDouble) {
        fail(ErrorKind::kUnsupported, kShardedName, ": parameter ", index, " is of ",
             parameter.scalar_type(), ", which is too coarse to add small steps to; keep it in ",
             "f32 and let DdpOptions::mixed_precision compute with less");
      }
      const ShardedParameter member{.index = index,
                                    .group = g,
                                    .parameter = parameter,
                                    .type = parameter.scalar_type(),
                                    .numbers = parameter.numel() * (parameter.is_complex() ? 2 : 1),
                                    .number_bytes = c10::elementSize(type)};
      if (!found.try_emplace(index, member).second) {
        refuse_sharded("parameter ", index, " is in two groups, or twice in one");
      }
    }
  }
  if (found.empty()) refuse_sharded("there is no parameter");
  takes_.resize(all.size());
  for (auto& [index, member] : found) {
    takes_[index] = true;
    members_.push_back(member);
  }
  round_.done.resize(members_.size());
  check_apart(*ReducerAccess::impl(reducer));
  ReducerAccess::impl(reducer)->check_port(takes_);
}

std::vector<std::string> ShardedOptimizerBase::Impl::describe_with(
    const std::vector<OptimizerRule>& rules) const {
  std::vector<std::string> lines;
  for (std::size_t g = 0; g < rules.size(); ++g) {
    lines.push_back(concat("group ", g, ": ", describe(rules[g]), " (", hash_of(rules[g], 0), ")"));
  }
  for (const ShardedParameter& member : members_) {
    lines.push_back(concat("parameter ", member.index, " is in group ", member.group));
  }
  lines.push_back(concat("norm ", options_.max_norm, " of type ", options_.norm_type,
                         ", skip_nonfinite ", options_.skip_nonfinite, ", in_backward ",
                         options_.in_backward));
  return lines;
}

// Learning rates come with the state.
std::vector<std::string> ShardedOptimizerBase::Impl::description() const {
  auto now = rules();
  for (OptimizerRule& rule : now) {
    std::visit([](auto& one) { one.lr = 0; }, rule);
  }
  return describe_with(now);
}

// Each gets memory of its own: those that share some would part.
void ShardedOptimizerBase::Impl::check_apart(const Reducer::Impl& reducer) const {
  std::multimap<const void*, const ShardedParameter*> by_storage;
  for (const ShardedParameter& member : members_) {
    const void* const storage = member.parameter.storage().unsafeGetStorageImpl();
    const auto [begin, end] = by_storage.equal_range(storage);
    for (auto other = begin; other != end; ++other) {
      const auto status = at::get_overlap_status(member.parameter, other->second->parameter);
      if (status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial) continue;
      fail(ErrorKind::kUnsupported, kShardedName, ": ", reducer.name_of(other->second->index),
           " and ", reducer.name_of(member.index),
           " share memory, which steps would separate; register one parameter for both");
    }
    by_storage.emplace(storage, &member);
  }
}

ShardedOptimizerBase::Impl::~Impl() = default;

void ShardedOptimizerBase::Impl::attach(const std::shared_ptr<Reducer::Impl>& reducer) {
  reducer_ = reducer;
  // One thread of each rank computes while another updates: all of them, or none. Not where the
  // last gradient may tell that there is no step.
  const bool looks_first = options_.max_norm != 0 || options_.skip_nonfinite ||
                           reducer->options().nonfinite != NonFinite::kIgnore;
  const bool wants = options_.in_backward && shares_ && !looks_first && !reducer->is_late();
  const at::Tensor all = at::full({1}, wants ? 1 : 0, at::kByte);
  group_.all_reduce(all, {.op = ReduceOp::kMin});
  overlaps_ = all.item<std::uint8_t>() != 0;
  if (overlaps_ && !thread_.joinable()) {
    thread_ = start_thread<std::jthread>([this](const std::stop_token& stop) { work(stop); });
  }
  reducer->attach(shared_from_this());
}

void ShardedOptimizerBase::Impl::detach() noexcept {
  owner_ = nullptr;
  if (const auto reducer = reducer_.lock()) reducer->detach(*this);
}

std::string ShardedOptimizerBase::Impl::name_of(const ShardedParameter& member) const {
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

// --- the public class ---

ShardedOptimizerBase::ShardedOptimizerBase(
    Reducer& reducer, const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::unique_ptr<torch::optim::OptimizerOptions> defaults,
    const ShardedOptimizerOptions& options)
    : Optimizer(groups, std::move(defaults)) {
  // Of options that are not its own libtorch knows only the defaults.
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (!groups[g].has_options()) continue;
    const auto* const rule = dynamic_cast<const RuleOptions*>(&groups[g].options());
    if (rule != nullptr) param_groups()[g].set_options(rule->clone());
  }
  const PurposeScope scope({.what = "the constructor of ShardedOptimizer"});
  told_from(reducer.group(), kShardedName, [&] {
    impl_ = std::shared_ptr<Impl>(new Impl(*this, reducer, options), DeleteAtHome());
  });
  try {
    impl_->attach(ReducerAccess::impl(reducer));
  } catch (...) {
    impl_->detach();  // this object is none
    throw;
  }
}

ShardedOptimizerBase::~ShardedOptimizerBase() { impl_->detach(); }

void ShardedOptimizerBase::Impl::check_process(const char* operation) const {
  if (home_.is_here()) return;
  fail(ErrorKind::kUnsupported, kShardedName, ": ", operation,
       ": this process is a forked child of the rank, whose parameters and state it would change; "
       "call it in the rank itself");
}

at::Tensor ShardedOptimizerBase::step(LossClosure closure) {
  impl_->check_process("step");
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  const PurposeScope scope({.what = "ShardedOptimizer::step"});
  told_from(impl_->group(), kShardedName, [&] {
    notify_join_context();
    impl_->step();
  });
  return loss;
}

void ShardedOptimizerBase::refuse_step(const std::string& reason) {
  impl_->check_process("refuse_step");
  const PurposeScope scope({.what = "ShardedOptimizer::step"});
  notify_join_context();
  impl_->step(reason.empty() ? "this rank cannot make the step" : reason);
}

ShardedOptimizerBase::Stats ShardedOptimizerBase::stats() const { return impl_->stats(); }
ShardedOptimizerBase::States ShardedOptimizerBase::states() const {
  impl_->check_process("states");
  const PurposeScope scope({.what = "torch::save or states() of a ShardedOptimizer"});
  return impl_->states();
}
void ShardedOptimizerBase::load_states(const States& states) {
  impl_->check_process("load_states");
  const PurposeScope scope({.what = "torch::load or load_states() of a ShardedOptimizer"});
  told_from(impl_->group(), kShardedName, [&] { impl_->load_states(states); });
}

// As those of OptimizerInBackward.
void ShardedOptimizerBase::save(torch::serialize::OutputArchive& archive) const {
  ByParameter counts;
  std::array<ByParameter, kMostStates> tensors;
  for (const auto& [index, state] : states()) {
    counts[index] = at::full({1}, state.steps, at::kLong);
    for (std::size_t k = 0; k < kMostStates; ++k) {
      if (state.states[k].defined()) tensors[k][index] = state.states[k];
    }
  }
  write_number(archive, kStepsName, stats().steps);
  write_state(archive, kCountsName, counts);
  for (std::size_t k = 0; k < kMostStates; ++k) write_state(archive, kStateNames[k], tensors[k]);
}

void ShardedOptimizerBase::load(torch::serialize::InputArchive& archive) {
  States found;
  for (const auto& [index, count] : read_state(archive, kCountsName)) {
    found[index].steps = count.item<std::int64_t>();
  }
  for (std::size_t k = 0; k < kMostStates; ++k) {
    for (const auto& [index, tensor] : read_state(archive, kStateNames[k])) {
      found[index].states[k] = tensor;
    }
  }
  const std::uint64_t steps = read_number(archive, kStepsName);
  load_states(found);
  impl_->set_steps(steps);
}
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
      throw JoinStepFailed();  // NOLINT(bugprone-std-exception-baseclass): see there
    }
  }

 private:
  ShardedOptimizerBase& optimizer_;
};

std::unique_ptr<JoinHook> ShardedOptimizerBase::join_hook(const JoinOptions& /*options*/) {
  return std::make_unique<ShardedJoinHook>(*this);
}

}  // namespace convoy
