#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "convoy/ddp_core.h"
#include "convoy/ddp_options.h"
#include "convoy/ddp_stats.h"
#include "convoy/group.h"
#include "convoy/hooks.h"
#include "convoy/join.h"
#include "convoy/reducer.h"
#include "convoy/tensors_in.h"

namespace convoy {

namespace detail {

// An argument of forward: a copy with its tensors cast, if it can be copied and they can be found;
// otherwise the argument as it is.
template <class Arg>
class CastArgument {
 public:
  CastArgument(Arg&& arg, at::ScalarType type) : held_(static_cast<Arg&&>(arg)) {
    if constexpr (kCopies) {
      for_each_tensor(held_, [type](at::Tensor& tensor) {
        if (tensor.defined() && c10::isFloatingType(tensor.scalar_type())) tensor = tensor.to(type);
      });
    }
  }
  Arg&& get() { return static_cast<Arg&&>(held_); }

 private:
  using Value = std::remove_cvref_t<Arg>;
  static constexpr bool kCopies = std::copy_constructible<Value> && kOwnsItsTensors<Value>;
  std::conditional_t<kCopies, Value, Arg&&> held_;
};

}  // namespace detail

// A module whose gradients are averaged over the ranks of a group while backward computes them:
//
//   convoy::DistributedDataParallel model(Net(), world, {.bucket_cap_mb = 25});
//   torch::optim::SGD sgd(model->parameters(), 0.1);
//   loss(model(input), target).backward();     // gradients are the same on every rank
//   sgd.step();
//
// Net is a module holder or a shared_ptr to a module. All ranks make it and run it in the same way;
// what differs is an error with names on every rank, and so is a backward that fails on one. A call
// is collective where buffers are synchronised: with gradients on, in training mode. `model->` is
// the module itself, whose calls train this rank alone. A module that has got other parameters
// since it was wrapped is an error in the next forward: wrap it again. docs/ddp.md has the rules,
// and what changes for those who come from Python.
template <class Module>
class DistributedDataParallel : public Joinable {
 public:
  // Collective. kInvalidArgument on every rank if ranks differ, or for names that do not exist.
  DistributedDataParallel(std::shared_ptr<Module> module, ProcessGroup group,
                          const DdpOptions& options = {})
      : module_(std::move(module)), core_(module_, std::move(group), options) {}
  // A holder of torch::nn's, such as torch::nn::Linear.
  template <class Holder>
    requires requires(Holder& holder) { holder.ptr(); }
  DistributedDataParallel(Holder holder, ProcessGroup group, const DdpOptions& options = {})
      : DistributedDataParallel(holder.ptr(), std::move(group), options) {}

  // The module's forward. What it returns may be or hold tensors: see convoy/tensors_in.h.
  template <class... Args>
  auto forward(Args&&... args) {
    if (const auto type = core_.input_type()) {
      return run(detail::CastArgument<Args>(std::forward<Args>(args), *type).get()...);
    }
    return run(std::forward<Args>(args)...);
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  Module* operator->() { return module_.get(); }
  const Module* operator->() const { return module_.get(); }
  Module& operator*() { return *module_; }
  const std::shared_ptr<Module>& module() const { return module_; }

  // While it lives, backward adds to this rank's gradients only. Read when backward runs.
  Reducer::NoSync no_sync() { return core_.reducer().no_sync(); }
  // Reduces what was accumulated, without a backward. Collective.
  void sync_gradients() { core_.sync_gradients(); }
  // Goes on with another group: see Reducer. Buffers become those of the same rank. kUnsupported
  // with parameter_groups.
  void update_process_group(ProcessGroup group) { core_.update_process_group(std::move(group)); }
  // Before the first backward, once. Collective.
  void register_comm_hook(CommHook hook) { core_.reducer().register_comm_hook(std::move(hook)); }
  void register_buffer_hook(BufferHook hook, BufferSync when = BufferSync::kAfterForward) {
    core_.set_buffer_hook(std::move(hook), when);
  }
  // Buffers become rank 0's, as before evaluation on several ranks. Collective.
  void sync_buffers() { core_.sync_buffers(); }
  // For weighted(samples) before each backward.
  void set_reduce(GradReduce reduce) { core_.set_reduce(reduce); }
  // As the option; before the first backward that is reduced, on all ranks.
  void set_static_graph() { core_.set_static_graph(); }
  // See Reducer.
  void set_sparse_metadata(const std::map<std::string, at::Tensor>& rows) {
    core_.reducer().set_sparse_metadata(rows);
  }
  // The last backward was dropped: NonFinite::kSkip.
  bool skipped() const { return core_.reducer().skipped(); }

  // --- what it does: see convoy/ddp_stats.h ---
  // PyTorch's logging data, also after an error.
  DdpStats stats() const { return core_.stats(); }
  // Times in it are of one backward of so many (and of the first ten); 100.
  void set_runtime_logging_sample_rate(std::uint64_t rate) { core_.set_sample_rate(rate); }
  // "step 120, 12.3 ms: compute 71 %, waited for rank 1 18 %, reduce 11 %", of the last one.
  std::string report() const { return core_.reducer().timeline().report(); }
  // When the parts of the last step happened.
  const RoundTimes& timeline() const { return core_.reducer().timeline(); }
  // The last step of all ranks as a Chrome trace, which rank 0 writes. Collective.
  void write_trace(const std::string& path) const { core_.reducer().write_trace(path); }

  Reducer& reducer() { return core_.reducer(); }
  const Reducer& reducer() const { return core_.reducer(); }
  const ProcessGroup& group() const { return core_.reducer().group(); }
  const DdpOptions& options() const { return core_.options(); }

  // For Join.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& join_options) override {
    return core_.join_hook(*this, join_options);
  }
  const ProcessGroup& join_process_group() const override { return group(); }

  // torch::save and torch::load, as of the module itself.
  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const DistributedDataParallel& model) {
    model.core_.restore_parameters();
    model.module_->save(archive);
    return archive;
  }
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    DistributedDataParallel& model) {
    model.core_.restore_parameters();
    model.module_->load(archive);
    return archive;
  }

 private:
  template <class... Args>
  auto run(Args&&... args) {
    core_.before_forward();
    auto output = compute(std::forward<Args>(args)...);
    core_.after_forward(tensors_in(output));
    return output;
  }
  template <class... Args>
  decltype(auto) compute(Args&&... args) {
    try {
      return module_->forward(std::forward<Args>(args)...);
    } catch (...) {
      core_.forward_failed();
      throw;
    }
  }

  std::shared_ptr<Module> module_;
  DdpCore core_;
};

template <class Holder>
  requires requires(Holder& holder) { holder.ptr(); }
DistributedDataParallel(Holder, ProcessGroup, const DdpOptions& = {})
    -> DistributedDataParallel<typename Holder::ContainedType>;
template <class Module>
DistributedDataParallel(std::shared_ptr<Module>, ProcessGroup,
                        const DdpOptions& = {}) -> DistributedDataParallel<Module>;

}  // namespace convoy
