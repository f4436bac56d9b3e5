// Reducer: sharded optimizers, and another group.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "ddp/agreement.h"
#include "ddp/reducer_impl.h"

namespace convoy {

void Reducer::Impl::check_port(const std::vector<bool>& takes) const {
  if (is_busy())
    fail(ErrorKind::kInvalidArgument, "it cannot be made inside of a backward; make it before");
  for (std::size_t i = 0; i < takes.size(); ++i) {
    if (!takes[i]) continue;
    if (parameters_[i].sparse) {
      fail(ErrorKind::kUnsupported, "gradients of ", parameters_[i].name,
           " are sparse; leave it to an optimizer of its own");
    }
    if (parameters_[i].taken) {
      fail(ErrorKind::kInvalidArgument, "gradients of ", parameters_[i].name,
           " are taken by another optimizer already");
    }
  }
}

void Reducer::Impl::attach(std::shared_ptr<ShardPort> port) {
  check_port(port->takes());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].taken |= port->takes()[i];
    parameters_[i].dropped |= port->takes()[i] && port->is_in_backward();
  }
  users_.ports.push_back(std::move(port));
  alone_ = false;
  share_buckets();
}

void Reducer::Impl::detach(const ShardPort& port) noexcept {
  const auto found = std::find_if(users_.ports.begin(), users_.ports.end(),
                                  [&](const auto& one) { return one.get() == &port; });
  if (found == users_.ports.end()) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (port.takes()[i]) parameters_[i].taken = parameters_[i].dropped = false;
  }
  users_.ports.erase(found);
  for (Bucket& bucket : layout_.buckets) {
    if (port_of(bucket) == nullptr) bucket.peers.reset();
  }
}

Reducer::Impl::BucketPlace Reducer::Impl::place_of(std::size_t index) const {
  const ParameterState& parameter = parameters_[index];
  if (parameter.bucket == ParameterPlace::kNone) return {};
  return {&layout_.buckets[parameter.bucket], parameter.slot};
}

// The one that takes all of it.
ShardPort* Reducer::Impl::port_of(const Bucket& bucket) const {
  for (const auto& port : users_.ports) {
    if (std::all_of(bucket.parameters.begin(), bucket.parameters.end(),
                    [&](std::size_t i) { return port->takes()[i]; })) {
      return port.get();
    }
  }
  return nullptr;
}

// Collective: which buckets there are is the same on all ranks.
void Reducer::Impl::share_buckets() {
  if (users_.ports.empty() || (size_ > 1 && !group_.can_round())) return;
  for (Bucket& bucket : layout_.buckets) {
    if (bucket.peers || bucket.private_memory || port_of(bucket) == nullptr) continue;
    const auto type = at::toRealValueType(bucket.buffer.scalar_type());
    const bool as_it_is = std::all_of(
        bucket.parameters.begin(), bucket.parameters.end(),
        [&](std::size_t i) { return parameters_[i].type == bucket.buffer.scalar_type(); });
    if (!as_it_is || (type != at::kFloat && type != at::kDouble)) continue;
    try {
      bucket.peers = std::make_shared<PeerMemory>(PeerMemory::share(group_, bucket.buffer));
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::kInvalidArgument) throw;
      log_warn(e.what(), ": this bucket is reduced for all ranks");
      bucket.private_memory = true;
    }
  }
}

bool Reducer::Impl::defers(const Bucket& bucket) const {
  return bucket.peers && !users_.hook && options_.reduce.kind() != GradReduce::Kind::kWeighted &&
         join_.scale(options_.reduce, size_) == 1 && port_of(bucket) != nullptr;
}

// --- another group ---

void Reducer::Impl::prepare_change() {
  const auto refuse = [](const char* what) {
    fail(ErrorKind::kInvalidArgument, "it cannot be called inside of ", what, "; end that first");
  };
  if (in_backward_) refuse("a backward");
  if (paused_ > 0) refuse("a no_sync()");
  if (join_.is_active()) refuse("a Join");
  if (round_.open) close(Ending::kFailed);
}

void Reducer::Impl::leave_group() {
  for (const auto& port : users_.ports) port->leave_group();
}

int Reducer::Impl::take_over(const Impl& old) {
  std::vector<std::string> lines = {concat("comm hooks: ", old.users_.hook ? 1 : 0),
                                    concat("consumers: ", old.users_.consumers.size()),
                                    concat("sharded optimizers: ", old.users_.ports.size())};
  for (const auto& port : old.users_.ports) {
    for (const std::string& line : port->description()) lines.push_back(line);
  }
  agree(group_, "what was registered with the reducer", lines);
  users_.hook = old.users_.hook;
  users_.consumers = old.users_.consumers;
  users_.begins = old.users_.begins;
  users_.ends = old.users_.ends;
  users_.replicas = old.users_.replicas;
  alone_ = size_ == 1 && !users_.hook && users_.consumers.empty();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    for (const GradConsumer& consumer : users_.consumers) {
      parameters_[i].taken |= consumer.takes[i];
      parameters_[i].dropped |= consumer.takes[i] && !consumer.keeps;
    }
    tensors_[i].mutable_grad().reset();
  }
  observer_.timeline().set_sample_rate(old.observer_.timeline().sample_rate());
  const at::Tensor mine =
      at::full({1}, static_cast<std::int64_t>(old.observer_.stats().backwards), at::kLong);
  const at::Tensor all = at::empty({size_}, at::kLong);
  group_.all_gather_single(all, mine);
  const auto* const counts = all.const_data_ptr<std::int64_t>();
  const auto root = static_cast<int>(std::max_element(counts, counts + size_) - counts);
  observer_.stats().backwards = static_cast<std::uint64_t>(counts[root]);
  observer_.stats().skipped = old.observer_.stats().skipped;
  if (size_ > 1) broadcast_coalesced(group_, tensors_, {.root = root});
  for (const auto& port : old.users_.ports) port->enter_group(shared_from_this(), root);
  return root;
}

}  // namespace convoy
