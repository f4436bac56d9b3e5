// Reducer: gradients of distributed backward passes.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <atomic>
#include <utility>

#include "base/error.h"
#include "ddp/agreement.h"
#include "ddp/gradient_home.h"
#include "ddp/reducer_impl.h"

namespace convoy {
namespace {

thread_local GradientHome* home_here = nullptr;
std::atomic<int> reducers_alive{0};

// The same gradient as another tensor.
void take_note(GradientHistory& history, const at::Tensor& was, const at::Tensor& is) {
  if (!history.is_seen(was)) return;
  const bool untouched = history.is_untouched(was);
  history.note(is);
  if (!untouched) history.seen_version = -1;
}

}  // namespace

const std::vector<at::Tensor>& parameters_of(const Reducer::Impl& reducer) {
  return reducer.tensors();
}
bool has_reducers() { return reducers_alive.load(std::memory_order_relaxed) != 0; }
Reducer::Impl::Loan::Loan() { ++reducers_alive; }
Reducer::Impl::Loan::~Loan() { --reducers_alive; }

GradientHome* GradientHome::current() {
  return home_here != nullptr && home_here->is_current() ? home_here : nullptr;
}
GradientHome::Scope::Scope(GradientHome& home) : before_(std::exchange(home_here, &home)) {}
GradientHome::Scope::~Scope() { home_here = before_; }

GradientLoan::GradientLoan(std::shared_ptr<Reducer::Impl> reducer, const ContextGradients& context)
    : reducer_(std::move(reducer)) {
  reducer_->lend(context);
}
GradientLoan::~GradientLoan() { reducer_->give_back(); }
ContextGradients GradientLoan::take() const { return reducer_->lent(); }

// What lies in a bucket would be overwritten by the next round.
at::Tensor Reducer::Impl::out_of_bucket(std::size_t index) const {
  const at::Tensor& gradient = tensors_[index].grad();
  const ParameterState& parameter = parameters_[index];
  if (!gradient.defined() || parameter.bucket == ParameterPlace::kNone ||
      gradient.layout() != c10::kStrided) {
    return gradient;
  }
  const at::Tensor& buffer = layout_.buckets[parameter.bucket].buffer;
  if (!gradient.storage().is_alias_of(buffer.storage())) return gradient;
  return gradient.detach().clone();
}

void Reducer::Impl::lend(const ContextGradients& context) {
  if (loan_.own || in_backward_) {
    fail(ErrorKind::kInvalidArgument, head_of(group_, "backward"),
         "another backward of the same model runs: they must come one after the other");
  }
  if (!users_.ports.empty()) {
    fail(
        ErrorKind::kUnsupported, head_of(group_, "backward"),
        "a ShardedOptimizer takes gradients from `.grad`, and a distributed backward pass has them "
        "in its context; use a DistributedOptimizer");
  }
  const at::NoGradGuard no_grad;
  ContextGradients own;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    GradientHistory& history = parameters_[i];
    own.gradients.push_back(out_of_bucket(i));
    own.histories.push_back(history);
    if (own.gradients[i].defined()) {
      take_note(own.histories[i], tensors_[i].grad(), own.gradients[i]);
    }
  }
  loan_.own = std::move(own);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    GradientHistory& history = parameters_[i];
    history = context.histories.empty() ? GradientHistory() : context.histories[i];
    at::Tensor& gradient = tensors_[i].mutable_grad();
    gradient.reset();
    if (!context.gradients[i].defined()) continue;
    gradient = context.gradients[i].clone();  // a pass that fails leaves the context's as it is
    take_note(history, context.gradients[i], gradient);
  }
}

ContextGradients Reducer::Impl::lent() const {
  const at::NoGradGuard no_grad;
  ContextGradients result;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    result.gradients.push_back(out_of_bucket(i));
    result.histories.push_back(parameters_[i]);
    if (result.gradients[i].defined()) {
      take_note(result.histories[i], tensors_[i].grad(), result.gradients[i]);
    }
  }
  return result;
}

void Reducer::Impl::give_back() noexcept {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].mutable_grad() = std::move(loan_.own->gradients[i]);
    static_cast<GradientHistory&>(parameters_[i]) = std::move(loan_.own->histories[i]);
  }
  loan_.own.reset();
}

}  // namespace convoy
