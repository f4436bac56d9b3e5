// The queue with steps at which tests end it.
#include "queue_steps.h"

#define CONVOY_QUEUE_STEP(where) convoy::share::test::QueueSteps::reached(where)

#include "share/queue_memory.cpp"  // NOLINT(bugprone-suspicious-include)
#include "share/queue_repair.cpp"  // NOLINT(bugprone-suspicious-include)
