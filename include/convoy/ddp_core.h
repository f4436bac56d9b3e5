#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "convoy/ddp_options.h"
#include "convoy/ddp_stats.h"
#include "convoy/join.h"
#include "convoy/reducer.h"

namespace torch::nn {
class Module;
}

// The parts of DistributedDataParallel, for modules that are not torch::nn modules.
namespace convoy {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// A module as DdpCore sees it: a torch::nn::Module, or a module of another language.
class DdpModule {
 public:
  virtual ~DdpModule() = default;

  virtual std::string name() const = 0;
  virtual bool is_training() const = 0;
  // In the same order on all ranks. A shared parameter is listed under each of its names.
  virtual NamedTensors parameters() const = 0;
  // True if parameters() would return these tensors in this order. Called in each forward. The
  // default compares with parameters(); override it if there is a faster way.
  virtual bool holds(const NamedTensors& known) const;
  // Called each time that buffers are needed: a module may replace them.
  virtual NamedTensors buffers() const = 0;
  // Parameters whose gradients are sparse.
  virtual std::vector<at::Tensor> sparse() const = 0;
  // Running statistics of normalisation layers in training mode. Forward writes them without
  // telling autograd, and backward does not read them.
  virtual std::vector<at::Tensor> statistics() const = 0;
  virtual bool has_sync_batch_norm() const = 0;
  // Why the module cannot be wrapped; all ranks throw this text. Empty: it can be wrapped.
  virtual std::string error() const { return {}; }
};

// Replaces the broadcast of buffers: communicates over `group` and writes into the buffers.
using BufferHook = std::function<void(const ProcessGroup& group, const NamedTensors& buffers)>;

// The implementation of DistributedDataParallel, independent of the module's type. Functions
// without a comment do what the function of the same name does there. Thread-safety as for Reducer:
// one thread at a time.
class DdpCore {
 public:
  class Impl;  // opaque

  // Collective, blocks. Throws kInvalidArgument on every rank if ranks differ.
  DdpCore(std::shared_ptr<DdpModule> module, ProcessGroup group, const DdpOptions& options);
  DdpCore(std::shared_ptr<torch::nn::Module> module, ProcessGroup group, const DdpOptions& options);
  ~DdpCore();
  DdpCore(DdpCore&&) noexcept;
  DdpCore& operator=(DdpCore&&) noexcept;

  // Call these before and after the module's forward. Collective if buffers are synchronized.
  // after_forward() replaces the outputs by tensors from which backward reaches the reducer.
  void before_forward();
  void after_forward(const std::vector<at::Tensor*>& outputs);
  // Call this instead of after_forward() if the module threw: in its catch block, or with the text
  // of the exception. Other ranks learn about it in their backward.
  void forward_failed();
  void forward_failed(const std::string& why);
  // Collective, blocks.
  void sync_buffers();
  // register_buffer_hook() of DistributedDataParallel.
  void set_buffer_hook(BufferHook hook, BufferSync when);
  // `self` is the object that was passed to the Join.
  std::unique_ptr<JoinHook> join_hook(const Joinable& self, const JoinOptions& options);
  Reducer& reducer();
  const Reducer& reducer() const;
  const DdpOptions& options() const;
  void sync_gradients();
  void update_process_group(ProcessGroup group);
  void set_reduce(GradReduce reduce);
  void set_static_graph();
  void set_sample_rate(std::uint64_t rate);
  DdpStats stats() const;
  // The type that floating-point inputs of forward must be cast to, if any.
  std::optional<at::ScalarType> input_type() const;

  // With mixed precision, parameters hold copies of lower precision between forward and backward.
  // This puts the originals back, for example if no backward follows.
  void restore_parameters() const;

 private:
  friend class JoinPart;

  std::unique_ptr<Impl> impl_;
};

// One model's part in a Join that other code controls, such as torch.distributed.algorithms.Join.
// That code says when a step begins, and when a rank takes part without inputs. A step is one
// forward and one backward, or a forward inside of no_sync(). Not thread-safe.
class JoinPart {
 public:
  // `core` must stay at its address. Throws kInvalidArgument if the model has parameter_groups, or
  // is in another Join.
  JoinPart(DdpCore& core, const JoinOptions& options);
  ~JoinPart();
  JoinPart(const JoinPart&) = delete;
  JoinPart& operator=(const JoinPart&) = delete;

  // Call it before the forward of a rank that has an input. Collective: ranks without inputs call
  // shadow(). Throws kInvalidArgument on all ranks if some of them are in no_sync() and others are
  // not.
  void step();
  // Takes part in a step of the other ranks, with zero gradients. Collective. Throws kRemote if the
  // backward of the other ranks fails.
  void shadow();
  // Call it when no rank has inputs any more. Collective: parameters and buffers become those of
  // the highest rank that passes true. Throws kInvalidArgument if no rank does.
  void finish(bool is_last_joiner);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace convoy
