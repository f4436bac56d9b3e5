#include "pipeline/schedule.h"

#include <algorithm>

namespace convoy {

using Kind = PipelineSpan::Kind;

std::vector<PipelineOp> forward_ops(int micro_batches) {
  std::vector<PipelineOp> ops;
  for (int i = 0; i < micro_batches; ++i) ops.push_back({Kind::kForward, i});
  return ops;
}

std::vector<PipelineOp> pipeline_ops(PipelineSchedule schedule, std::size_t stage,
                                     std::size_t stages, int micro_batches) {
  if (schedule == PipelineSchedule::kGPipe) {
    auto ops = forward_ops(micro_batches);
    for (int i = 0; i < micro_batches; ++i) ops.push_back({Kind::kBackward, i});
    return ops;
  }
  // So many forwards that the first one's gradient comes back when the last of them is done; from
  // then on a backward makes room for a forward.
  const int ahead = std::min(micro_batches, static_cast<int>(stages - stage));
  auto ops = forward_ops(ahead);
  for (int i = 0; i < micro_batches; ++i) {
    ops.push_back({Kind::kBackward, i});
    if (ahead + i < micro_batches) ops.push_back({Kind::kForward, ahead + i});
  }
  return ops;
}

}  // namespace convoy
