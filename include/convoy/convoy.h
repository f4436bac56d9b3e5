#pragma once

// Includes all public headers. Slow to compile: include single headers where that matters.

// Errors, deadlines, the flight record, the store and the launcher's environment.
#include "convoy/deadline.h"
#include "convoy/error.h"
#include "convoy/flight.h"
#include "convoy/rendezvous.h"
#include "convoy/store.h"
#include "convoy/version.h"

// Tensor memory.
#include "convoy/allocator.h"

// Process groups.
#include "convoy/event.h"
#include "convoy/group.h"
#include "convoy/init.h"
#include "convoy/mpi.h"
#include "convoy/nn.h"
#include "convoy/window.h"
#include "convoy/work.h"

// Sharing tensors between processes.
#include "convoy/process_pool.h"
#include "convoy/published.h"
#include "convoy/queue.h"
#include "convoy/share.h"
#include "convoy/slots.h"
#include "convoy/spawn.h"
#include "convoy/values.h"

// Data parallel training.
#include "convoy/averager.h"
#include "convoy/ddp.h"
#include "convoy/ddp_stats.h"
#include "convoy/elastic.h"
#include "convoy/hooks.h"
#include "convoy/join.h"
#include "convoy/mixed_precision.h"
#include "convoy/optimizer_in_backward.h"
#include "convoy/optimizer_rules.h"
#include "convoy/reducer.h"
#include "convoy/sharded_optimizer.h"
#include "convoy/sync_batch_norm.h"
#include "convoy/tensors_in.h"

// RPC.
#include "convoy/rpc.h"

// Distributed autograd, optimizer and pipeline.
#include "convoy/autograd.h"
#include "convoy/distributed_optimizer.h"
#include "convoy/pipeline.h"
