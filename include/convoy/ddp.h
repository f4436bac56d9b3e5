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

// An argument of forward, with its floating-point tensors cast to `type`. It is a copy if the type
// can be copied and owns its tensors; otherwise the argument is passed unchanged.
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

template <class T>
concept ModuleHolder = requires(T& holder) { holder.ptr(); };
template <class T>
inline constexpr bool kIsSharedPointer = false;
template <class T>
inline constexpr bool kIsSharedPointer<std::shared_ptr<T>> = true;
template <class T>
concept NoModulePointer = !ModuleHolder<T> && !kIsSharedPointer<T>;

}  // namespace detail

// Wraps a module: gradients are averaged over the ranks of a group while backward computes them.
//
//   convoy::DistributedDataParallel model(Net(), world, {.bucket_cap_mb = 25});
//   torch::optim::SGD sgd(model->parameters(), 0.1);
//   loss(model(input), target).backward();     // gradients are the same on every rank
//   sgd.step();
//
// Net is a module holder or a shared_ptr to a module. All ranks must construct and run it in the
// same way. If ranks differ, or if backward fails on one rank, every rank throws, and the text
// names the rank.
//
// Backward is collective, except inside of no_sync(). Forward is collective if it synchronizes
// buffers: in training mode with gradients enabled. `model->` is the module itself; calling it
// directly trains this rank alone. If parameters of the module are replaced after wrapping, the
// next forward throws kInvalidArgument: wrap the module again. Not thread-safe: one thread at a
// time. docs/reference/ddp.md has the rules and a comparison with Python.
template <class Module>
class DistributedDataParallel : public Joinable {
 public:
  // Collective, blocks. Throws kInvalidArgument on every rank if ranks differ, or if an option
  // names a parameter that does not exist.
  DistributedDataParallel(std::shared_ptr<Module> module, ProcessGroup group,
                          const DdpOptions& options = {})
      : module_(std::move(module)), core_(module_, std::move(group), options) {}
  // The same for a module holder, such as torch::nn::Linear.
  template <detail::ModuleHolder Holder>
  DistributedDataParallel(const Holder& holder, ProcessGroup group, const DdpOptions& options = {})
      : DistributedDataParallel(holder.ptr(), std::move(group), options) {}
  // Anything else does not compile.
  template <detail::NoModulePointer Other>
  DistributedDataParallel(const Other&, const ProcessGroup& group, const DdpOptions& options = {})
      : DistributedDataParallel(std::shared_ptr<Module>(), group, options) {
    static_assert(detail::ModuleHolder<Other>,
                  "DistributedDataParallel: pass a module holder (TORCH_MODULE) or a "
                  "std::shared_ptr to a module, not the module itself or a plain pointer");
  }

  // Calls the module's forward. Its result may be or contain tensors: see convoy/tensors_in.h.
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

  // While the returned object lives, backward only adds to this rank's gradients, and nothing is
  // reduced. What counts is when backward runs. With `on` false it does nothing, for loops that
  // accumulate four batches: no_sync(i % 4 != 3).
  Reducer::NoSync no_sync(bool on = true) { return core_.reducer().no_sync(on); }
  // Reduces the accumulated gradients, without a backward. Collective, blocks.
  void sync_gradients() { core_.sync_gradients(); }
  // Continues with another group: see Reducer. Collective, blocks. Buffers are taken from the same
  // rank as parameters. Throws kUnsupported if there are parameter_groups.
  void update_process_group(ProcessGroup group) { core_.update_process_group(std::move(group)); }
  // Replaces the all-reduce of buckets. Call it once, before the first backward. Collective.
  void register_comm_hook(CommHook hook) { core_.reducer().register_comm_hook(std::move(hook)); }
  // Replaces the broadcast of buffers. Throws kInvalidArgument if the hook is empty, or if there is
  // one already.
  void register_buffer_hook(BufferHook hook, BufferSync when = BufferSync::kAfterForward) {
    core_.set_buffer_hook(std::move(hook), when);
  }
  // Copies rank 0's buffers to all ranks, for example before evaluation. Collective, blocks.
  void sync_buffers() { core_.sync_buffers(); }
  // Replaces DdpOptions::reduce, for example by weighted(samples) before each backward.
  void set_reduce(GradReduce reduce) { core_.set_reduce(reduce); }
  // Sets DdpOptions::static_graph. Call it on all ranks, before the first reduced backward.
  void set_static_graph() { core_.set_static_graph(); }
  // See Reducer::set_sparse_metadata.
  void set_sparse_metadata(const std::map<std::string, at::Tensor>& rows) {
    core_.reducer().set_sparse_metadata(rows);
  }
  // True if the last backward was dropped because of NonFinite::kSkip.
  bool skipped() const { return core_.reducer().skipped(); }

  // --- statistics: see convoy/ddp_stats.h ---
  // PyTorch's DDP logging data. Also available after an error.
  DdpStats stats() const { return core_.stats(); }
  // Measures the times in stats() in one of `rate` backwards, and in the first ten. Default: 100.
  void set_runtime_logging_sample_rate(std::uint64_t rate) { core_.set_sample_rate(rate); }
  // One line about the last step: "step 120, 12.3 ms: compute 71 %, waited for rank 1 18 %, ...".
  std::string report() const { return core_.reducer().timeline().report(); }
  // The times of the last step.
  const RoundTimes& timeline() const { return core_.reducer().timeline(); }
  // Writes the last step of all ranks as a Chrome trace, on rank 0. Collective, blocks.
  void write_trace(const std::string& path) const { core_.reducer().write_trace(path); }

  Reducer& reducer() { return core_.reducer(); }
  const Reducer& reducer() const { return core_.reducer(); }
  const ProcessGroup& group() const { return core_.reducer().group(); }
  const DdpOptions& options() const { return core_.options(); }

  // Joinable: called by Join.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& join_options) override {
    return core_.join_hook(*this, join_options);
  }
  const ProcessGroup& join_process_group() const override { return group(); }

  // torch::save and torch::load work as with the module itself.
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

template <detail::ModuleHolder Holder>
DistributedDataParallel(Holder, ProcessGroup, const DdpOptions& = {})
    -> DistributedDataParallel<typename Holder::ContainedType>;
template <class Module>
DistributedDataParallel(std::shared_ptr<Module>, ProcessGroup,
                        const DdpOptions& = {}) -> DistributedDataParallel<Module>;
template <detail::NoModulePointer Other>
DistributedDataParallel(Other, ProcessGroup,
                        const DdpOptions& = {}) -> DistributedDataParallel<Other>;

}  // namespace convoy
