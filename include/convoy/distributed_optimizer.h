#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "convoy/autograd.h"
#include "convoy/optimizer_rules.h"
#include "convoy/rpc.h"
#include "convoy/rpc_error.h"
#include "convoy/rref.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

// An optimizer for parameters that live on several workers.
//
//   convoy::DistributedOptimizer sgd(rpc, parameters, convoy::Sgd{.lr = 0.05});  // RRefs
//   convoy::autograd::Context context(rpc);
//   ...
//   context.backward({loss});
//   sgd.step(context);                       // at each owner, with the context's gradients
//
// See docs/reference/optim.md.
namespace convoy {

// A parameter group: parameters with the same rule, on any workers.
struct DistributedGroup {
  std::vector<RRef<at::Tensor>> parameters;
  OptimizerRule rule;
  // Names of the parameters, for error texts. Empty: their numbers are used.
  std::vector<std::string> names = {};

  // A group of named parameters, for example from RemoteModule::named_parameters().
  static DistributedGroup named(const std::map<std::string, RRef<at::Tensor>>& parameters,
                                const OptimizerRule& rule);
};

// The result of a step at one owner. An owner steps all of its parameters, or none: what can refuse
// a step is looked at before the first parameter changes.
struct OwnerStep {
  enum class State {
    kStepped,
    kNotStepped,  // it failed there, and nothing was changed
    kUnknown,     // the owner was lost, did not answer in time, or failed in the middle
  };

  std::string worker;
  State state = State::kUnknown;
  std::size_t stepped = 0;  // parameters that were stepped
  std::size_t skipped = 0;  // parameters without a gradient in the context
  std::string error = {};   // empty if it was stepped
};

// A step failed at one or more owners. worker() is the first of them, owners() has the result of
// each owner.
class StepError : public rpc::RemoteError {
 public:
  StepError(ErrorKind kind, const std::string& message, std::string worker, std::string remote_type,
            std::vector<OwnerStep> owners);
  ~StepError() override;

  const std::vector<OwnerStep>& owners() const noexcept { return owners_; }

 private:
  std::vector<OwnerStep> owners_;
};

struct DistributedOptimizerOptions {
  // Timeout of each call to an owner: a duration (0: no limit) or a Deadline. Not set: the default
  // of the session.
  Timeout timeout = {};
};

// Creates one optimizer at each owner of its parameters, over RPC. It uses the gradients of a
// distributed autograd context; `.grad` is neither read nor written. Several optimizers may share
// parameters, for example one per trainer. Steps that share a parameter are serialised; other steps
// run concurrently. A forward that runs during a step may see a parameter that is partly updated.
//
// Copies refer to the same optimizer. Thread-safe. It may outlive its session, but cannot be used
// then.
class DistributedOptimizer {
 public:
  // Blocks until all owners have created their part. Parameters must be leaf tensors of f32, f64 or
  // their complex types. Throws rpc::RemoteError, which names owner and parameter: kRemote if a
  // tensor is not such a leaf or is listed twice, kPeerLost or kTimeout if an owner does not
  // answer, or the error of the parameter's creation. Throws kInvalidArgument if there are no
  // parameters, if the timeout is negative, or if the rule has an invalid value.
  DistributedOptimizer(const rpc::Session& session, std::vector<RRef<at::Tensor>> parameters,
                       const OptimizerRule& rule, const DistributedOptimizerOptions& options = {});
  DistributedOptimizer(const rpc::Session& session, const std::vector<DistributedGroup>& groups,
                       const DistributedOptimizerOptions& options = {});

  // Steps all parameters that have a gradient in the context. The others keep their value and their
  // optimizer state. Blocks until all owners have answered. Throws StepError if the step fails at
  // an owner, also if the context is released there meanwhile. Throws kInvalidArgument if the
  // context was released or belongs to another session.
  std::vector<OwnerStep> step(const autograd::ContextRef& context) const;

  // An id for BackwardOptions::optimizers, valid while this optimizer exists: each owner steps as
  // soon as its part of the pass is done, which saves a round trip. But if the pass fails, some
  // owners may have stepped; its error names them. If rules have changed since the last step, sends
  // them to the owners first: blocks until they have answered, and throws StepError if that fails.
  autograd::StepId in_backward() const;

  // Sets the learning rate of all groups, or of one, from the next step on. Does not communicate:
  // the value is sent with the next step. Throws kInvalidArgument for an invalid rate or group.
  void set_lr(double lr) const;
  void set_lr(std::size_t group, double lr) const;
  // Replaces the rule of a group, from the next step on. Throws kInvalidArgument if the rule is of
  // another kind or has an invalid value, or if there is no such group.
  void set_rule(std::size_t group, const OptimizerRule& rule) const;
  // Throws kInvalidArgument if there is no such group.
  OptimizerRule rule(std::size_t group = 0) const;
  std::size_t groups() const;
  std::vector<std::string> owners() const;  // names of the workers that own parameters

  // Saves optimizer state and step counts of all parameters, but not the rules. State is stored by
  // parameter number, in the order of groups: parameters may have other owners when it is loaded.
  // Blocks until the owners have answered; throws rpc::RemoteError if one does not.
  void save(torch::serialize::OutputArchive& archive) const;
  // Throws kInvalidArgument if the archive belongs to other parameters or rules; nothing is changed
  // then. Throws StepError if an owner fails while it loads. Blocks.
  void load(torch::serialize::InputArchive& archive) const;
  // The same for the parameters of one owner. Throws kInvalidArgument if it owns none.
  void save(torch::serialize::OutputArchive& archive, const std::string& owner) const;
  void load(torch::serialize::InputArchive& archive, const std::string& owner) const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace convoy
