#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "autograd/pass.h"
#include "autograd/wire.h"
#include "convoy/autograd.h"

namespace convoy::autograd::detail {

// The root's side of a backward pass: finds out who takes part, hears of their ends, and decides.
// run() is one thread's; the rest is called from any.
class Coordinator : public std::enable_shared_from_this<Coordinator> {
 public:
  Coordinator(std::shared_ptr<ContextState> context, const BackwardOptions& options);

  // Blocks until the gradients are where they belong. Throws: nothing was added anywhere.
  void run(const std::vector<torch::autograd::Edge>& roots, std::vector<at::Tensor> gradients);

  const PassId& id() const { return id_; }
  void done(WorkerId worker, const std::vector<WorkerId>& engaged);
  // The first one counts; none after the decision.
  void failed(const PassError& error);
  void lost(WorkerId worker, const std::string& why);
  // Of one that gradients went to.
  void participant_lost(WorkerId worker, const std::string& why);

 private:
  void run_after_discovery(const std::vector<torch::autograd::Edge>& roots,
                           std::vector<at::Tensor>&& gradients);
  void spread(std::vector<Ports>&& ports);
  void heard(WorkerId worker, const rpc::Future<std::vector<Ports>>& answer) noexcept;
  void wait_for_all();
  void commit();
  struct Aborted {
    std::string waiting;                  // who waited for what
    std::map<WorkerId, Stepped> stepped;  // of those who have answered
  };
  // Tells everybody.
  Aborted abort_all(const std::string& why) noexcept;
  // " [stepped: worker1; not stepped: worker2]", of a pass with optimizers.
  std::string who_stepped(const Aborted& aborted) const;
  [[noreturn]] void throw_failure(const PassError& error);
  void check();
  bool has_failed() const;
  template <class Ready>
  void wait(Ready ready);
  std::string who_is_missing() const;

  const std::shared_ptr<ContextState> context_;
  Registry& registry_;
  const bool fast_;
  const bool steps_;  // it has optimizers
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<Pass> pass_;
  PassId id_;

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::set<WorkerId> participants_;
  std::set<WorkerId> done_;
  std::map<WorkerId, std::string> lost_;
  std::map<WorkerId, std::uint32_t> batches_;
  std::size_t open_ = 0;  // questions
  std::optional<PassError> error_;
  bool decided_ = false;  // it went well
};

}  // namespace convoy::autograd::detail
