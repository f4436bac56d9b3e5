#pragma once

#include <cstddef>
#include <vector>

#include "convoy/pipeline.h"

namespace convoy {

struct PipelineOp {
  PipelineSpan::Kind kind;
  int micro_batch;

  friend bool operator==(const PipelineOp&, const PipelineOp&) = default;
};

// What stage `stage` of `stages` does, one after the other. Each stage comes to backwards in the
// same order, 0, 1, ..., and so do all schedules: sums of gradients are the same.
std::vector<PipelineOp> pipeline_ops(PipelineSchedule schedule, std::size_t stage,
                                     std::size_t stages, int micro_batches);
// Forwards only.
std::vector<PipelineOp> forward_ops(int micro_batches);

}  // namespace convoy
