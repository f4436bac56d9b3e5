// The engine's run of a worker's part, and what comes behind it.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

#include "autograd/nodes.h"
#include "autograd/pass.h"
#include "autograd/registry.h"
#include "autograd/step_hook.h"
#include "base/error.h"
#include "base/log.h"

namespace convoy::autograd::detail {
namespace {

namespace ag = torch::autograd;

// Parameters of more than this are stepped after the gradients have gone.
constexpr std::size_t kMostSteppedFirst = std::size_t{1} << 18;  // bytes

// How long the end of a step is waited for that is under way when its pass is aborted.
constexpr std::chrono::seconds kMostStepTime(2);

// Why a gate ends a run: no fault of a node.
class GateError final : public Error {
 public:
  using Error::Error;
};

template <class... Parts>
[[noreturn]] void end_gate(ErrorKind kind, const Parts&... parts) {
  throw GateError(kind, concat(parts...));
}

// at::_efficientzerotensor has none.
at::Tensor with_memory(at::Tensor gradient) {
  const bool has_none = gradient.defined() && gradient._is_zerotensor();
  return has_none ? at::zeros(gradient.sizes(), gradient.options()) : std::move(gradient);
}

// Of models whose gradients are reduced.
bool has_sinks(const Walk& walk) {
  return has_reducers() &&
         std::any_of(walk.nodes().begin(), walk.nodes().end(), [](const ag::Node* node) {
           return dynamic_cast<const Sink*>(node) != nullptr;
         });
}

}  // namespace

Pass::Arrived Pass::next_gradient(std::uint64_t message) {
  const auto session = registry_.session();
  const auto find = [&] {
    return message == 0 ? arrived_.begin()
                        : std::find_if(arrived_.begin(), arrived_.end(), [&](const Gradient& each) {
                            return each.message == message;
                          });
  };
  const auto ready = [&] {
    const std::scoped_lock lock(mutex_);
    return find() != arrived_.end() || aborted() || session->agent().is_shut_down();
  };
  bool in_time = ready();
  if (!in_time) {
    send_plans(true);
    if (!for_root_.empty()) flush(false);
    answer_most();
    record_.waits();
    const at::AutoGradMode enabled(true);  // of others' continuations, which may run meanwhile
    in_time = session->agent().wait(deadline_, ready);
    record_.runs();
  }
  const std::scoped_lock lock(mutex_);
  if (aborted()) {
    end_gate(ErrorKind::kCancelled, "autograd: the backward pass was aborted: ", why_);
  }
  if (session->agent().is_shut_down()) {
    end_gate(ErrorKind::kCancelled, "autograd: the session was shut down");
  }
  if (!in_time) {
    end_gate(ErrorKind::kTimeout, "the backward pass has not ended by its deadline: ",
             registry_.name_of(registry_.self()), " waits for ", waits_for_locked());
  }
  const auto found = find();
  Gradient gradient = std::move(*found);
  arrived_.erase(found);
  return {&walk_.sends().at(gradient.message), std::move(gradient.tensors)};
}

void Pass::send_back(const Received& received, std::vector<at::Tensor>&& gradients) {
  if (early_.discovering) {
    early_.unsent.emplace_back(received, std::move(gradients));
    return;
  }
  for (at::Tensor& gradient : gradients) gradient = with_memory(std::move(gradient));
  const WorkerId to = received.sender;
  if (to == registry_.self()) return deliver(received.message, gradients);
  {
    const std::scoped_lock lock(mutex_);
    // Whoever aborts it has been told whom to tell.
    if (aborted()) return;
    engaged_.insert(to);
  }
  if (to != told_.pass.root || bytes_of(gradients) > HeldGradients::kMostBytes) {
    return send(to, received.message, gradients);
  }
  for_root_.hold(received.message, std::move(gradients));
  if (for_root_.must_go()) flush(false);
}

void Pass::before_node(const char* name) { place_.enters(name); }

bool Pass::after_node() {
  place_.leaves();
  for_root_.node_ended();
  if (!for_root_.empty() && for_root_.is_late()) flush(false);
  return !aborted();
}

// A reducer's hook wants the gradient in `.grad`.
bool Pass::engine_accumulates(ag::AccumulateGrad& leaf) {
  bool accumulates = false;
  for (const auto& hook : leaf.post_hooks()) {
    const auto* const of_reducer = dynamic_cast<const ReducerHook*>(hook.get());
    if (const auto reducer = of_reducer ? of_reducer->reducer() : nullptr) {
      lend(reducer);
      accumulates = true;
    }
  }
  return accumulates;
}

void Pass::lend(const std::shared_ptr<Reducer::Impl>& reducer) {
  if (loans_.contains(reducer)) return;
  loans_.emplace(reducer, std::make_unique<GradientLoan>(reducer, context_->of_reducer(reducer)));
}

std::string Pass::given_up() const {
  if (!aborted()) return "";
  const std::scoped_lock lock(mutex_);
  return concat("its distributed backward pass was given up: ", why_);
}

void Pass::end_loans() {
  if (!aborted()) {
    for (const auto& [reducer, loan] : loans_)
      computed_.reduced.emplace_back(reducer, loan->take());
  }
  loans_.clear();
}

void Pass::arrived_at(ag::AccumulateGrad& leaf, const at::Tensor& gradient) {
  if (!leaf.variable.requires_grad()) return;  // any more, as AccumulateGrad has it
  computed_.by_leaf.emplace_back(leaf.variable, with_memory(gradient));
}

bool Pass::prepare_early() {
  const auto all = context_->all_sent();
  const std::scoped_lock lock(mutex_);
  // A reducer waits for all of its gradients in one run.
  if (!walk_.is_apart_from(all) || has_sinks(walk_)) return false;
  if (told_.deterministic) static_cast<void>(ordered_.emplace(context_).put_in_order(walk_));
  // Now: the walk grows when others are asked.
  early_.engine.emplace(*this, walk_);
  early_.leaves = walk_.leaves().size();
  early_.discovering = true;
  return true;
}

void Pass::run_early(const std::vector<ag::Edge>& roots, std::vector<at::Tensor>&& gradients) {
  run_engine(*early_.engine, roots, std::move(gradients));
  early_.engine.reset();
}

void Pass::discovery_ended() {
  {
    const std::scoped_lock lock(mutex_);
    state_ = State::kRunning;
  }
  early_.discovering = false;
  for (auto& [received, gradients] : std::exchange(early_.unsent, {})) {
    send_back(received, std::move(gradients));
  }
}

void Pass::run(const std::vector<ag::Edge>& roots, std::vector<at::Tensor>&& gradients) {
  send_plans(false);
  std::optional<GatedRun> engine;
  bool needed = !roots.empty();
  {
    const std::scoped_lock lock(mutex_);
    state_ = State::kRunning;
    needed = needed || !walk_.sends().empty();
    // The first gradients come in by the entry, where nothing else does.
    const bool by_entry = roots.empty() && !told_.deterministic && !walk_.sends().empty();
    for_root_.expect(1 + walk_.nodes().size() - walk_.leaves().size() + walk_.reached().size() +
                     walk_.sends().size() - (by_entry ? 1 : 0));
    engine.emplace(*this, walk_, early_.leaves);
    if (told_.deterministic) {
      if (!ordered_) ordered_.emplace(context_);
      const auto numbers = ordered_->put_in_order(walk_);
      engine->add_gates(walk_, [&](const SentMessage& sent) { return numbers.at(sent.message); });
    } else {
      engine->add_gates(walk_);
    }
  }
  if (needed) run_engine(*engine, roots, std::move(gradients));
  ordered_.reset();
  send_plans(true);
  context_->require_fitting(computed_.by_leaf);
  const std::scoped_lock lock(mutex_);
  if (aborted()) fail(ErrorKind::kCancelled, "autograd: the backward pass was aborted: ", why_);
  state_ = State::kDone;
}

void Pass::run_engine(GatedRun& engine, const std::vector<ag::Edge>& roots,
                      std::vector<at::Tensor>&& gradients) {
  RECORD_FUNCTION("convoy::autograd::backward", {});
  const rpc::detail::RecorderScope recorded(FrameRecorder::of(context_));
  for_root_.starts();
  record_.runs();
  const GradientHome::Scope home(*this);
  engine_ = &engine;
  try {
    engine.run(roots, std::move(gradients), told_.retain);
  } catch (const GateError& error) {
    engine_ = nullptr;
    loans_.clear();
    throw Error(error.kind(), error.what());
  } catch (...) {
    engine_ = nullptr;
    loans_.clear();
    failed_in_ = place_.where_it_failed();
    throw;
  }
  engine_ = nullptr;
  end_loans();
}

// The answer of this worker comes with the end of its part; but nobody waits for gradients
// meanwhile, if the step takes its time.
void Pass::step() {
  if (told_.optimizers.empty()) return;
  std::vector<Gradients::Item> items;
  {
    std::size_t bytes = 0;
    for (const auto& [leaf, gradient] : computed_.by_leaf) bytes += bytes_of(gradient);
    if (bytes > kMostSteppedFirst && !for_root_.empty()) flush(false);
    items = context_->gradients_with(computed_.by_leaf);
  }
  for (const auto& [reducer, now] : computed_.reduced) {
    const auto& parameters = parameters_of(*reducer);
    std::erase_if(items, [&](const Gradients::Item& item) {
      return std::any_of(parameters.begin(), parameters.end(),
                         [&](const at::Tensor& each) { return each.is_same(item.first); });
    });
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (now.gradients[i].defined()) items.emplace_back(parameters[i], now.gradients[i]);
    }
  }
  {
    // Once it is aborted nothing is stepped any more.
    const std::scoped_lock lock(mutex_);
    if (aborted()) fail(ErrorKind::kCancelled, "autograd: the backward pass was aborted: ", why_);
    stepped_ = Stepped::kIsBeing;
  }
  std::size_t begun = 0;
  const auto ended = [&] {
    {
      const std::scoped_lock lock(mutex_);
      stepped_ = begun == 0 ? Stepped::kNothing : Stepped::kStepped;
    }
    registry_.wake();
  };
  try {
    const rpc::detail::RecorderScope not_recorded(nullptr);
    step_hook()(*registry_.session(), told_.optimizers, Gradients(std::move(items)), begun);
  } catch (...) {
    ended();
    failed_in_ = "in the step of an optimizer";
    throw;
  }
  ended();
}

Stepped Pass::stepped() const {
  const auto session = registry_.session();
  Stepped now = Stepped::kNothing;
  session->agent().wait(Deadline::after(kMostStepTime, session->agent().now()), [&] {
    const std::scoped_lock lock(mutex_);
    now = stepped_;
    return now != Stepped::kIsBeing;
  });
  return now;
}

// Of a worker that is not the root.
void Pass::run_for_root() noexcept {
  try {
    const auto began = std::chrono::steady_clock::now();
    try {
      run({}, {});
      step();
      record_.ends(PassRecord::End::kWell);
      flush(true);
    } catch (...) {
      record_.ends(PassRecord::End::kFailed);
      if (!aborted()) {
        tell_root(describe(std::current_exception(), failed_in_));
      }
    }
    answer_all();
    registry_.ran(std::chrono::steady_clock::now() - began);
  } catch (const std::exception& error) {
    log_warn("autograd: a backward pass ended, and its root cannot be told: ", error.what());
  }
}

}  // namespace convoy::autograd::detail
