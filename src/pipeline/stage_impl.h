#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "pipeline/stage_run.h"

namespace convoy {

// The stage's thread does one thing at a time; calls of others only leave tensors for it. Steps
// that were begun wait until those before have ended.
class PipelineStage::Impl : public std::enable_shared_from_this<PipelineStage::Impl> {
 public:
  Impl(Forward forward, std::vector<at::Tensor> parameters, Loss loss);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // Once, when it is owned by a shared_ptr; and when nobody refers to the stage any more.
  void start();
  void close() noexcept;

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::string last_error() const;

  // As the functions of messages.h.
  void begin(const detail::StagePlan& plan, const rpc::Session& session, int driver);
  std::shared_ptr<StageRun> find(std::uint64_t step) const;  // nullptr: it is in no such step
  void abort(std::uint64_t step, const std::exception_ptr& error);
  void commit(std::uint64_t step);

 private:
  using RunPtr = std::shared_ptr<StageRun>;

  void fail_all();
  void driver_lost(int driver, const Error& error);
  void work(const std::stop_token& stop);
  void execute(const RunPtr& run);
  void forward(const RunPtr& run, int micro_batch);
  void backward(const RunPtr& run, int micro_batch);

  const Forward forward_;
  const std::vector<at::Tensor> parameters_;
  const Loss loss_;
  mutable std::mutex mutex_;
  std::condition_variable_any changed_;
  // Guarded by mutex_:
  std::map<std::uint64_t, RunPtr> runs_;  // until they are committed or aborted
  std::deque<RunPtr> queue_;              // in the order in which they were begun
  std::set<std::uint64_t> aborted_;       // steps that were not here then
  std::set<int> watched_;                 // drivers whose loss is told
  std::string last_error_;
  std::jthread thread_;
};

}  // namespace convoy
