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

// What DistributedDataParallel is made of, for modules that are not torch::nn's.
namespace convoy {

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
  class Impl;  // opaque

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
  Reducer& reducer();
  const Reducer& reducer() const;
  const DdpOptions& options() const;
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
  friend class JoinPart;

  std::unique_ptr<Impl> impl_;
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

}  // namespace convoy
