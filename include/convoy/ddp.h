#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "convoy/ddp_stats.h"
#include "convoy/group.h"
#include "convoy/hooks.h"
#include "convoy/join.h"
#include "convoy/mixed_precision.h"
#include "convoy/reducer.h"
#include "convoy/tensors_in.h"

namespace torch::nn {
class Module;
}
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace convoy {

enum class BufferSync { kBeforeForward, kAfterForward };

// Parameters whose gradients are reduced over another group than the model's: experts that only
// some ranks have. A rank names those that it has.
struct ParameterGroup {
  std::vector<std::string> names;
  ProcessGroup group;
};

struct DdpOptions {
  std::optional<double> bucket_cap_mb = {};  // these as in ReducerOptions
  std::vector<double> bucket_cap_mb_list = {};
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = true;
  bool skip_all_reduce_unused_params = false;
  GradReduce reduce = GradReduce::kMean;
  BucketLaunch launch = BucketLaunch::kAuto;
  NonFinite nonfinite = NonFinite::kIgnore;
  std::uint64_t check_replicas_every = 0;
  bool init_sync = true;             // ranks begin with rank 0's parameters and buffers
  bool forward_sync_buffers = true;  // in training, buffers become rank 0's
  BufferSync buffer_sync = BufferSync::kBeforeForward;
  // Names of parameters and buffers that stay this rank's own.
  std::vector<std::string> ignore = {};
  // Parameters that travel after all others, in buckets of their own.
  std::vector<std::string> delay_all_reduce_named_params = {};
  std::vector<ParameterGroup> parameter_groups = {};
  // Compute and communicate with less than the parameters' own precision.
  std::optional<MixedPrecision> mixed_precision = {};

  // All of it but parameter_groups, for a checkpoint or another process: lines of text.
  std::string to_text() const;
  // kInvalidArgument if that is not what to_text() writes.
  static DdpOptions from_text(const std::string& text);
  // The same in an archive, under a name of our own.
  void save(torch::serialize::OutputArchive& archive) const;
  static DdpOptions load(torch::serialize::InputArchive& archive);
};

class LowPrecisionCopies;  // opaque

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// What DdpCore sees of a module: one of torch::nn, or of another language.
class DdpModule {
 public:
  virtual ~DdpModule() = default;

  virtual std::string name() const = 0;
  virtual bool is_training() const = 0;
  // In the same order on all ranks; a shared one under each of its names.
  virtual NamedTensors parameters() const = 0;
  // True if parameters() would give these tensors, in this order. Asked in each forward: the given
  // one compares with parameters(), others may know a faster way.
  virtual bool holds(const NamedTensors& known) const;
  // Asked for each time: a module may replace its buffers.
  virtual NamedTensors buffers() const = 0;
  // Parameters whose gradients are sparse.
  virtual std::vector<at::Tensor> sparse() const = 0;
  // Statistics of normalisation layers in training mode: their forward writes them without telling
  // autograd, and their backward does not read them.
  virtual std::vector<at::Tensor> statistics() const = 0;
  virtual bool has_sync_batch_norm() const = 0;
  // Why it cannot be wrapped, which is thrown on all ranks; empty: it can.
  virtual std::string error() const { return {}; }
};

// Takes the place of the broadcast of buffers: communicates over `group` and writes into them.
using BufferHook = std::function<void(const ProcessGroup& group, const NamedTensors& buffers)>;

// What DistributedDataParallel does, whatever the type of its module. Thread-safety as for Reducer.
class DdpCore {
 public:
  DdpCore(std::shared_ptr<DdpModule> module, ProcessGroup group, const DdpOptions& options);
  DdpCore(std::shared_ptr<torch::nn::Module> module, ProcessGroup group, const DdpOptions& options);
  ~DdpCore();
  DdpCore(DdpCore&&) noexcept;
  DdpCore& operator=(DdpCore&&) noexcept;

  void before_forward();
  void after_forward(const std::vector<at::Tensor*>& outputs);
  // Instead of after_forward(), when the module threw: in its handler, or with the text of what it
  // was. Other ranks hear of it.
  void forward_failed();
  void forward_failed(const std::string& why);
  void sync_buffers();
  void set_buffer_hook(BufferHook hook, BufferSync when);
  // `self` is what the Join knows.
  std::unique_ptr<JoinHook> join_hook(const Joinable& self, const JoinOptions& options);
  Reducer& reducer() { return *reducer_; }
  const Reducer& reducer() const { return *reducer_; }
  const DdpOptions& options() const { return options_; }
  void sync_gradients();
  void update_process_group(ProcessGroup group);
  void set_reduce(GradReduce reduce);
  void set_static_graph();
  void set_sample_rate(std::uint64_t rate);
  DdpStats stats() const;
  // The type that tensors on their way into forward become, if any.
  std::optional<at::ScalarType> input_type() const;

  // With mixed precision a forward without a backward leaves copies of the parameters in their
  // place; this puts them back.
  void restore_parameters() const;

 private:
  friend class DdpJoinHook;
  friend class JoinPart;
  ReducerOptions reducer_options() const;
  void make_parameter_groups();
  NamedTensors buffers() const;
  void check_parameters(const char* where);
  void enter();
  void leave();
  void undo_forward();
  bool is_in_step() const;
  void meet_others(BufferSync when);
  void sync_buffers_from(int root);
  void sync_buffers_from(int root, const NamedTensors& found);
  std::shared_ptr<JoinContext> join() const;
  void cast_buffers(at::ScalarType type);
  std::string error_in(const MixedPrecision& mixed) const;

  std::shared_ptr<DdpModule> module_;
  ProcessGroup group_;
  DdpOptions options_;
  NamedTensors wrapped_;  // the module's parameters, of all groups
  NamedTensors last_;     // the same as of the last forward
  std::unique_ptr<Reducer> reducer_;
  std::vector<std::unique_ptr<Reducer>> others_;  // of parameter_groups
  BufferHook buffer_hook_;
  at::Tensor staging_;  // of buffers on their way
  std::weak_ptr<JoinContext> join_;
  const Joinable* join_self_ = nullptr;
  // Shared with the reducer's watch.
  std::shared_ptr<LowPrecisionCopies> copies_;
  bool lowered_here_ = false;  // by this forward
  int forwards_ = 0;           // that run
  bool in_module_ = false;     // it runs, in a forward with gradients
};

// A model's part of a Join that somebody else conducts, such as torch.distributed.algorithms.Join:
// that one tells when a step begins, and when a rank takes part without inputs. A step is one
// forward and one backward, or a forward inside of no_sync().
class JoinPart {
 public:
  // The core stays where it is. kInvalidArgument as for Join.
  JoinPart(DdpCore& core, const JoinOptions& options);
  ~JoinPart();
  JoinPart(const JoinPart&) = delete;
  JoinPart& operator=(const JoinPart&) = delete;

  // Before the forward of a rank that has an input; collective, with shadow() of those that have
  // none. kInvalidArgument on all ranks if some of them are in no_sync() and others not.
  void step();
  // kRemote if the backward fails.
  void shadow();
  // When no rank has inputs any more. Collective: the model becomes that of the greatest rank of
  // those that say so.
  void finish(bool is_last_joiner);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

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
