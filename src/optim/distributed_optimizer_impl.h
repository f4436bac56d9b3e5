#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/guarded.h"
#include "convoy/distributed_optimizer.h"
#include "optim/local_optimizer.h"

namespace convoy {

inline constexpr const char* kDistributed = "DistributedOptimizer";

template <class... Text>
[[noreturn]] void refuse_distributed(const Text&... text) {
  fail(ErrorKind::kInvalidArgument, kDistributed, ": ", text...);
}

// What is thrown of an owner's error.
struct OwnerFailure {
  ErrorKind kind = ErrorKind::kRemote;
  std::string text;
  std::string type;
};
OwnerFailure failure_of(const std::exception_ptr& thrown);

// Thread-safe, as DistributedOptimizer is.
class DistributedOptimizer::Impl {
 public:
  Impl(const rpc::Session& session, const std::vector<DistributedGroup>& groups,
       const DistributedOptimizerOptions& options);

  std::vector<OwnerStep> step(const autograd::ContextRef& context);
  autograd::StepId in_backward();
  void change_rules(const std::function<void(std::vector<OptimizerRule>&)>& change);
  std::vector<OptimizerRule> rules() { return rules_.lock()->list.rules; }
  std::vector<std::string> owners() const;
  // Of these owners; all, if there is no name.
  void save(torch::serialize::OutputArchive& archive, const std::string& owner) const;
  void load(torch::serialize::InputArchive& archive, const std::string& owner);

 private:
  struct Owner {
    rpc::WorkerInfo worker;
    std::vector<detail::OwnedParameter> parameters;
    detail::LocalOptimizerPtr here;             // this worker's
    RRef<detail::LocalOptimizerPtr> reference;  // another's
  };
  struct Rules {
    detail::RuleList list;
    std::vector<std::uint64_t> known;  // the version that each owner has
  };

  void check(const std::vector<DistributedGroup>& groups) const;
  void make_owners(const std::vector<DistributedGroup>& groups);
  void make_optimizers();
  // What is done at an owner: a call there, the same here, and what it ended with.
  struct AtOwner {
    std::function<rpc::Future<detail::LocalStep>(const rpc::RRefTarget<detail::LocalOptimizerPtr>&,
                                                 std::size_t)>
        start;
    std::function<detail::LocalStep(detail::LocalOptimizer&, std::size_t)> here;
    std::function<void(OwnerStep&, std::size_t, const detail::LocalStep&)> note;
  };
  // At all of these owners at once: those of others first. Throws StepError with what each of them
  // did; `done` is the word for it.
  std::vector<OwnerStep> at_owners(const std::vector<std::size_t>& which, const char* doing,
                                   const char* done, const AtOwner& what);
  std::vector<std::size_t> owners_named(const std::string& owner) const;
  std::vector<detail::KeptOfParameter> kept_of(const std::string& owner,
                                               detail::LocalOptimizer::Kept with) const;
  rpc::CallOptions call_options() const {
    rpc::CallOptions options;
    options.timeout = options_.timeout;
    options.stays = true;
    return options;
  }

  const rpc::Session session_;
  const autograd::StepId id_;
  const DistributedOptimizerOptions options_;
  std::vector<Owner> owners_;
  Guarded<Rules> rules_;
};

}  // namespace convoy
