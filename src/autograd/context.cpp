#include "autograd/context.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>

#include "autograd/nodes.h"
#include "autograd/registry.h"
#include "base/error.h"

namespace convoy::autograd::detail {

using torch::autograd::AccumulateGrad;

ContextState::ContextState(std::shared_ptr<Registry> registry, ContextId id)
    : registry_(std::move(registry)), id_(id) {}

ContextState::~ContextState() = default;

const void* ContextState::session() const noexcept { return registry_->session_address(); }

bool ContextState::sends(std::uint32_t worker, const std::vector<at::Tensor>& tensors,
                         std::string_view function, bool reply,
                         rpc::detail::RecordTrailer& trailer) {
  if (released()) return false;
  trailer.context = id_;
  trailer.tensors = static_cast<std::uint32_t>(tensors.size());
  if (tensors.empty()) return know(worker);
  RECORD_FUNCTION("convoy::autograd::send", {});
  auto sent = std::make_shared<SentMessage>();
  sent->message = trailer.message = registry_->next_message();
  sent->to = worker;
  sent->function = function;
  sent->reply = reply;
  sent->edges.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    sent->edges.push_back(torch::autograd::impl::gradient_edge(tensor));
  }
  const std::scoped_lock lock(mutex_);
  if (released()) return false;
  known_.insert(worker);
  sent_.emplace(sent->message, std::move(sent));
  return true;
}

void ContextState::forget(const rpc::detail::RecordTrailer& trailer) noexcept {
  if (trailer.message == 0) return;
  std::shared_ptr<const SentMessage> gone;  // what it held goes without the lock
  const std::scoped_lock lock(mutex_);
  const auto found = sent_.find(trailer.message);
  if (found == sent_.end()) return;
  gone = std::move(found->second);
  sent_.erase(found);
}

void ContextState::came(WorkerId from, std::uint64_t message,
                        const std::vector<at::Tensor>& tensors, std::string_view function,
                        bool reply) {
  if (!tensors.empty()) {
    RECORD_FUNCTION("convoy::autograd::recv", {});
    const auto node = c10::make_intrusive<RecvNode>(from, message);
    for (const at::Tensor& tensor : tensors) {
      tensor.set_requires_grad(false);
      at::Tensor variable = tensor;
      torch::autograd::create_gradient_edge(variable, node);
    }
  }
  const std::scoped_lock lock(mutex_);
  if (!reply) introduced_by_.insert(from);
  if (tensors.empty()) return;
  came_.push_back({message, from, function, reply, static_cast<std::uint32_t>(tensors.size())});
}

std::shared_ptr<const SentMessage> ContextState::sent(std::uint64_t message) const {
  const std::scoped_lock lock(mutex_);
  const auto found = sent_.find(message);
  return found == sent_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<const SentMessage>> ContextState::all_sent() const {
  std::vector<std::shared_ptr<const SentMessage>> all;
  {
    const std::scoped_lock lock(mutex_);
    all.reserve(sent_.size());
    for (const auto& [message, sent] : sent_) all.push_back(sent);
  }
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return a->message < b->message; });
  return all;
}

bool ContextState::know(WorkerId worker) {
  const std::scoped_lock lock(mutex_);
  if (released()) return false;
  known_.insert(worker);
  return true;
}

bool ContextState::was_introduced_by(WorkerId worker) const {
  const std::scoped_lock lock(mutex_);
  return introduced_by_.contains(worker);
}

// As AccumulateGrad does it: the first gradient becomes the context's own if nobody else has it.
void ContextState::add(std::vector<std::pair<at::Tensor, at::Tensor>>&& gradients) {
  const at::NoGradGuard no_gradients;
  const std::scoped_lock lock(mutex_);
  if (released()) return;
  for (auto& [leaf, gradient] : gradients) {
    Gradient& sum = gradients_[leaf.unsafeGetTensorImpl()];
    sum.leaf = leaf;
    // Two leaves that got views of one buffer must not share it.
    if (!sum.value.defined() && gradient.layout() == c10::kStrided &&
        gradient.storage().use_count() > 1) {
      gradient = torch::autograd::utils::clone_obey_contract(gradient, leaf);
    }
    AccumulateGrad::accumulateGrad(leaf, sum.value, gradient, /*num_expected_refs=*/1,
                                   [&sum](at::Tensor&& value) { sum.value = std::move(value); });
    gradient.reset();
  }
}

std::vector<Gradients::Item> ContextState::gradients() const {
  std::vector<Gradients::Item> items;
  const std::scoped_lock lock(mutex_);
  items.reserve(gradients_.size());
  for (const auto& [leaf, gradient] : gradients_) items.emplace_back(gradient.leaf, gradient.value);
  return items;
}

std::vector<WorkerId> ContextState::release() {
  // What it held goes without the lock.
  std::unordered_map<std::uint64_t, std::shared_ptr<const SentMessage>> sent;
  std::unordered_map<const c10::TensorImpl*, Gradient> gradients;
  const std::scoped_lock lock(mutex_);
  released_.store(true);
  sent.swap(sent_);
  gradients.swap(gradients_);
  came_.clear();
  return {known_.begin(), known_.end()};
}

ContextReport ContextState::report() const {
  ContextReport report;
  report.there = true;
  for (const auto& sent : all_sent()) {
    MessageReport each{sent->message,
                       sent->to,
                       sent->function,
                       sent->reply,
                       static_cast<std::uint32_t>(sent->edges.size()),
                       {}};
    for (const auto& edge : sent->edges) each.nodes.push_back(edge.function->name());
    report.sends.push_back(std::move(each));
  }
  const std::scoped_lock lock(mutex_);
  for (const Came& came : came_) {
    report.recvs.push_back(
        {came.message, came.from, std::string(came.function), came.reply, came.tensors, {}});
  }
  report.known.assign(known_.begin(), known_.end());
  report.gradients = gradients_.size();
  return report;
}

}  // namespace convoy::autograd::detail
