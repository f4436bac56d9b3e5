// Reducer: looking at rounds, and what can be set.
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "ddp/agreement.h"
#include "ddp/reducer_impl.h"

namespace convoy {

// --- checks ---

void Reducer::Impl::check_finite(std::size_t index) {
  const Bucket& bucket = layout_.buckets[index];
  if (is_finite(bucket.buffer)) return;
  for (std::size_t slot = 0; slot < bucket.slots.size(); ++slot) {
    if (is_finite(bucket.slots[slot])) continue;
    const ParameterState& parameter = parameters_[bucket.parameters[slot]];
    return trouble(Ending::kNotFinite, concat("the gradient of ", parameter.name, ": ",
                                              describe_nonfinite(bucket.slots[slot])));
  }
}

// A rank that is alone has no buckets.
void Reducer::Impl::check_finite_alone() {
  if (options_.nonfinite == NonFinite::kIgnore) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = tensors_[i].grad();
    if (!parameters_[i].used || !gradient.defined() || is_finite(gradient)) continue;
    trouble(Ending::kNotFinite,
            concat("the gradient of ", parameters_[i].name, ": ", describe_nonfinite(gradient)));
  }
}

// A rank that has no inputs in a Join has an older model.
void Reducer::Impl::check_replicas() {
  const std::uint64_t every = options_.check_replicas_every;
  if (every == 0 || observer_.stats().backwards % every != 0 || size_ == 1) return;
  std::vector<std::string> names;
  for (const ParameterState& parameter : parameters_) names.push_back(parameter.name);
  std::string text;
  issue([&] {
    text = compare_replicas(group_, users_.replicas ? users_.replicas() : tensors_, names,
                            !join_.shadows());
  });
  if (!text.empty() && group_.rank() == join_.speaker()) {
    trouble(Ending::kDiffers, concat(text, ": ranks have diverged, maybe since the comparison ",
                                     every, " backwards ago"));
  }
}

void Reducer::Impl::skip_round(const std::string& reason) {
  log_warn(reason, "; this step is skipped on all ranks");
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (parameters_[i].active) tensors_[i].mutable_grad().reset();
    parameters_[i].summed.reset();
  }
  observer_.skip();
}

// --- statistics ---

std::vector<Stamps> Reducer::Impl::stamps_of_all(Ending outcome) const {
  // Clocks of other backends' ranks may be those of other hosts.
  if (outcome != Ending::kGood || alone_ || group_.backend_name() != "convoy") return {};
  return verdict_.stamps();
}

std::vector<std::string> Reducer::Impl::bucket_names() const {
  std::vector<std::string> names;
  for (std::size_t b = 0; b < layout_.buckets.size(); ++b) names.push_back(where(b));
  return names;
}

DdpStats Reducer::Impl::logging_data() const {
  DdpStats data;
  observer_.fill(data);
  data.world_size = size_;
  data.rank = group_.rank();
  data.backend_name = group_.backend_name();
  data.comm_hook = users_.hook ? "set" : "";
  data.find_unused_parameters = options_.find_unused_parameters;
  data.gradient_as_bucket_view = options_.gradient_as_bucket_view;
  data.static_graph = options_.static_graph;
  data.join_uneven_inputs = join_.is_active();
  data.bucket_cap_bytes =
      layout_.caps.empty() ? 0 : *std::max_element(layout_.caps.begin(), layout_.caps.end());
  std::vector<std::string> types;
  for (const at::Tensor& tensor : tensors_) {
    if (!tensor.requires_grad()) continue;
    ++data.num_parameter_tensors;
    data.total_parameter_size_bytes += static_cast<std::int64_t>(tensor.nbytes());
    const std::string type = c10::toString(tensor.scalar_type());
    if (std::find(types.begin(), types.end(), type) == types.end()) types.push_back(type);
  }
  for (const std::string& type : types) data.dtypes += (data.dtypes.empty() ? "" : ", ") + type;
  for (const Bucket& bucket : layout_.buckets) {
    data.rebuilt_bucket_sizes.push_back(static_cast<std::int64_t>(bucket.buffer.nbytes()));
    data.rebuilt_per_bucket_param_indices.push_back(bucket.parameters);
  }
  data.has_rebuilt_buckets = !layout_.buckets.empty();
  return data;
}

// --- setters ---

void Reducer::Impl::pause(int change) {
  paused_ += change;
  for (const auto& follower : users_.followers) {
    if (const auto other = follower.lock()) other->pause(change);
  }
}

void Reducer::Impl::set_static_graph() {
  if (observer_.stats().backwards > 0 || round_.open) {
    fail(ErrorKind::kInvalidArgument, "it is too late after ", observer_.stats().backwards,
         " backwards; call it before the first one that is reduced");
  }
  if (options_.static_graph) return;
  if (options_.find_unused_parameters) {
    log_warn("set_static_graph: find_unused_parameters is now without effect");
  }
  options_.static_graph = true;
}

// --- the public class ---

void Reducer::set_static_graph() {
  told_from(group(), "set_static_graph", [&] { impl_->set_static_graph(); });
}
bool Reducer::skipped() const { return impl_->skipped(); }
const RoundTimes& Reducer::timeline() const { return impl_->timeline().last(); }
DdpStats Reducer::logging_data() const { return impl_->logging_data(); }
void Reducer::set_sample_rate(std::uint64_t rate) {
  if (rate == 0) {
    fail(ErrorKind::kInvalidArgument, head_of(group(), "set_sample_rate"),
         "the rate is 0; it must be at least 1");
  }
  impl_->timeline().set_sample_rate(rate);
}
void Reducer::write_trace(const std::string& path) const {
  convoy::write_trace(group(), timeline(), impl_->bucket_names(), path);
}

}  // namespace convoy
