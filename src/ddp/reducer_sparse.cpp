// Reducer: sparse gradients, which travel after the verdict, one by one.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "base/error.h"
#include "ddp/agreement.h"
#include "ddp/reduce_bucket.h"
#include "ddp/reducer_impl.h"

namespace convoy {

void Reducer::Impl::reduce_sparse() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterState& parameter = parameters_[i];
    if (!parameter.sparse || !parameter.active || !verdict_.used()[i]) continue;
    at::Tensor& gradient = tensors_[i].mutable_grad();
    at::Tensor sum;
    if (gradient.defined() && (parameter.used || !join_.shadows())) {
      sum = (gradient.is_sparse() ? gradient : gradient.to_sparse(1)).coalesce();
    } else {
      auto sizes = tensors_[i].sizes().vec();
      sizes[0] = 0;
      sum = at::sparse_coo_tensor(at::empty({1, 0}, at::kLong),
                                  at::empty(sizes, tensors_[i].options().requires_grad(false)),
                                  tensors_[i].sizes());
    }
    if (parameter.round.rows.defined()) {
      sum = reduce_rows(i, sum);
    } else {
      reduce_sparse_gradient(group_, sum, options_.reduce, round_.weight);
    }
    gradient =
        join_.scale(options_.reduce, size_) == 1 ? sum : sum * join_.scale(options_.reduce, size_);
  }
}

// What is reduced after the verdict has to be fine before it.
void Reducer::Impl::check_sparse() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterState& parameter = parameters_[i];
    const at::Tensor& gradient = tensors_[i].grad();
    if (!parameter.sparse || !parameter.active || !gradient.defined()) continue;
    if (join_.shadows() && !parameter.used) continue;
    if (options_.nonfinite != NonFinite::kIgnore && !is_finite(gradient)) {
      trouble(Ending::kNotFinite,
              concat("the gradient of ", parameter.name, ": ", describe_nonfinite(gradient)));
    }
    if (!parameter.round.rows.defined()) continue;
    const at::Tensor mine =
        (gradient.is_sparse() ? gradient : gradient.to_sparse(1)).coalesce().indices()[0];
    const at::Tensor known = at::isin(mine, parameter.round.rows);
    if (known.all().item<bool>()) continue;
    const auto row = at::masked_select(mine, known.logical_not())[0].item<std::int64_t>();
    trouble(Ending::kMistaken, concat("the gradient of ", parameter.name, " has row ", row,
                                      ", which set_sparse_metadata did not name"));
  }
}

at::Tensor Reducer::Impl::reduce_rows(std::size_t index, const at::Tensor& mine) {
  const at::Tensor& rows = parameters_[index].round.rows;
  auto sizes = tensors_[index].sizes().vec();
  sizes[0] = rows.size(0);
  const at::Tensor values = at::zeros(sizes, tensors_[index].options().requires_grad(false));
  if (mine._nnz() > 0) {
    values.index_copy_(0, at::searchsorted(rows, mine.indices()[0]), mine.values());
  }
  reduce_bucket(group_, values.view({-1}), options_.reduce, round_.weight).wait();
  return at::sparse_coo_tensor(rows.unsqueeze(0), values, tensors_[index].sizes())
      ._coalesced_(true);
}

void Reducer::Impl::set_sparse_metadata(const std::map<std::string, at::Tensor>& rows) {
  if (round_.open)
    fail(ErrorKind::kInvalidArgument, "it cannot be called inside of a backward; call it before");
  std::vector<std::pair<std::size_t, at::Tensor>> found;
  for (const auto& entry : rows) {
    const std::string& name = entry.first;
    const at::Tensor& list = entry.second;
    const auto place =
        std::find_if(parameters_.begin(), parameters_.end(), [&](const ParameterState& parameter) {
          return parameter.sparse && parameter.name == name;
        });
    if (place == parameters_.end()) {
      fail(ErrorKind::kInvalidArgument, "there is no sparse parameter ", in_quotes(name));
    }
    const auto index = static_cast<std::size_t>(place - parameters_.begin());
    if (!list.defined() || list.dim() != 1 || !at::isIntegralType(list.scalar_type(), false)) {
      fail(ErrorKind::kInvalidArgument, "the rows of ", in_quotes(name),
           " are not a list of integers; pass a tensor of one dimension and an integer type");
    }
    const at::NoGradGuard no_grad;
    at::Tensor sorted = std::get<0>(at::_unique(list.to(at::kLong), /*sorted=*/true));
    const std::int64_t most = tensors_[index].size(0);
    if (sorted.numel() > 0 &&
        (sorted[0].item<std::int64_t>() < 0 || sorted[-1].item<std::int64_t>() >= most)) {
      fail(ErrorKind::kInvalidArgument, in_quotes(name), ": rows must be from 0 to ", most - 1,
           ", got ", sorted[0].item<std::int64_t>(), " to ", sorted[-1].item<std::int64_t>());
    }
    found.emplace_back(index, std::move(sorted));
  }
  for (auto& [index, sorted] : found) parameters_[index].round.rows = std::move(sorted);
}

void Reducer::set_sparse_metadata(const std::map<std::string, at::Tensor>& rows) {
  told_from(group(), "set_sparse_metadata", [&] { impl_->set_sparse_metadata(rows); });
}

}  // namespace convoy
