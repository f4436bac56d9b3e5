// Reducer: what it is made of, and what ranks must have alike for it.
#include <ATen/MemoryOverlap.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/log.h"
#include "ddp/agreement.h"
#include "ddp/bucket_plan.h"
#include "ddp/reduce_bucket.h"
#include "ddp/reducer_impl.h"

namespace convoy {

Reducer::Impl::Impl(std::vector<at::Tensor> parameters, ProcessGroup group, ReducerSetup options)
    : tensors_(std::move(parameters)),
      group_(std::move(group)),
      options_(std::move(options)),
      size_(group_.size()),
      verdict_(group_, tensors_.size()),
      norm_weight_(enlist_reducer(group_, tensors_)),
      alone_(size_ == 1),
      compares_(size_ > 1 && group_.backend_name() == "convoy") {
  std::optional<Error> error;  // of this rank, which the others hear too
  try {
    observer_.set_debug(debug_level());
    if (observer_.debug() == DebugLevel::kDetail && options_.check_replicas_every == 0) {
      options_.check_replicas_every = 100;
    }
    check();
    layout_.caps = bucket_caps(options_);
    launches_late_ = launches_late(group_, options_.launch);
  } catch (const Error& e) {
    error = e;
  }
  static std::atomic<std::uint64_t> made{0};
  const PurposeScope scope(
      {.what = current_purpose().what ? current_purpose().what : "the constructor of Reducer"});
  serial_ = agree(group_, "parameters of the reducer",
                  error ? std::vector<std::string>{} : description(), error, ++made);
}

void Reducer::Impl::check() {
  const auto require = [](bool fine, const auto&... text) {
    if (!fine) fail(ErrorKind::kInvalidArgument, text...);
  };
  const std::size_t count = tensors_.size();
  require(options_.error.empty(), options_.error);
  const auto& names = options_.traits.names;
  require(names.empty() || names.size() == count, names.size(), " names for ", count,
          " parameters; give one for each, or none");
  check_weight(options_.reduce);
  weigh_norms();
  parameters_.resize(count);
  std::set<const void*> seen;
  bool trains = false;
  for (std::size_t i = 0; i < count; ++i) {
    std::string& name = parameters_[i].name;
    name = names.empty() ? concat("#", i) : names[i];
    const at::Tensor& tensor = tensors_[i];
    require(tensor.defined(), "parameter ", name, " is undefined; leave it out");
    require(!tensor.is_meta(), "parameter ", name,
            " is on device meta and has no values; give the module memory first (to_empty(), then "
            "load or initialise it)");
    require(seen.insert(tensor.unsafeGetTensorImpl()).second, "parameter ", name,
            " is listed twice; list each once");
    require(tensor.is_leaf() && tensor.layout() == c10::kStrided, "parameter ", name,
            " must be a dense leaf tensor");
    require(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, "parameter ", name,
            " has elements that share memory");
    trains |= tensor.requires_grad();
    parameters_[i].type = tensor.scalar_type();
  }
  for (const std::size_t i : options_.traits.sparse) {
    require(i < count && tensors_[i].dim() > 0, "parameter ", i, " cannot be sparse");
    parameters_[i].sparse = true;
  }
  for (const std::size_t i : options_.traits.delayed) {
    require(i < count, "parameter ", i, " cannot be delayed: there are ", count);
    parameters_[i].delayed = true;
  }
  require(trains,
          "there is no parameter that requires a gradient; without one, use the module itself");
}

std::vector<std::string> Reducer::Impl::description() const {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const ParameterState& parameter = parameters_[i];
    const at::Tensor& tensor = tensors_[i];
    lines.push_back(concat(
        "parameter ", parameter.name, ": ", tensor.scalar_type(), " of sizes ", tensor.sizes(),
        " and strides ", tensor.strides(), tensor.requires_grad() ? "" : ", frozen",
        parameter.sparse ? ", sparse" : "", parameter.delayed ? ", delayed" : ""));
  }
  std::string caps;
  for (const std::int64_t cap : layout_.caps) caps += concat(" ", cap);
  lines.push_back(concat("option bucket caps:", caps));
  lines.push_back(concat("option find_unused_parameters: ", options_.find_unused_parameters));
  lines.push_back(concat("option static_graph: ", options_.static_graph));
  lines.push_back(concat("option gradient_as_bucket_view: ", options_.gradient_as_bucket_view));
  lines.push_back(
      concat("option skip_all_reduce_unused_params: ", options_.skip_all_reduce_unused_params));
  lines.push_back(concat("option reduce: ", static_cast<int>(options_.reduce.kind())));
  lines.push_back(concat("option nonfinite: ", static_cast<int>(options_.nonfinite),
                         ", check_replicas_every: ", options_.check_replicas_every));
  if (const auto type = options_.reduce_dtype()) {
    lines.push_back(concat("option reduce_dtype: ", *type));
  }
  lines.insert(lines.end(), options_.must_agree.begin(), options_.must_agree.end());
  return lines;
}

}  // namespace convoy
