#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>
#include <string>
#include <vector>

#include "convoy/reducer.h"
#include "ddp/parameter_state.h"

// Reducers in distributed backward passes, whose gradients belong to a context and not into
// `.grad`. autograd implements what is declared here. (PyTorch's reducer has an RpcContext for
// this.)
//
// A reducer works on `.grad`. So a pass *lends* it one: before the pass adds the first gradient of
// its parameters, their `.grad`, and what the reducer knows of each, become those of the context.
// When the engine has run, what is there is taken for the context, and all is put back as it was.
namespace convoy {

// What a context has of one reducer's parameters between two passes.
struct ContextGradients {
  std::vector<at::Tensor> gradients;       // by parameter; undefined: none
  std::vector<GradientHistory> histories;  // empty: there was no pass yet
};

// Of a reducer, in the order of ContextGradients.
const std::vector<at::Tensor>& parameters_of(const Reducer::Impl& reducer);
// True while this process has a reducer: without one there is nothing to look for.
bool has_reducers();

// On the accumulators of parameters.
class ReducerHook : public torch::autograd::FunctionPostHook {
 public:
  virtual std::shared_ptr<Reducer::Impl> reducer() const = 0;  // nullptr: it is gone
};

// From its construction to its end `.grad` is the context's. One at a time for a reducer, outside
// of its backwards: kInvalidArgument. kUnsupported with a sharded optimizer, which takes gradients
// from
// `.grad` in its own time.
class GradientLoan {
 public:
  GradientLoan(std::shared_ptr<Reducer::Impl> reducer, const ContextGradients& context);
  GradientLoan(const GradientLoan&) = delete;
  GradientLoan& operator=(const GradientLoan&) = delete;
  ~GradientLoan();

  // What the context is to have; not in buckets any more.
  ContextGradients take() const;

 private:
  const std::shared_ptr<Reducer::Impl> reducer_;
};

// The pass that this thread runs, as reducers see it.
class GradientHome {
 public:
  // nullptr: none, or it is another backward that this thread runs just now.
  static GradientHome* current();

  virtual ~GradientHome() = default;
  virtual bool is_current() const = 0;
  // Unless it has a loan for this one already.
  virtual void lend(const std::shared_ptr<Reducer::Impl>& reducer) = 0;
  // Why it does not go on; empty: it does.
  virtual std::string given_up() const = 0;

  class Scope {
   public:
    explicit Scope(GradientHome& home);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    GradientHome* const before_;
  };
};

}  // namespace convoy
