#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "convoy/ddp_core.h"
#include "ddp/join_context.h"
#include "ddp/mixed_precision.h"
#include "ddp/module_parameters.h"
#include "ddp/reducer_impl.h"

namespace convoy {

class DdpCore::Impl {
 public:
  Impl(std::shared_ptr<DdpModule> module, ProcessGroup group, const DdpOptions& options);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // As those of DdpCore.
  void before_forward();
  void after_forward(const std::vector<at::Tensor*>& outputs);
  void forward_failed();
  void forward_failed(const std::string& why);
  void sync_buffers();
  void set_buffer_hook(BufferHook hook, BufferSync when);
  std::unique_ptr<JoinHook> join_hook(const Joinable& self, const JoinOptions& options);
  Reducer& reducer() { return *reducer_; }
  const DdpOptions& options() const { return options_; }
  void sync_gradients();
  void update_process_group(ProcessGroup group);
  void set_reduce(GradReduce reduce);
  void set_static_graph();
  void set_sample_rate(std::uint64_t rate);
  DdpStats stats() const;
  std::optional<at::ScalarType> input_type() const;
  void restore_parameters() const;

 private:
  friend class DdpJoinHook;
  friend class JoinPart;
  ReducerSetup setup(ModuleParameters& found) const;  // takes from it
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

}  // namespace convoy
