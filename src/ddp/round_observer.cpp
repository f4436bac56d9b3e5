#include "ddp/round_observer.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace convoy {

void RoundObserver::close(const Closed& closed, const std::vector<ParameterState>& parameters,
                          const std::vector<at::Tensor>& tensors,
                          const std::vector<Bucket>& buckets) {
  skipped_ = false;
  if (closed.good) error_.clear();
  if (closed.good && !closed.shadowed) {
    std::vector<bool> used;
    for (const ParameterState& parameter : parameters) used.push_back(parameter.used);
    can_be_static_ &= last_used_.empty() || used == last_used_;
    last_used_ = std::move(used);
  }
  const bool sampled = timeline_.is_sampled(number());
  if (sampled) {
    std::vector<std::pair<std::size_t, std::size_t>> arrivals;
    unused_bytes_ = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const ParameterState& parameter = parameters[i];
      if (parameter.round.arrival != 0) arrivals.emplace_back(parameter.round.arrival, i);
      if (parameter.active && parameter.round.arrival == 0 && !parameter.used) {
        unused_bytes_ += static_cast<std::int64_t>(tensors[i].nbytes());
      }
    }
    std::sort(arrivals.begin(), arrivals.end());
    std::vector<std::size_t> order;
    for (const auto& [arrival, index] : arrivals) order.push_back(index);
    timeline_.set_order(std::move(order));
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      timeline_.set_bytes(b, static_cast<std::uint64_t>(buckets[b].buffer.nbytes()));
    }
  }
  timeline_.close(number(), closed.last_gradient, closed.now, closed.stamps, closed.rank);
  if (sampled && debug_ != DebugLevel::kOff) log_info(timeline_.last().report());
  ++stats_.backwards;
  stats_.backward_time = closed.now - closed.entered;
  stats_.exposed_time = closed.now - closed.last_gradient;
}

void RoundObserver::fill(DdpStats& data) const {
  static_cast<DdpSample&>(data) = timeline_.sampled();
  data.can_set_static_graph = can_be_static_;
  data.unused_parameter_size = unused_bytes_;
  data.backwards = stats_.backwards;
  data.skipped = stats_.skipped;
  data.has_error = !error_.empty();
  data.error = error_;
}

}  // namespace convoy
