#pragma once

#include "launch/options.h"

namespace convoy::launch {

// `convoy record`: what the ranks of a running job did last; without a job, which ones run. Returns
// the exit status.
int run_record(const RecordOptions& options);

}  // namespace convoy::launch
