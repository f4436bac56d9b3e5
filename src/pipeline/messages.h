#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "convoy/fields.h"
#include "convoy/pipeline.h"

// What the workers of a pipeline call of each other. A step has a number that is unique in the
// session. What comes for a step that is over is ignored.
namespace convoy::detail {

// What one stage has to do in a step.
struct StagePlan {
  std::uint64_t step = 0;
  std::uint64_t index = 0, stages = 1;
  std::int32_t micro_batches = 1;
  std::int32_t schedule = 0;  // PipelineSchedule
  bool trains = true;
  std::int64_t timeout_ns = 0;
  std::vector<double> weights = {};  // of the micro-batches' losses
  std::optional<RRef<PipelineStage>> previous = {}, next = {};
  CONVOY_FIELDS(step, index, stages, micro_batches, schedule, trains, timeout_ns, weights, previous,
                next)
};

struct StageReport {
  at::Tensor loss = {};                  // of the last stage
  std::vector<at::Tensor> outputs = {};  // of the last stage, without a loss
  std::vector<std::int64_t> times = {};  // by op, in their order: begin and end, in ns
  CONVOY_FIELDS(loss, outputs, times)
};

enum class StageInput : std::int32_t { kActivation, kGradient, kTarget };

void begin_step(PipelineStage& stage, const StagePlan& plan);
// Ends when the stage is through with it.
rpc::Future<StageReport> end_of_step(PipelineStage& stage, std::uint64_t step);
void take_input(PipelineStage& stage, std::uint64_t step, std::int32_t kind,
                std::int32_t micro_batch, const at::Tensor& tensor);
// Nothing is added; what waits for it ends with this error.
void abort_step(PipelineStage& stage, std::uint64_t step, std::int32_t kind,
                const std::string& text);
// All stages are through: gradients are added.
void commit_step(PipelineStage& stage, std::uint64_t step);
std::vector<RRef<at::Tensor>> stage_parameters(PipelineStage& stage);

}  // namespace convoy::detail
