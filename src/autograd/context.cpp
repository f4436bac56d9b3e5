#include "autograd/context.h"

#include <ATen/Functions.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <cstring>

#include "autograd/nodes.h"
#include "autograd/registry.h"
#include "base/error.h"

namespace convoy::autograd::detail {

using torch::autograd::AccumulateGrad;

namespace {

// Behind the trailer of a message: this, the path of the handler (of a call), the lineage.
struct TailHead {
  std::uint8_t depth = 0;  // elements; kTooDeep
  std::uint8_t lineage = 0;
  std::uint8_t complete = 0;
  std::uint8_t zero = 0;
};
constexpr std::uint8_t kTooDeep = 255;
static_assert(sizeof(TailHead) + FramePlace::kMostDepth * sizeof(std::uint32_t) +
                  Lineage::kMost * sizeof(Upstream) <=
              rpc::detail::kMostTrailerTail);

// After so many lineages in a row that were given up, most are not tried.
constexpr int kMostHopeless = 4;
constexpr int kTriedAgain = 16;

void append(rpc::detail::TrailerTail& tail, const void* data, std::size_t bytes) {
  const auto* const first = static_cast<const std::byte*>(data);
  tail.append(first, first + bytes);
}

template <class T>
void take(std::span<const std::byte>& tail, T* to, std::size_t count) {
  if (tail.size() < count * sizeof(T)) {
    fail(ErrorKind::kInvalidArgument, "malformed value of a call: its lineage ends early");
  }
  if (count != 0) std::memcpy(to, tail.data(), count * sizeof(T));
  tail = tail.subspan(count * sizeof(T));
}

struct Tail {
  std::vector<std::uint32_t> path;
  bool too_deep = false;
  Lineage lineage;
};

Tail decode_tail(std::span<const std::byte> bytes) {
  TailHead head;
  take(bytes, &head, 1);
  Tail tail;
  tail.too_deep = head.depth == kTooDeep;
  if ((!tail.too_deep && head.depth > FramePlace::kMostDepth) || head.lineage > Lineage::kMost) {
    fail(ErrorKind::kInvalidArgument, "malformed value of a call: its lineage is too long");
  }
  if (!tail.too_deep) {
    tail.path.resize(head.depth);
    take(bytes, tail.path.data(), head.depth);
  }
  tail.lineage.complete = head.complete != 0;
  tail.lineage.all.resize(head.lineage);
  take(bytes, tail.lineage.all.data(), head.lineage);
  if (!bytes.empty()) {
    fail(ErrorKind::kInvalidArgument, "malformed value of a call: there is more behind it");
  }
  return tail;
}

// Two leaves that got views of one buffer must not share it.
at::Tensor without_sharing(at::Tensor gradient, const at::Tensor& leaf) {
  const auto is_shared = [](const at::Tensor& t) { return t.storage().use_count() > 1; };
  if (gradient.layout() == c10::kStrided) {
    return is_shared(gradient) ? torch::autograd::utils::clone_obey_contract(gradient, leaf)
                               : gradient;
  }
  if (!gradient.is_sparse()) return gradient;
  // Its own tensors: _values() makes another one.
  const auto& parts = static_cast<const at::SparseTensorImpl&>(*gradient.unsafeGetTensorImpl());
  const at::Tensor indices = parts.indices();  // mostly shared with those of a lookup
  const at::Tensor values = parts.values();
  if (!is_shared(indices) && !is_shared(values)) return gradient;
  return at::_sparse_coo_tensor_unsafe(
      is_shared(indices) ? indices.clone() : indices, is_shared(values) ? values.clone() : values,
      gradient.sizes(), gradient.options(), gradient.is_coalesced());
}

// Behind all that the context's creator does, for threads of others.
std::vector<std::uint32_t> path_of_threads(WorkerId self, WorkerId creator) {
  if (self == creator) return {};
  return {FramePlace::kReply - 1, self};
}

}  // namespace

ContextState::ContextState(std::shared_ptr<Registry> registry, ContextId id)
    : registry_(std::move(registry)),
      id_(id),
      place_(std::make_shared<FramePlace>(path_of_threads(registry_->self(), creator()))) {}

ContextState::~ContextState() = default;

Origin ContextState::origin() const { return {registry_->serial(), id_}; }

const void* FrameRecorder::session() const noexcept {
  return context_->registry().session_address();
}

bool ContextState::sends(const std::shared_ptr<FramePlace>& place, WorkerId worker,
                         const std::vector<at::Tensor>& tensors, std::string_view function,
                         bool reply, rpc::detail::RecordTrailer& trailer,
                         rpc::detail::TrailerTail& tail) {
  if (released()) return false;
  trailer.context = id_;
  trailer.tensors = static_cast<std::uint32_t>(tensors.size());
  TailHead head;
  std::uint32_t element = FramePlace::kReply;
  if (!reply) {
    element = 2 * (place->calls.fetch_add(1, std::memory_order_relaxed) + 1);
    const bool too_deep = place->too_deep || place->path.size() >= FramePlace::kMostDepth;
    head.depth = too_deep ? kTooDeep : static_cast<std::uint8_t>(place->path.size() + 1);
  }
  std::shared_ptr<SentMessage> sent;
  Lineage lineage;
  if (!tensors.empty()) {
    RECORD_FUNCTION("convoy::autograd::send", {});
    sent = std::make_shared<SentMessage>();
    sent->message = trailer.message = registry_->next_message();
    sent->to = worker;
    sent->function = function;
    sent->reply = reply;
    sent->place = place;
    sent->element = element;
    sent->edges.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) {
      sent->edges.push_back(torch::autograd::impl::gradient_edge(tensor));
    }
    lineage = find_lineage(sent->edges);
  }
  head.lineage = static_cast<std::uint8_t>(lineage.all.size());
  head.complete = lineage.complete ? 1 : 0;
  append(tail, &head, sizeof head);
  if (head.depth != 0 && head.depth != kTooDeep) {
    append(tail, place->path.data(), place->path.size() * sizeof(std::uint32_t));
    append(tail, &element, sizeof element);
  }
  append(tail, lineage.all.data(), lineage.all.size() * sizeof(Upstream));
  const std::scoped_lock lock(mutex_);
  if (released()) return false;
  known_.insert(worker);
  if (!reply) order_.add(mark_here(place, element + 1));
  if (sent) sent_.emplace(sent->message, std::move(sent));
  return true;
}

// Graphs with long histories have none: looking for it every time would cost the forward pass.
Lineage ContextState::find_lineage(const std::vector<torch::autograd::Edge>& edges) {
  const int hopeless = hopeless_.load(std::memory_order_relaxed);
  Lineage lineage;
  if ((hopeless >= kMostHopeless && hopeless % kTriedAgain != 0) || most_upstream() == 0) {
    lineage.complete = std::all_of(edges.begin(), edges.end(), [](const auto& edge) {
      return !edge.is_valid() || edge.function->next_edges().empty();
    });
  } else {
    lineage = lineage_of(edges, registry_->self(), origin());
  }
  hopeless_.store(lineage.complete && !lineage.all.empty() ? 0
                  : lineage.complete                       ? hopeless
                                                           : hopeless + 1,
                  std::memory_order_relaxed);
  return lineage;
}

void ContextState::resumes(const std::shared_ptr<FramePlace>& place) noexcept {
  const std::uint32_t element = 2 * (place->calls.fetch_add(1, std::memory_order_relaxed) + 1) + 1;
  const std::scoped_lock lock(mutex_);
  if (!released()) order_.add(mark_here(place, element));
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

std::shared_ptr<FramePlace> ContextState::came(WorkerId from, std::uint64_t message,
                                               std::span<const std::byte> bytes,
                                               const std::vector<at::Tensor>& tensors,
                                               std::string_view function, bool reply) {
  Tail tail = decode_tail(bytes);
  if (!tensors.empty()) {
    RECORD_FUNCTION("convoy::autograd::recv", {});
    const auto node =
        c10::make_intrusive<RecvNode>(Received{message, from, std::move(tail.lineage), origin()});
    for (const at::Tensor& tensor : tensors) {
      tensor.set_requires_grad(false);
      at::Tensor variable = tensor;
      torch::autograd::create_gradient_edge(variable, node);
    }
  }
  std::shared_ptr<FramePlace> place;
  if (!reply) {
    place = std::make_shared<FramePlace>(std::move(tail.path));
    place->too_deep = tail.too_deep;
  }
  const std::scoped_lock lock(mutex_);
  if (!reply) {
    introduced_by_.insert(from);
    order_.add(mark_here(place, FramePlace::kFirst));
  }
  if (tensors.empty()) return place;
  came_.push_back({message, from, function, reply, static_cast<std::uint32_t>(tensors.size())});
  return place;
}

ContextState::Ordered::Ordered(std::shared_ptr<ContextState> context)
    : context_(std::move(context)) {
  const std::scoped_lock lock(context_->mutex_);
  ++context_->ordered_;
}

ContextState::Ordered::~Ordered() {
  const std::scoped_lock lock(context_->mutex_);
  --context_->ordered_;
}

std::map<std::uint64_t, std::uint64_t> ContextState::Ordered::put_in_order(const Walk& walk) {
  std::map<std::uint64_t, std::uint64_t> numbers;
  const std::scoped_lock lock(context_->mutex_);
  FrameOrder& order = context_->order_;
  order.number(walk, context_->ordered_ > 1 ? FrameOrder::Others::kRun : FrameOrder::Others::kNone);
  for (const auto& [message, send] : walk.sends()) {
    numbers.emplace(message, order.number_of(*send.sent));
  }
  return numbers;
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

// A leaf may have got other data (set_data) since an earlier pass.
void ContextState::require_fitting(
    const std::vector<std::pair<at::Tensor, at::Tensor>>& gradients) const {
  const std::scoped_lock lock(mutex_);
  for (const auto& [leaf, gradient] : gradients) {
    const auto found = gradients_.find(leaf.unsafeGetTensorImpl());
    if (found == gradients_.end() || !found->second.value.defined()) continue;
    const at::Tensor& sum = found->second.value;
    if (sum.sizes().equals(gradient.sizes()) && sum.scalar_type() == gradient.scalar_type()) {
      continue;
    }
    fail(ErrorKind::kInvalidArgument, "autograd: a gradient is ", gradient.scalar_type(),
         " of sizes ", gradient.sizes(), ", but context ", id_,
         " has one of the same tensor that is ", sum.scalar_type(), " of sizes ", sum.sizes());
  }
}

// As AccumulateGrad does it: the first gradient becomes the context's own if nobody else has it.
void ContextState::add(std::vector<std::pair<at::Tensor, at::Tensor>>&& gradients) {
  const at::NoGradGuard no_gradients;
  const std::scoped_lock lock(mutex_);
  if (released()) return;
  for (auto& [leaf, gradient] : gradients) {
    Gradient& sum = gradients_[leaf.unsafeGetTensorImpl()];
    sum.leaf = leaf;
    if (!sum.value.defined()) gradient = without_sharing(std::move(gradient), leaf);
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

std::vector<Gradients::Item> ContextState::gradients_with(
    const std::vector<std::pair<at::Tensor, at::Tensor>>& added) const {
  const at::NoGradGuard no_gradients;
  std::vector<Gradients::Item> items;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> more;
  for (const auto& [leaf, gradient] : added) more.emplace(leaf.unsafeGetTensorImpl(), gradient);
  const std::scoped_lock lock(mutex_);
  for (const auto& [leaf, gradient] : gradients_) {
    const auto found = more.find(leaf);
    if (found == more.end()) {
      items.emplace_back(gradient.leaf, gradient.value);
      continue;
    }
    // libtorch adds sparse ones to dense ones only.
    const bool turned = gradient.value.is_sparse() && !found->second.is_sparse();
    items.emplace_back(gradient.leaf,
                       turned ? found->second + gradient.value : gradient.value + found->second);
    more.erase(found);
  }
  for (const auto& [leaf, gradient] : added) {
    if (more.contains(leaf.unsafeGetTensorImpl())) items.emplace_back(leaf, gradient);
  }
  return items;
}

ContextGradients ContextState::of_reducer(const std::shared_ptr<Reducer::Impl>& reducer) const {
  ContextGradients result;
  const std::scoped_lock lock(mutex_);
  for (const at::Tensor& parameter : parameters_of(*reducer)) {
    const auto found = gradients_.find(parameter.unsafeGetTensorImpl());
    result.gradients.push_back(found == gradients_.end() ? at::Tensor() : found->second.value);
  }
  const auto known = reducers_.find(reducer);
  if (known != reducers_.end()) result.histories = known->second;
  return result;
}

void ContextState::replace(const std::shared_ptr<Reducer::Impl>& reducer, ContextGradients&& now) {
  const std::scoped_lock lock(mutex_);
  if (released()) return;
  const auto& parameters = parameters_of(*reducer);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (now.gradients[i].defined()) {
      gradients_[parameters[i].unsafeGetTensorImpl()] = {parameters[i],
                                                         std::move(now.gradients[i])};
    } else {
      gradients_.erase(parameters[i].unsafeGetTensorImpl());
    }
  }
  reducers_[reducer] = std::move(now.histories);
}

std::vector<WorkerId> ContextState::release() {
  // What it held goes without the lock.
  std::unordered_map<std::uint64_t, std::shared_ptr<const SentMessage>> sent;
  std::unordered_map<const c10::TensorImpl*, Gradient> gradients;
  const std::scoped_lock lock(mutex_);
  released_.store(true);
  sent.swap(sent_);
  gradients.swap(gradients_);
  reducers_.clear();
  came_.clear();
  order_.clear();
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
