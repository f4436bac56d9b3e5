// ConvoyBackend: the group itself.
#include <cstdlib>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/concat.h"
#include "base/error.h"
#include "convoy/c10d_store.h"
#include "group/backend_impl.h"
#include "group/process_group_impl.h"
#include "group/rounding.h"
#include "tensor/memory.h"
#include "tensor/vector_math.h"

namespace convoy {
namespace {

// A copy: the caller's may change.
c10::intrusive_ptr<ConvoyBackend::Options> copy_of(
    const c10::intrusive_ptr<ConvoyBackend::Options>& options) {
  return options ? c10::make_intrusive<ConvoyBackend::Options>(*options)
                 : c10::make_intrusive<ConvoyBackend::Options>();
}

std::shared_ptr<coll::Group> make_group(const std::shared_ptr<Store>& store, int rank, int size,
                                        const ConvoyBackend::Options& options) {
  const auto& global = options.global_ranks_in_group;
  std::vector<int> job_ranks;
  if (global.size() == static_cast<std::size_t>(size))
    job_ranks.assign(global.begin(), global.end());
  return coll::Group::create(store, rank, size,
                             {.name = options.group_name.empty() ? "convoy" : options.group_name,
                              .timeout = options.timeout,
                              .threads = options.threads,
                              .read_private = options.read_private,
                              .job_ranks = std::move(job_ranks),
                              .ended = options.ended});
}

coll::ReduceOptions reduce_options(const c10d::ReduceOp& op) {
  coll::ReduceOptions options;
  TORCH_CHECK_VALUE(op <= c10d::ReduceOp::PREMUL_SUM, "unknown reduce operation");
  options.op = static_cast<ReduceOp>(static_cast<c10d::ReduceOp::RedOpType>(op));
  if (options.op == ReduceOp::kPremulSum) {
    const auto* factor = dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK_VALUE(factor, "PREMUL_SUM needs a factor: make it with makePreMulSum");
    options.factor = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>()
                                                     : factor->double_factor;
  }
  if (const auto* more = dynamic_cast<RoundingSupplement*>(op.supplement_.get())) {
    options.rounding = more->rounding;
  }
  return options;
}

}  // namespace

ConvoyBackend::Impl::Impl(std::shared_ptr<coll::Group> group, c10::intrusive_ptr<Options> options)
    : options_(std::move(options)), timeout_(options_->timeout), group_(std::move(group)) {
  options_->ended = {};  // it may own what this group came from
}

c10::intrusive_ptr<ConvoyBackend::Options> ConvoyBackend::Impl::current_options() const {
  auto options = c10::make_intrusive<Options>(*options_);
  options->timeout = std::chrono::ceil<std::chrono::milliseconds>(timeout_.load());
  return options;
}

coll::ReduceOptions ConvoyBackend::Impl::call(const c10d::ReduceOp& op,
                                              std::chrono::milliseconds asked) const {
  coll::ReduceOptions options = reduce_options(op);
  options.timeout = timeout(asked);
  return options;
}

void ConvoyBackend::Impl::keep_if_held(const coll::Medium& medium,
                                       std::shared_ptr<const void> memory) {
  if (!medium.holds_buffers()) return;
  static auto* const kept = new Guarded<std::vector<std::shared_ptr<const void>>>;
  kept->lock()->push_back(std::move(memory));
}

c10::intrusive_ptr<ConvoyWork> ConvoyBackend::Impl::make_work(const Job& job,
                                                              std::uint64_t number) {
  return c10::make_intrusive<ConvoyWork>(
      ConvoyWork::Description{group_->rank(), job.op, job.title, number, job.row}, job.inputs,
      job.outputs, completions_);
}

ConvoyBackend::ConvoyBackend(const std::shared_ptr<Store>& store, int rank, int size,
                             const c10::intrusive_ptr<Options>& options)
    : ConvoyBackend(make_group(store, rank, size, *copy_of(options)), options) {}

WorkPtr ConvoyBackend::Impl::submit(Job job, coll::Call call) {
  group_->check_process(name_of(job.title));
  if (!alone(job.asynchronous)) {
    auto work = begin(std::move(job), group_->last_issued() + 1,
                      [&](coll::Group& group, coll::Group::Callback done) {
                        return group.start(std::move(call), std::move(done));
                      });
    in_block([&](Block& block) { block.works.push_back(work); });
    return work;
  }
  RECORD_FUNCTION(job.title, std::vector<c10::IValue>(job.inputs.begin(), job.inputs.end()));
  const Completions::Told told(*completions_, *group_, job.op);
  try {
    group_->run(std::move(call));
  } catch (...) {
    keep_if_held(*group_->medium(), job.packing);
    throw;
  }
  job.end();
  return nullptr;
}

ConvoyBackend::ConvoyBackend(std::shared_ptr<coll::Group> group,
                             const c10::intrusive_ptr<Options>& options)
    : Backend(group->rank(), group->size()),
      impl_(std::make_unique<Impl>(std::move(group), copy_of(options))) {
  warm_vector_math();
  init();
}

coll::Group& ConvoyBackend::group() const { return impl_->group(); }

ConvoyBackend::ConvoyBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                             const c10::intrusive_ptr<Options>& options)
    : ConvoyBackend(from_c10d(store), rank, size, options) {}

ConvoyBackend::~ConvoyBackend() = default;

c10::intrusive_ptr<c10d::Backend::Options> ConvoyBackend::getBackendOptions() {
  return impl_->current_options();
}

void ConvoyBackend::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "timeout must be > 0 ms, got ", timeout.count(),
                    " (group \"", impl_->group().name(), "\", rank ", getRank(), " of ", getSize(),
                    ")");
  impl_->set_timeout(timeout);
}

uint64_t ConvoyBackend::getSequenceNumberForGroup() { return impl_->group().last_issued(); }

bool ConvoyBackend::Options::compare_shapes_by_default() {
  const char* const value = std::getenv("CONVOY_COMPARE_SHAPES");
  if (!value || std::string_view(value).empty() || std::string_view(value) == "1") return true;
  if (std::string_view(value) == "0") return false;
  fail(ErrorKind::kInvalidArgument, "CONVOY_COMPARE_SHAPES is \"", value, "\", neither 0 nor 1");
}

c10::intrusive_ptr<c10d::Backend> ConvoyBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  impl_->group().check_process("split");
  check_ranks("split", ranks, getSize());
  const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
  if (mine == ranks.end()) return nullptr;
  // Groups of other names, and other subsets of the same name, are apart.
  std::string members = concat("convoy/", opts ? opts->group_name : "", "/members");
  for (const int rank : ranks) members = concat(members, "-", rank);
  const auto own = c10::make_intrusive<c10d::PrefixStore>(members, store);
  return merge_with(own, opts, static_cast<int>(mine - ranks.begin()),
                    static_cast<int>(ranks.size()), ended_among(ranks));
}

std::function<std::map<int, std::string>()> ConvoyBackend::ended_among(
    const std::vector<int>& ranks) const {
  return [group = impl_->shared_group(), ranks] {
    std::map<int, std::string> ended;
    const auto losses = group->losses();
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const auto found = losses.find(ranks[r]);
      if (found != losses.end()) ended.emplace(static_cast<int>(r), found->second);
    }
    return ended;
  };
}

c10::intrusive_ptr<c10d::Backend> ConvoyBackend::merge(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank, const int& size) {
  return merge_with(store, opts, rank, size, {});
}

c10::intrusive_ptr<c10d::Backend> ConvoyBackend::merge_with(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts, int rank, int size,
    std::function<std::map<int, std::string>()> ended) {
  impl_->group().check_process("merge");
  auto options = impl_->current_options();
  options->global_ranks_in_group.clear();  // of this group
  options->ended = std::move(ended);
  if (opts) {
    options->timeout = opts->timeout;
    options->group_name = opts->group_name;
    options->group_desc = opts->group_desc;
    options->global_ranks_in_group = opts->global_ranks_in_group;
  }
  // Not under the name: halves that merge may each have their own.
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>("convoy", store);
  return make(prefixed, rank, size, options);
}

c10::intrusive_ptr<c10d::Backend> ConvoyBackend::make(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const c10::intrusive_ptr<Options>& options) const {
  return c10::make_intrusive<ConvoyBackend>(store, rank, size, options);
}

at::Tensor ConvoyBackend::allocateTensor(long numel, at::TensorOptions options) {
  return empty_shared({numel}, options);
}

std::shared_ptr<c10::Allocator> ConvoyBackend::getMemAllocator() {
  return {shared_allocator(), [](c10::Allocator*) {}};  // it lives forever
}

void ConvoyBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  impl_->group().check_process("registerOnCompletionHook");
  onCompletionHook_ = std::move(hook);  // hasHooks() looks there
  impl_->completions().set_hook(onCompletionHook_);
}

EventHandle ConvoyBackend::on_event(EventCallback callback) {
  return impl_->group().on_event(std::move(callback));
}

void ConvoyBackend::waitForPendingWorks() {
  impl_->group().check_process("waitForPendingWorks");
  impl_->completions().wait_for_all();
}

bool ConvoyBackend::compares_shapes() const { return impl_->options().compare_shapes; }

std::vector<int> ConvoyBackend::lost_ranks() const { return impl_->group().lost_ranks(); }

void ConvoyBackend::abort() { abort_because("abort() was called"); }

void ConvoyBackend::abort_because(const std::string& why) {
  impl_->group().check_process("abort");
  impl_->cancel_all(why);
  impl_->group().abort(why);
}

void ConvoyBackend::shutdown() {
  if (!impl_->is_here()) return;  // a forked child's copy: there is nothing to leave
  impl_->cancel_all("shutdown() was called");
  impl_->group().close();
}

c10d::ErrorType ConvoyBackend::getError() {
  const auto failure = impl_->group().failure();
  if (!failure) return c10d::ErrorType::SUCCESS;
  return *failure == ErrorKind::kTimeout ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR;
}

}  // namespace convoy
