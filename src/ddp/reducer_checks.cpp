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
  const Bucket& bucket = buckets_[index];
  if (is_finite(bucket.buffer)) return;
  for (std::size_t slot = 0; slot < bucket.slots.size(); ++slot) {
    if (is_finite(bucket.slots[slot])) continue;
    const Parameter& parameter = parameters_[bucket.parameters[slot]];
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
  if (every == 0 || stats_.backwards % every != 0 || size_ == 1) return;
  std::vector<std::string> names;
  for (const Parameter& parameter : parameters_) names.push_back(parameter.name);
  std::string text;
  issue([&] {
    text = compare_replicas(group_, replicas_ ? replicas_() : tensors_, names, !shadowing_);
  });
  const int speaker = join_ && !join_step_.live.empty() ? join_step_.live.front() : 0;
  if (!text.empty() && group_.rank() == speaker) {
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
  skipped_ = true;
  ++stats_.skipped;
  error_.clear();
}

// --- statistics ---

std::vector<Stamps> Reducer::Impl::stamps_of_all(Ending outcome) const {
  // Clocks of other backends' ranks may be those of other hosts.
  if (outcome != Ending::kGood || alone_ || group_.backend_name() != "convoy") return {};
  return verdict_.stamps();
}

void Reducer::Impl::observe(Ending outcome, Clock::time_point now) {
  const std::uint64_t number = stats_.backwards + 1;
  if (outcome == Ending::kGood && !shadowing_) {
    std::vector<bool> used;
    for (const Parameter& parameter : parameters_) used.push_back(parameter.used);
    can_be_static_ &= last_used_.empty() || used == last_used_;
    last_used_ = std::move(used);
  }
  const bool sampled = timeline_.is_sampled(number);
  if (sampled) {
    std::vector<std::pair<std::size_t, std::size_t>> arrivals;
    unused_bytes_ = 0;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& parameter = parameters_[i];
      if (parameter.arrival != 0) arrivals.emplace_back(parameter.arrival, i);
      if (parameter.active && parameter.arrival == 0 && !parameter.used) {
        unused_bytes_ += static_cast<std::int64_t>(tensors_[i].nbytes());
      }
    }
    std::sort(arrivals.begin(), arrivals.end());
    std::vector<std::size_t> order;
    for (const auto& [arrival, index] : arrivals) order.push_back(index);
    timeline_.set_order(std::move(order));
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      timeline_.set_bytes(b, static_cast<std::uint64_t>(buckets_[b].buffer.nbytes()));
    }
  }
  timeline_.close(number, last_gradient_, now, stamps_of_all(outcome), group_.rank());
  if (sampled && debug_ != DebugLevel::kOff) log_info(timeline_.last().report());
}

std::vector<std::string> Reducer::Impl::bucket_names() const {
  std::vector<std::string> names;
  for (std::size_t b = 0; b < buckets_.size(); ++b) names.push_back(where(b));
  return names;
}

DdpStats Reducer::Impl::logging_data() const {
  DdpStats data;
  timeline_.fill(data);
  data.world_size = size_;
  data.rank = group_.rank();
  data.backend_name = group_.backend_name();
  data.comm_hook = hook_ ? "set" : "";
  data.find_unused_parameters = options_.find_unused_parameters;
  data.gradient_as_bucket_view = options_.gradient_as_bucket_view;
  data.static_graph = options_.static_graph;
  data.can_set_static_graph = can_be_static_;
  data.join_uneven_inputs = join_ != nullptr;
  data.bucket_cap_bytes = caps_.empty() ? 0 : *std::max_element(caps_.begin(), caps_.end());
  std::vector<std::string> types;
  for (const at::Tensor& tensor : tensors_) {
    if (!tensor.requires_grad()) continue;
    ++data.num_parameter_tensors;
    data.total_parameter_size_bytes += static_cast<std::int64_t>(tensor.nbytes());
    const std::string type = c10::toString(tensor.scalar_type());
    if (std::find(types.begin(), types.end(), type) == types.end()) types.push_back(type);
  }
  for (const std::string& type : types) data.dtypes += (data.dtypes.empty() ? "" : ", ") + type;
  for (const Bucket& bucket : buckets_) {
    data.rebuilt_bucket_sizes.push_back(static_cast<std::int64_t>(bucket.buffer.nbytes()));
    data.rebuilt_per_bucket_param_indices.push_back(bucket.parameters);
  }
  data.has_rebuilt_buckets = !buckets_.empty();
  data.unused_parameter_size = unused_bytes_;
  data.backwards = stats_.backwards;
  data.skipped = stats_.skipped;
  data.has_error = !error_.empty();
  data.error = error_;
  return data;
}

// --- setters ---

void Reducer::Impl::pause(int change) {
  paused_ += change;
  for (const auto& follower : followers_) {
    if (const auto other = follower.lock()) other->pause(change);
  }
}

void Reducer::Impl::set_static_graph() {
  if (stats_.backwards > 0 || open_) {
    fail(ErrorKind::kInvalidArgument, "it is too late after ", stats_.backwards,
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
