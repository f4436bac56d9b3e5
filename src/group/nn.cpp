#include "convoy/nn.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/custom_class.h>

#include <torch/csrc/autograd/custom_function.h>
#include <numeric>

#include "base/error.h"

namespace convoy::nn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// What backward needs besides tensors.
template <class Options>
struct Held final : torch::CustomClassHolder {
  Held(ProcessGroup g, Options o) : group(std::move(g)), options(std::move(o)) {}
  const ProcessGroup group;
  const Options options;
};

template <class Options>
void hold(AutogradContext* ctx, const ProcessGroup& group, const Options& options) {
  ctx->saved_data["held"] =
      c10::IValue::make_capsule(c10::static_intrusive_pointer_cast<torch::CustomClassHolder>(
          c10::make_intrusive<Held<Options>>(group, options)));
}

template <class Options>
const Held<Options>& held(AutogradContext* ctx) {
  return static_cast<const Held<Options>&>(*ctx->saved_data["held"].toCapsule());
}

Tensor copy_of(const Tensor& tensor) {
  return tensor.detach().clone(at::MemoryFormat::Contiguous).resolve_conj().resolve_neg();
}

void check_divisible(const char* operation, const Tensor& tensor, int size) {
  if (tensor.dim() > 0 && tensor.size(0) % size == 0) return;
  fail(ErrorKind::kInvalidArgument, operation, ": the first dimension of a tensor of sizes ",
       c10::str(tensor.sizes()), " cannot be cut into ", size, " equal parts");
}

bool is_extremum(ReduceOp op) { return op == ReduceOp::kMin || op == ReduceOp::kMax; }

bool is_linear(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kPremulSum;
}

[[noreturn]] void refuse(const char* operation) {
  fail(ErrorKind::kUnsupported, operation,
       ": this reduce operation has no gradient here; use the group's own method");
}

struct AllReduce : Function<AllReduce> {
  static Tensor forward(AutogradContext* ctx, const Tensor& tensor, const ProcessGroup& group,
                        const ReduceOptions& options) {
    hold(ctx, group, options);
    auto result = copy_of(tensor);
    group.all_reduce(result, options);
    if (is_extremum(options.op)) ctx->save_for_backward({tensor, result});
    return result;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& [group, options] = parts(ctx);
    if (is_linear(options.op)) return {all_reduce(grads[0], group, options), {}, {}};
    // Those who had the value share what comes back.
    const auto saved = ctx->get_saved_variables();
    const auto had = saved[0].eq(saved[1]).to(grads[0].scalar_type());
    auto sharers = had.clone();
    group.all_reduce(sharers, {.timeout = options.timeout});
    const auto total = all_reduce(grads[0], group, {.timeout = options.timeout});
    return {total * had / sharers, {}, {}};
  }
  static std::pair<const ProcessGroup&, const ReduceOptions&> parts(AutogradContext* ctx) {
    const auto& all = held<ReduceOptions>(ctx);
    return {all.group, all.options};
  }
};

struct AllGather : Function<AllGather> {
  static Tensor forward(AutogradContext* ctx, const Tensor& tensor, const ProcessGroup& group,
                        const CallOptions& options) {
    hold(ctx, group, options);
    return group.all_gather(tensor.detach().contiguous(), options);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& all = held<CallOptions>(ctx);
    const auto part = reduce_scatter(grads[0], all.group, {.timeout = all.options.timeout});
    return {part.squeeze(0), {}, {}};
  }
};

struct ReduceScatter : Function<ReduceScatter> {
  static Tensor forward(AutogradContext* ctx, const Tensor& tensor, const ProcessGroup& group,
                        const ReduceOptions& options) {
    hold(ctx, group, options);
    auto sizes = tensor.sizes().vec();
    sizes[0] /= group.size();
    auto result = at::empty(sizes, tensor.options().requires_grad(false));
    group.reduce_scatter_single(result, tensor.detach().contiguous(), options);
    return result;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& all = held<ReduceOptions>(ctx);
    auto whole = all_gather(grads[0], all.group, {.timeout = all.options.timeout}).flatten(0, 1);
    if (all.options.op == ReduceOp::kAvg) whole = whole / all.group.size();
    if (all.options.op == ReduceOp::kPremulSum) whole = whole * all.options.factor;
    return {whole, {}, {}};
  }
};

struct AllToAll : Function<AllToAll> {
  static Tensor forward(AutogradContext* ctx, const Tensor& tensor, const ProcessGroup& group,
                        const SplitsOptions& options) {
    hold(ctx, group, options);
    auto sizes = tensor.sizes().vec();
    const auto& splits = options.output_splits;
    if (!splits.empty()) sizes[0] = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
    auto result = at::empty(sizes, tensor.options().requires_grad(false));
    group.all_to_all_single(result, tensor.detach().contiguous(), options);
    return result;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& all = held<SplitsOptions>(ctx);
    SplitsOptions back = all.options;
    std::swap(back.input_splits, back.output_splits);
    return {AllToAll::apply(grads[0], all.group, back), {}, {}};
  }
};

// All ranks' gradients on the root; zeros elsewhere.
Tensor sum_on_root(const Tensor& tensor, const ProcessGroup& group, const RootOptions& options);

struct Broadcast : Function<Broadcast> {
  static Tensor forward(AutogradContext* ctx, const Tensor& tensor, const ProcessGroup& group,
                        const RootOptions& options) {
    hold(ctx, group, options);
    auto result = copy_of(tensor);
    group.broadcast(result, options);
    return result;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& all = held<RootOptions>(ctx);
    return {sum_on_root(grads[0], all.group, all.options), {}, {}};
  }
};

struct SumOnRoot : Function<SumOnRoot> {
  static Tensor forward(AutogradContext* ctx, const Tensor& tensor, const ProcessGroup& group,
                        const RootOptions& options) {
    hold(ctx, group, options);
    auto result = copy_of(tensor);
    group.reduce(result, {.root = options.root, .timeout = options.timeout});
    if (group.rank() != options.root) result.zero_();
    return result;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& all = held<RootOptions>(ctx);
    return {broadcast(grads[0], all.group, all.options), {}, {}};
  }
};

Tensor sum_on_root(const Tensor& tensor, const ProcessGroup& group, const RootOptions& options) {
  return SumOnRoot::apply(tensor, group, options);
}

}  // namespace

Tensor all_reduce(const Tensor& tensor, const ProcessGroup& group, const ReduceOptions& options) {
  if (!is_linear(options.op) && !is_extremum(options.op)) refuse("nn::all_reduce");
  return AllReduce::apply(tensor, group, options);
}

Tensor all_gather(const Tensor& tensor, const ProcessGroup& group, const CallOptions& options) {
  return AllGather::apply(tensor, group, options);
}

Tensor reduce_scatter(const Tensor& tensor, const ProcessGroup& group,
                      const ReduceOptions& options) {
  if (!is_linear(options.op)) refuse("nn::reduce_scatter");
  check_divisible("nn::reduce_scatter", tensor, group.size());
  return ReduceScatter::apply(tensor, group, options);
}

Tensor all_to_all(const Tensor& tensor, const ProcessGroup& group, const SplitsOptions& options) {
  if (options.output_splits.empty() != options.input_splits.empty()) {
    fail(ErrorKind::kInvalidArgument, "nn::all_to_all: pass both splits or neither");
  }
  if (options.input_splits.empty()) check_divisible("nn::all_to_all", tensor, group.size());
  return AllToAll::apply(tensor, group, options);
}

std::vector<Tensor> all_to_all(const std::vector<Tensor>& tensors, const ProcessGroup& group,
                               const CallOptions& options) {
  if (tensors.size() != static_cast<std::size_t>(group.size())) {
    fail(ErrorKind::kInvalidArgument, "nn::all_to_all: ", tensors.size(), " tensors for ",
         group.size(), " ranks");
  }
  SplitsOptions splits{.timeout = options.timeout};
  for (const auto& tensor : tensors) {
    if (tensor.dim() == 0)
      fail(ErrorKind::kInvalidArgument, "nn::all_to_all: a tensor has no rows");
    splits.input_splits.push_back(tensor.size(0));
  }
  // How many rows come is what the others send.
  const auto sent = at::tensor(splits.input_splits, at::kLong);
  const auto coming = at::empty_like(sent);
  group.all_to_all_single(coming, sent, {.timeout = options.timeout});
  const auto* rows = coming.const_data_ptr<std::int64_t>();
  splits.output_splits.assign(rows, rows + group.size());
  const auto together = all_to_all(at::cat(tensors), group, splits);
  return together.split_with_sizes(splits.output_splits);
}

Tensor broadcast(const Tensor& tensor, const ProcessGroup& group, const RootOptions& options) {
  // The root's tensor decides whether there is a way back: others often pass an empty one.
  const auto wanted =
      at::full({1}, at::GradMode::is_enabled() && tensor.requires_grad(), at::kByte);
  group.broadcast(wanted, options);
  const bool differentiable = wanted.item<std::uint8_t>() != 0;
  if (differentiable && !tensor.requires_grad()) {
    return Broadcast::apply(tensor.detach().requires_grad_(), group, options);
  }
  return Broadcast::apply(differentiable ? tensor : tensor.detach(), group, options);
}

}  // namespace convoy::nn
