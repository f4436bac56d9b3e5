// The engine's run of a worker's part, and what comes behind it.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <exception>
#include <string_view>

#include "autograd/nodes.h"
#include "autograd/pass.h"
#include "autograd/registry.h"
#include "autograd/step_hook.h"
#include "base/error.h"
#include "base/log.h"

namespace convoy::autograd::detail {
namespace {

namespace ag = torch::autograd;

// What a worker has for the root goes with its end, if that is near: it is small, few nodes are
// left, and all before took little time. Otherwise at once.
constexpr std::size_t kMostHeldBack = 16384;  // bytes
constexpr std::size_t kMostNodesLeft = 5;     // with the one that sends
constexpr std::chrono::microseconds kMostHeldTime(50);

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

// "Function X returned an invalid gradient", "... returned nan": what the engine itself says of the
// gradients that a node has computed.
bool is_of_gradients(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& thrown) {
    return std::string_view(thrown.what_without_backtrace()).starts_with("Function ");
  } catch (...) {
    return false;
  }
}

// Within a catch. `node` runs, or ran last. Empty: in a node of ours, which runs nobody's code.
std::string where_it_failed(const std::string& node, bool in_node) {
  const bool is_ours = node.empty() || node.starts_with("convoy::");
  if (in_node || is_of_gradients(std::current_exception())) {
    return is_ours ? "" : concat("in ", node);
  }
  return is_ours ? "in a hook" : concat("in a hook after ", node);
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
  if (discovering_) {
    early_.emplace_back(received, std::move(gradients));
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
  if (to != id_.root || bytes_of(gradients) > kMostHeldBack) {
    return send(to, received.message, gradients);
  }
  for_root_.push_back({received.message, std::move(gradients)});
  if (nodes_left_ > kMostNodesLeft || std::chrono::steady_clock::now() - began_ > kMostHeldTime) {
    flush(false);
  }
}

void Pass::before_node(const char* name) {
  node_ = name;
  in_node_ = true;
}

bool Pass::after_node() {
  // Of one that throws it is called, too.
  in_node_ = std::uncaught_exceptions() != 0;
  if (nodes_left_ != 0) --nodes_left_;
  if (!for_root_.empty() && std::chrono::steady_clock::now() - began_ > kMostHeldTime) {
    flush(false);
  }
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
    for (const auto& [reducer, loan] : loans_) reduced_.emplace_back(reducer, loan->take());
  }
  loans_.clear();
}

void Pass::arrived_at(ag::AccumulateGrad& leaf, const at::Tensor& gradient) {
  if (!leaf.variable.requires_grad()) return;  // any more, as AccumulateGrad has it
  gradients_.emplace_back(leaf.variable, with_memory(gradient));
}

bool Pass::prepare_early() {
  const auto all = context_->all_sent();
  const std::scoped_lock lock(mutex_);
  // A reducer waits for all of its gradients in one run.
  if (!walk_.is_apart_from(all) || has_sinks(walk_)) return false;
  if (deterministic_) static_cast<void>(ordered_.emplace(context_).put_in_order(walk_));
  // Now: the walk grows when others are asked.
  early_engine_.emplace(*this, walk_);
  first_leaf_ = walk_.leaves().size();
  discovering_ = true;
  return true;
}

void Pass::run_early(const std::vector<ag::Edge>& roots, std::vector<at::Tensor>&& gradients) {
  run_engine(*early_engine_, roots, std::move(gradients));
  early_engine_.reset();
}

void Pass::discovery_ended() {
  {
    const std::scoped_lock lock(mutex_);
    state_ = State::kRunning;
  }
  discovering_ = false;
  for (auto& [received, gradients] : std::exchange(early_, {})) {
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
    const bool by_entry = roots.empty() && !deterministic_ && !walk_.sends().empty();
    nodes_left_ = 1 + walk_.nodes().size() - walk_.leaves().size() + walk_.reached().size() +
                  walk_.sends().size() - (by_entry ? 1 : 0);
    engine.emplace(*this, walk_, first_leaf_);
    if (deterministic_) {
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
  context_->require_fitting(gradients_);
  const std::scoped_lock lock(mutex_);
  if (aborted()) fail(ErrorKind::kCancelled, "autograd: the backward pass was aborted: ", why_);
  state_ = State::kDone;
}

void Pass::run_engine(GatedRun& engine, const std::vector<ag::Edge>& roots,
                      std::vector<at::Tensor>&& gradients) {
  RECORD_FUNCTION("convoy::autograd::backward", {});
  const rpc::detail::RecorderScope recorded(FrameRecorder::of(context_));
  began_ = std::chrono::steady_clock::now();
  record_.runs();
  const GradientHome::Scope home(*this);
  engine_ = &engine;
  try {
    engine.run(roots, std::move(gradients), retain_);
  } catch (const GateError& error) {
    engine_ = nullptr;
    loans_.clear();
    throw Error(error.kind(), error.what());
  } catch (...) {
    engine_ = nullptr;
    loans_.clear();
    failed_in_ = where_it_failed(node_, in_node_);
    throw;
  }
  engine_ = nullptr;
  end_loans();
}

// The answer of this worker comes with the end of its part; but nobody waits for gradients
// meanwhile, if the step takes its time.
void Pass::step() {
  if (optimizers_.empty()) return;
  std::vector<Gradients::Item> items;
  {
    std::size_t bytes = 0;
    for (const auto& [leaf, gradient] : gradients_) bytes += bytes_of(gradient);
    if (bytes > kMostSteppedFirst && !for_root_.empty()) flush(false);
    items = context_->gradients_with(gradients_);
  }
  for (const auto& [reducer, now] : reduced_) {
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
    step_hook()(*registry_.session(), optimizers_, Gradients(std::move(items)), begun);
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
