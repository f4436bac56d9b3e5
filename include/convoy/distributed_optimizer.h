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

// Steps of parameters that live on several workers.
//
//   convoy::DistributedOptimizer sgd(rpc, parameters, convoy::Sgd{.lr = 0.05});  // RRefs
//   convoy::autograd::Context context(rpc);
//   ...
//   context.backward({loss});
//   sgd.step(context);                       // at each owner, with the context's gradients
//
// See docs/reference/optim.md.
namespace convoy {

// Parameters that are treated alike, wherever they are.
struct DistributedGroup {
  std::vector<RRef<at::Tensor>> parameters;
  OptimizerRule rule;
  // Of the parameters, for errors; empty: their numbers.
  std::vector<std::string> names = {};

  // By name, as RemoteModule::named_parameters() has them.
  static DistributedGroup named(const std::map<std::string, RRef<at::Tensor>>& parameters,
                                const OptimizerRule& rule);
};

// What became of a step at one owner. There all of its parameters are stepped, or none.
struct OwnerStep {
  enum class State {
    kStepped,
    kNotStepped,  // it failed there; nothing was changed
    kUnknown,     // the owner was lost, or did not answer in time
  };

  std::string worker;
  State state = State::kUnknown;
  std::size_t stepped = 0;  // parameters
  std::size_t skipped = 0;  // parameters that the context has no gradient for
  std::string error = {};   // empty: kStepped
};

// A step that failed somewhere: worker() is the first owner on which it did, owners() tells all.
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
  // Of each call to an owner: a duration (0: never) or a Deadline; not set: the session's.
  Timeout timeout = {};
};

// One optimizer at each owner of its parameters, made over RPC. Gradients are those of a
// distributed autograd context; `.grad` is neither read nor written. Several optimizers may have
// the same parameters, one for each trainer for example: steps that share a parameter take turns,
// others run beside each other. Calls of forward that run meanwhile may see a parameter half
// stepped.
//
// Copies are the same optimizer. Thread-safe. It may outlive its session, and is of no use then.
class DistributedOptimizer {
 public:
  // Blocks until all owners have made theirs. Parameters are leaves of f32, f64 or their complex
  // types. Throws rpc::RemoteError with the owner and the parameter: what its creation threw,
  // kRemote for a tensor that is no such parameter or is in the list twice, kPeerLost, kTimeout;
  // Error kInvalidArgument for a rule whose values have no meaning.
  DistributedOptimizer(const rpc::Session& session, std::vector<RRef<at::Tensor>> parameters,
                       const OptimizerRule& rule, const DistributedOptimizerOptions& options = {});
  DistributedOptimizer(const rpc::Session& session, const std::vector<DistributedGroup>& groups,
                       const DistributedOptimizerOptions& options = {});

  // Steps all parameters that the context has gradients for; the others stay as they are, with what
  // the rule keeps of them. Blocks until all owners have answered. Throws StepError; Error
  // kInvalidArgument for a context that was released, or of another session.
  std::vector<OwnerStep> step(const autograd::ContextRef& context) const;

  // For BackwardOptions::optimizers: each owner steps as soon as its part of the pass is done, and
  // its answer comes with the end of that. One round trip less; but a pass that fails may have
  // stepped some owners, which its error names.
  autograd::StepId in_backward() const;

  // From the next step on; of all groups, or of one. Goes with that step.
  void set_lr(double lr) const;
  void set_lr(std::size_t group, double lr) const;
  // Of the same kind as it was. kInvalidArgument.
  void set_rule(std::size_t group, const OptimizerRule& rule) const;
  OptimizerRule rule(std::size_t group = 0) const;
  std::size_t groups() const;
  std::vector<std::string> owners() const;  // names of workers

  // What it keeps for each parameter, and numbers of steps; rules are not part of it. By number of
  // the parameter, in the order of groups: parameters may have other owners when it is loaded.
  void save(torch::serialize::OutputArchive& archive) const;
  // kInvalidArgument if it is of other parameters or rules: nothing is changed then. StepError if
  // an owner is lost meanwhile.
  void load(torch::serialize::InputArchive& archive) const;
  // Of one owner's parameters.
  void save(torch::serialize::OutputArchive& archive, const std::string& owner) const;
  void load(torch::serialize::InputArchive& archive, const std::string& owner) const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace convoy
