#include "convoy/ddp.h"

#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <algorithm>

#include "base/error.h"
#include "ddp/mixed_precision.h"
#include "ddp/module_parameters.h"

namespace convoy {

DdpCore::DdpCore(std::shared_ptr<torch::nn::Module> module, ProcessGroup group,
                 const DdpOptions& options)
    : module_(std::move(module)), group_(std::move(group)), options_(options) {
  if (!group_) fail(ErrorKind::kInvalidArgument, "DistributedDataParallel: there is no group");
  if (!module_) fail(ErrorKind::kInvalidArgument, "DistributedDataParallel: there is no module");
  auto found = find_parameters(*module_, options_);
  const auto mixed = options_.mixed_precision.value_or(MixedPrecision{});
  try {
    check_mixed_precision(mixed);
  } catch (const Error& e) {
    if (found.error.empty()) found.error = e.what();
  }
  found.must_agree.push_back(describe(mixed));
  ReducerOptions more{.bucket_cap_mb = options_.bucket_cap_mb,
                      .bucket_cap_mb_list = options_.bucket_cap_mb_list,
                      .find_unused_parameters = options_.find_unused_parameters,
                      .static_graph = options_.static_graph,
                      .gradient_as_bucket_view = options_.gradient_as_bucket_view,
                      .skip_all_reduce_unused_params = options_.skip_all_reduce_unused_params,
                      .reduce = options_.reduce,
                      .launch = options_.launch,
                      .reduce_dtype = mixed.reduce_dtype ? mixed.reduce_dtype : mixed.param_dtype,
                      .names = std::move(found.names),
                      .sparse = std::move(found.sparse),
                      .delayed = std::move(found.delayed),
                      .must_agree = std::move(found.must_agree),
                      .error = std::move(found.error)};
  reducer_ = std::make_unique<Reducer>(found.parameters, group_, std::move(more));
  if (options_.init_sync && group_.size() > 1) {
    std::vector<at::Tensor> all = found.parameters;
    for (const auto& [name, buffer] : buffers()) all.push_back(buffer);
    broadcast_coalesced(group_, all);
  }
  if (mixed.buffer_dtype) cast_buffers(*mixed.buffer_dtype);
  if (mixed.param_dtype) {
    copies_ = std::make_shared<LowPrecisionCopies>(found.parameters, *mixed.param_dtype);
    // What is reduced is cast on its way back.
    reducer_->watch_backward([copies = copies_] { copies->lower_again(); },
                             [copies = copies_](Reducer::BackwardEnd end) {
                               copies->restore(end == Reducer::BackwardEnd::kAdds
                                                   ? CastGradients::kAll
                                                   : CastGradients::kSparse);
                             });
  }
}

DdpCore::~DdpCore() = default;
DdpCore::DdpCore(DdpCore&&) noexcept = default;
DdpCore& DdpCore::operator=(DdpCore&&) noexcept = default;

// Looked up each time: a module may replace its buffers.
NamedTensors DdpCore::buffers() const {
  NamedTensors found;
  for (const auto& item : module_->named_buffers()) {
    const bool ignored = std::find(options_.ignore.begin(), options_.ignore.end(), item.key()) !=
                         options_.ignore.end();
    if (item.value().defined() && !ignored) found.emplace_back(item.key(), item.value());
  }
  return found;
}

void DdpCore::cast_buffers(at::ScalarType type) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, buffer] : buffers()) {
    if (is_cast(buffer, type)) buffer.set_data(buffer.detach().to(type));
  }
}

std::optional<at::ScalarType> DdpCore::input_type() const {
  if (!copies_ || !options_.mixed_precision->cast_forward_inputs) return std::nullopt;
  return options_.mixed_precision->param_dtype;
}

void DdpCore::before_forward() {
  // Without a backward to come, after_forward() puts the parameters back.
  lowered_here_ = copies_ && copies_->lower();
  if (!at::GradMode::is_enabled()) return;
  reducer_->before_forward();
  if (options_.buffer_sync == BufferSync::kBeforeForward) run_buffer_sync();
}

void DdpCore::after_forward(const std::vector<at::Tensor*>& outputs) {
  if (!at::GradMode::is_enabled()) {
    if (lowered_here_) copies_->restore();
    return;
  }
  if (options_.buffer_sync == BufferSync::kAfterForward) run_buffer_sync();
  std::vector<at::Tensor> tensors;
  tensors.reserve(outputs.size());
  for (const at::Tensor* output : outputs) tensors.push_back(*output);
  // One rank may evaluate alone; but a model in eval mode can be trained, too.
  const auto forward =
      module_->is_training() ? Reducer::Forward::kInStep : Reducer::Forward::kAside;
  tensors = reducer_->prepare_for_backward(tensors, forward);
  for (std::size_t i = 0; i < outputs.size(); ++i) *outputs[i] = std::move(tensors[i]);
}

void DdpCore::run_buffer_sync() {
  if (!options_.forward_sync_buffers || !module_->is_training() || group_.size() == 1) return;
  if (reducer_->is_paused()) return;
  sync_buffers();
}

void DdpCore::sync_buffers() {
  const NamedTensors found = buffers();
  if (found.empty() || group_.size() == 1) return;
  if (buffer_hook_) return buffer_hook_(group_, found);
  std::vector<at::Tensor> tensors;
  for (const auto& [name, buffer] : found) tensors.push_back(buffer);
  broadcast_buffers(group_, tensors, statistics_of(*module_), staging_);
}

void DdpCore::set_buffer_hook(BufferHook hook, BufferSync when) {
  if (!hook) fail(ErrorKind::kInvalidArgument, "register_buffer_hook: there is no function in it");
  if (buffer_hook_) {
    fail(ErrorKind::kInvalidArgument, "register_buffer_hook: there is a buffer hook already");
  }
  buffer_hook_ = std::move(hook);
  options_.buffer_sync = when;
}

// A forward without a backward has left copies of the parameters in place.
void DdpCore::save(torch::serialize::OutputArchive& archive) const {
  if (copies_) copies_->restore();
  module_->save(archive);
}
void DdpCore::load(torch::serialize::InputArchive& archive) {
  if (copies_) copies_->restore();
  module_->load(archive);
}

}  // namespace convoy
